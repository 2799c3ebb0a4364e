"""`culm stats`: runs, tokens and cost in a directory."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import click

from culm.cli.names import short_ids
from culm.cli.options import ServerTarget, at_own_server, json_option
from culm.cli.render.text import fitted_table
from culm.cli.server import visit
from culm.cli.terminal.process import output_width, print_json, print_output, require_output
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.wire.queries import DAYS_MAX
from culm.wire.runs import Stats, Usage

HEAD = ("runs", "input", "output", "cost")
ESTIMATED = "~"  # Marks a number of tokens that no provider has counted.


@click.command()
@click.option(
    "--days",
    type=click.IntRange(0, DAYS_MAX),
    default=30,
    show_default=True,
    help="Number of days, including today; 0 means all.",
)
@json_option
@at_own_server
def stats(days: int, as_json: bool, where: ServerTarget) -> None:
    """Show runs, tokens and cost by model, day and session.

    Runs of agents are counted once, in the session that they worked for; only the costliest
    sessions are listed. "~" marks estimated tokens. Deleted sessions are not included, and the cost
    of a title appears only in the cost of its session.

    \b
    Example:
      culm stats
      culm stats --days 7
      culm stats --days 0 --json
    """
    require_output()

    async def read(workspace: RemoteWorkspace) -> Stats:
        return await workspace.stats(days, utc_offset_s())

    found = visit(where, read)
    if as_json:
        print_json(found)
    elif found.total.runs:
        print_output("\n".join(stats_lines(found, days, output_width() or None)) + "\n")
    else:
        click.echo(f"no usage here{_in_days(days)}", err=True)


def utc_offset_s() -> int:
    """The current offset of the local time zone from UTC."""
    offset = datetime.fromtimestamp(LoopClock().now_s()).astimezone().utcoffset()
    return 0 if offset is None else int(offset.total_seconds())


def stats_lines(stats: Stats, days: int, width: int | None) -> Iterator[str]:
    """All parts as tables, each with its widest column last."""
    models = [(one, "/".join(filter(None, (one.provider, one.model)))) for one in stats.models]
    short = short_ids([one.session_id for one in stats.sessions])
    sessions = [(one, f"{short[one.session_id]} {one.title}") for one in stats.sessions]
    total = [(stats.total, f"total{_in_days(days)}")]
    yield from _part("model", [*models, *total], width)
    yield ""
    yield from _part("day", [(one, one.day) for one in stats.days], width)
    yield ""
    yield from _part("costliest sessions", sessions, width)
    if stats.total.estimated_runs:
        yield ""
        yield f"{ESTIMATED} estimated: no provider has counted it"


def _part(title: str, rows: Sequence[tuple[Usage, str]], width: int | None) -> list[str]:
    cells = [(*HEAD, title), *((*usage_cells(usage), name) for usage, name in rows)]
    return fitted_table(cells, width, right=(0, 1, 2, 3), spare=(0, 2, 1))


def usage_cells(usage: Usage) -> tuple[str, str, str, str]:
    mark = ESTIMATED if usage.estimated_runs else ""
    return (
        f"{usage.runs:,}",
        f"{mark}{usage.prompt_tokens:,}",
        f"{mark}{usage.completion_tokens:,}",
        f"${usage.cost:.4f}",
    )


def _in_days(days: int) -> str:
    return {0: "", 1: ", today"}.get(days, f", in {days:,} days")
