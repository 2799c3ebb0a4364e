"""The options of `culm stats`. What it needs is imported when it runs."""

from typing import TYPE_CHECKING

import click

from culm.cli.options import at_own_server, json_option

if TYPE_CHECKING:
    from culm.cli.server_target import ServerTarget

DAYS_MAX = 36_600  # As on the wire, which help does without; a test holds it to it.


@click.command()
@click.option(
    "--days",
    type=click.IntRange(0, DAYS_MAX),
    default=30,
    show_default=True,
    help="Of so many days, today included; 0 is all there is.",
)
@json_option
@at_own_server
def stats(
    days: int,
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Show what was used here: runs, tokens and cost by model, by day, and the costliest sessions.

    Runs of agents are counted once, and in the session that they worked for. "~" marks tokens that
    are estimated. What a session that was removed has used is not known any more, and what a title
    costs is part of its session's cost only.

    \b
    Example:
      culm stats
      culm stats --days 7
      culm stats --days 0 --json
    """
    from culm.cli.stats import show_stats

    show_stats(where, days, as_json=as_json)
