"""`culm stats`: what was used in a directory."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import click

from culm.cli.names import short_ids
from culm.cli.render.printed import put, put_json
from culm.cli.render.tables import table
from culm.cli.server import visit
from culm.cli.server_target import ServerTarget
from culm.cli.terminal.streams import need_output, output_width
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.wire.stats import Stats, Usage

HEAD = ("runs", "input", "output", "cost")
ESTIMATED = "~"  # Before a number of tokens that no provider has counted.


def show_stats(where: ServerTarget, days: int, *, as_json: bool) -> None:
    need_output()

    async def read(workspace: RemoteWorkspace) -> Stats:
        return await workspace.stats(days, utc_offset_s())

    found = visit(where, read)
    if as_json:
        put_json(found)
    elif found.total.runs:
        put("\n".join(stats_lines(found, days, output_width() or None)) + "\n")
    else:
        click.echo(f"nothing was used here{_in_days(days)}", err=True)


def utc_offset_s() -> int:
    """How far the clock of whoever asks is ahead of UTC now."""
    offset = datetime.fromtimestamp(LoopClock().now_s()).astimezone().utcoffset()
    return 0 if offset is None else int(offset.total_seconds())


def stats_lines(stats: Stats, days: int, width: int | None) -> Iterator[str]:
    """All of it, the widest column of each part last."""
    models = [(one, "/".join(filter(None, (one.provider, one.model)))) for one in stats.models]
    short = short_ids([one.session_id for one in stats.sessions])
    sessions = [(one, f"{short[one.session_id]} {one.title}") for one in stats.sessions]
    total = [(stats.total, f"in all{_in_days(days)}")]
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
    return table(cells, width, right=(0, 1, 2, 3), spare=(0, 2, 1))


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
