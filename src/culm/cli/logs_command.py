"""The options of `culm logs`. What it needs is imported when it runs."""

import click

LEVELS = ("debug", "info", "warning", "error", "critical")


@click.command()
@click.argument("text", required=False, default="", metavar="[TEXT]")
@click.option(
    "--lines",
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="So many entries, the last ones.",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what is logged from now on.")
@click.option(
    "--level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="debug",
    help="Only what is at least that grave.",
)
@click.pass_context
def logs(
    ctx: click.Context,
    text: str,
    count: int,
    follow: bool,  # noqa: FBT001 - click passes by name
    level: str,
) -> None:
    """Show what your server has logged, the latest last; with TEXT, only what has it.

    An entry stays whole, with its traceback. The log is culm.log in $XDG_STATE_HOME/culm, or in
    ~/.local/state/culm; files that were moved aside there are read, too.

    \b
    Example:
      culm logs
      culm logs -f --level warning
      culm logs -n 5 'cannot start'
    """
    import logging
    import os

    from culm.cli.log_entries import LogFilter
    from culm.cli.logs import show_logs
    from culm.settings import default_state_dir

    least = logging.getLevelNamesMapping()[level.upper()]
    wish = LogFilter(0 if level.lower() == "debug" else least, text)
    file = default_state_dir(os.environ) / "culm.log"
    ctx.exit(show_logs(file, wish, count, follow=follow))
