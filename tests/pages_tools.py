"""The tables of arguments, limits and read-only commands in the pages about tools and permissions.

Generated from the tools themselves, so that the numbers on a page are always right.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from culm.permission import asks, gate, hooks
from culm.processes import base as processes_base
from culm.processes import shim, supervised
from culm.run import loop
from culm.shell.table import table_markdown
from culm.tools import (
    arguments,
    bash,
    download,
    fetch,
    glob,
    grep,
    job_output,
    ls,
    multiedit,
    registry,
    todos,
    view,
)
from culm.tools import own_tools as own
from culm.tools.base import Tool, ToolContext
from culm.tools.files import change as changing
from culm.tools.files import file_executor as work
from culm.tools.files import safe_open as opening
from culm.tools.files.paths import WorkspacePaths
from culm.tools.process import jobs, output, running
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.search import process as search
from culm.tools.search import ripgrep
from culm.tools.web import http_fetch as getting
from culm.wire.codec import Json

_KINDS = {"string": "text", "boolean": "true or false", "array": "list", "object": "object"}


@cache
def _tools() -> dict[str, Tool]:
    """Return culm's own tools. They are only inspected, so they get no services."""
    nothing = cast("Any", None)
    context = ToolContext(
        "", WorkspacePaths(Path("/")), nothing, nothing, nothing, nothing, nothing, dict, Path("/")
    )
    made = registry.make_tools(context, BackgroundJobs(nothing))
    return {name: tool for name, tool in made.items() if type(tool).__module__.startswith("culm.")}


def tool(name: str) -> str:
    """Return the arguments of a tool, and how it is called."""
    one = _tools()[name]
    together = "Runs in parallel" if one.parallel else "Runs alone"
    lines = ["| argument | | |", "| --- | --- | --- |", *_rows(one.spec.parameters, "")]
    return "\n".join([*lines, "", f"{together}. After a crash: `{one.crash}`."])


def _rows(schema: Json, above: str) -> Iterator[str]:
    fields = cast("dict[str, Any]", schema)
    for name, about in fields["properties"].items():
        is_required = name in fields.get("required", ())
        kind = f"{_kind(about)}{', required' if is_required else ''}"
        yield f"| `{above}{name}` | {kind} | {about.get('description', '')} |"
        items = about.get("items", {})
        if "properties" in items:
            yield from _rows(items, f"{above}{name}[].")


def _kind(about: dict[str, Any]) -> str:
    if "enum" in about:
        return ", ".join(f"`{one}`" for one in sorted(about["enum"]))
    if about["type"] == "integer":
        most = f", at most {about['maximum']:,}" if "maximum" in about else ""
        return f"whole number{most}"
    most = about.get("maxLength") or about.get("maxItems")
    unit = " characters" if about["type"] == "string" else ""
    return f"{_KINDS[about['type']]}{f', at most {most:,}{unit}' if most else ''}"


# --- limits


def _size(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift and not count % (1 << shift):
            return f"{count >> shift:,} {unit}"
    return f"{count:,} bytes"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.12g} s"


def tool_bounds() -> str:
    rows = (
        ("any", "a result", f"{loop.RESULT_CHARS_MAX:,} characters, then it is cut"),
        ("any", "parallel calls of one step", f"{loop.PARALLEL_MAX}"),
        ("any", "a path", f"{arguments.PATH_CHARS_MAX:,} characters, {opening.DEPTH_MAX} deep"),
        ("file tools", "one call", f"{_seconds(work.WALL_S)}, then it returns a partial result"),
        ("`bash`", "a command", _size(running.COMMAND_BYTES_MAX)),
        ("`bash`", "in the foreground", f"{_seconds(bash.FOREGROUND_S)}, then it is a job"),
        ("`bash`", "the longest timeout", _seconds(bash.SECONDS_MAX)),
        (
            "`bash`",
            "output in the result",
            f"{_size(output.MODEL_BYTES_MAX)}, half of it from the end",
        ),
        ("`bash`", "output in a file", _size(output.FILE_BYTES_MAX)),
        (
            "`bash`",
            "output files of a workspace",
            f"{output.FILES_MAX}, {_size(output.FOLDER_BYTES_MAX)} in total, then the oldest go",
        ),
        ("`bash`", "output shown while it runs", _size(running.LIVE_BYTES_MAX)),
        ("jobs", "running in a workspace", f"{jobs.RUNNING_MAX}"),
        ("jobs", "kept after their end", f"{jobs.FINISHED_MAX}, the oldest are removed"),
        ("`job_output`", "with `wait`", _seconds(job_output.WAIT_S)),
        ("`view`", "lines without a limit", f"{view.LINES:,}, each {view.LINE_CHARS_MAX:,} long"),
        ("`view`", "a result", _size(view.RESULT_BYTES_MAX)),
        ("`view`", "a file without a range; an image", _size(view.WHOLE_BYTES_MAX)),
        ("`write`, `edit`, `multiedit`", "a file", _size(changing.FILE_BYTES_MAX)),
        (
            "`write`, `edit`, `multiedit`",
            "a version in the history",
            f"{changing.HISTORY_CHARS_MAX:,} characters; larger files are not stored",
        ),
        ("`multiedit`", "edits", f"{multiedit.EDITS_MAX}"),
        (
            "`ls`",
            "entries; names read from a directory",
            f"{ls.ENTRIES_MAX:,}; {opening.NAMES_MAX:,}",
        ),
        ("`glob`", "paths", f"{glob.FILES_MAX}, the newest"),
        ("`grep`", "lines; of a line", f"{grep.MATCHES_MAX}; {search.LINE_CHARS_SHOWN} characters"),
        (
            "`grep`",
            "a file",
            f"{_size(ripgrep.FILE_BYTES_MAX)}; {_size(search.FILE_BYTES_MAX)} without ripgrep",
        ),
        (
            "`fetch`, `download`",
            "in total",
            f"{getting.TIMEOUT_S} s by default, at most {_seconds(getting.TIMEOUT_MAX_S)}",
        ),
        ("`fetch`, `download`", "DNS lookup", _seconds(getting.LOOKUP_S)),
        ("`fetch`, `download`", "redirects", f"{getting.REDIRECTS_MAX}"),
        ("`fetch`", "a body", _size(fetch.BODY_BYTES_MAX)),
        ("`fetch`", "a result", f"{fetch.TEXT_CHARS_MAX:,} characters"),
        ("`download`", "a file", _size(download.FILE_BYTES_MAX)),
        ("`todos`", "steps", f"{todos.TODOS_MAX}"),
        ("`!command`", "time; output", _bounds_of_shell()),
        ("tools of packages", "in total", f"{registry.TOOLS_MAX}"),
        ("your own tools", "output", _size(own.OUTPUT_BYTES_MAX)),
    )
    return _table("what", rows)


def _bounds_of_shell() -> str:
    return f"{_seconds(running.WALL_S)}; {_size(running.SHOWN_BYTES_MAX)}"


def process_bounds() -> str:
    return _table(
        "when",
        (
            ("all", "commands at once", f"{supervised.PROCESSES_MAX}"),
            ("start", "until the command runs", _seconds(supervised.START_BOUND_S)),
            ("end of a command", "grace period of the processes it left", _seconds(shim.SETTLE_S)),
            ("end of a command", "then between SIGTERM and SIGKILL", _seconds(shim.SWEEP_GRACE_S)),
            ("kill", "between SIGTERM and SIGKILL", _seconds(processes_base.KILL_GRACE_S)),
            ("kill", "in total, with verification", _seconds(processes_base.KILL_BOUND_S)),
            ("a supervisor that hangs", "is replaced after", _seconds(supervised.LOSS_BOUND_S)),
        ),
    )


def permission_bounds() -> str:
    return _table(
        "what",
        (
            (
                "open asks of a workspace",
                "permissions, and as many question batches",
                f"{asks.ASKS_MAX}",
            ),
            ("an ask of a headless run", "waits for", _seconds(gate.HEADLESS_WAIT_S)),
            ("a hook", "default time-out", _seconds(hooks.HOOK_S)),
            ("a hook", "output", _size(hooks.OUTPUT_BYTES_MAX)),
            ("hooks", "at once in a workspace", f"{hooks.HOOKS_AT_ONCE}"),
        ),
    )


def _table(head: str, rows: tuple[tuple[str, str, str], ...]) -> str:
    lines = [f"| {of} | {what} | {limit} |" for of, what, limit in rows]
    return "\n".join([f"| {head} | | limit |", "| --- | --- | --- |", *lines])


SECTIONS: dict[str, Callable[[], str]] = {
    **{f"tool_{name}": partial(tool, name) for name in _tools()},
    "tool_bounds": tool_bounds,
    "process_bounds": process_bounds,
    "permission_bounds": permission_bounds,
    "read_only_commands": table_markdown,
}
