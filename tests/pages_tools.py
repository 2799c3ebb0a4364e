"""The tables of arguments, bounds and read-only commands in the pages about tools and permissions.

Made from what the tools say of themselves, so that a page cannot promise another number.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from culm.permission import asks, hooks
from culm.permission import gate as gate
from culm.processes import base as processes_base
from culm.processes import process_table as holding
from culm.processes import shim as shim
from culm.run import loop
from culm.shell.table import table_markdown
from culm.tools import (
    arguments,
    bash,
    download,
    entry_points,
    fetch,
    glob,
    grep,
    job_output,
    ls,
    multiedit,
    todos,
    view,
)
from culm.tools import own_tools as own
from culm.tools.base import Tool
from culm.tools.files import change as changing
from culm.tools.files import file_executor as work
from culm.tools.files import safe_open as opening
from culm.tools.files import walk
from culm.tools.files.paths import WorkspacePaths
from culm.tools.process import jobs, output, running
from culm.tools.process import user_command as shell_command
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.registry import make_tools
from culm.tools.search import process as search
from culm.tools.search import ripgrep
from culm.tools.tool_context import ToolContext
from culm.tools.web import http_fetch as getting
from culm.wire.codec import Json

TOOLS = (
    "bash", "download", "edit", "fetch", "glob", "grep", "job_kill", "job_output", "ls",
    "multiedit", "question", "todos", "view", "write",
)  # fmt: skip
_KINDS = {"string": "text", "boolean": "true or false", "array": "list", "object": "object"}


@cache
def _tools() -> dict[str, Tool]:
    """Culm's own. They are only looked at, so what they would work with is not there."""
    nothing = cast("Any", None)
    context = ToolContext(
        "", WorkspacePaths(Path("/")), nothing, nothing, nothing, nothing, nothing, dict, Path("/")
    )
    made = make_tools(context, BackgroundJobs(nothing))
    return {name: tool for name, tool in made.items() if type(tool).__module__.startswith("culm.")}


def tool(name: str) -> str:
    """What one tool takes, and how it is called."""
    one = _tools()[name]
    together = "Runs beside others" if one.parallel else "Runs alone"
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


# --- bounds


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
        ("any", "calls of one step at the same time", f"{loop.PARALLEL_MAX}"),
        ("any", "a path", f"{arguments.PATH_CHARS_MAX:,} characters, {opening.DEPTH_MAX} deep"),
        ("file tools", "one call", f"{_seconds(work.WALL_S)}, then it answers with what it has"),
        ("`bash`", "a command", _size(running.COMMAND_BYTES_MAX)),
        ("`bash`", "in the foreground", f"{_seconds(bash.FOREGROUND_S)}, then it is a job"),
        ("`bash`", "any time it is given", _seconds(bash.SECONDS_MAX)),
        ("`bash`", "output in the result", f"{_size(output.MODEL_BYTES_MAX)}, half of it the end"),
        ("`bash`", "output in a file", _size(output.FILE_BYTES_MAX)),
        (
            "`bash`",
            "such files of a workspace",
            f"{output.FILES_MAX}, {_size(output.FOLDER_BYTES_MAX)} together; the oldest go",
        ),
        ("`bash`", "output shown while it runs", _size(running.LIVE_BYTES_MAX)),
        ("jobs", "running in a workspace", f"{jobs.RUNNING_MAX}"),
        ("jobs", "kept after their end", f"{jobs.FINISHED_MAX}, the oldest go"),
        ("`job_output`", "with `wait`", _seconds(job_output.WAIT_S)),
        ("`view`", "lines without a limit", f"{view.LINES:,}, each {view.LINE_CHARS_MAX:,} long"),
        ("`view`", "a result", _size(view.RESULT_BYTES_MAX)),
        ("`view`", "a file without a range; an image", _size(view.WHOLE_BYTES_MAX)),
        ("`write`, `edit`, `multiedit`", "a file", _size(changing.FILE_BYTES_MAX)),
        (
            "`write`, `edit`, `multiedit`",
            "a version in the history",
            f"{changing.HISTORY_CHARS_MAX:,} characters; of larger files none is kept",
        ),
        ("`multiedit`", "edits", f"{multiedit.EDITS_MAX}"),
        ("`ls`", "entries; names read of a directory", f"{ls.ENTRIES_MAX:,}; {walk.NAMES_MAX:,}"),
        ("`glob`", "paths", f"{glob.FILES_MAX}, the newest"),
        ("`grep`", "lines; of a line", f"{grep.MATCHES_MAX}; {search.LINE_CHARS_SHOWN} characters"),
        (
            "`grep`",
            "a file",
            f"{_size(ripgrep.FILE_BYTES_MAX)}; {_size(search.FILE_BYTES_MAX)} without ripgrep",
        ),
        (
            "`fetch`, `download`",
            "all of it",
            f"{getting.TIMEOUT_S} s unless given, at most {_seconds(getting.TIMEOUT_MAX_S)}",
        ),
        ("`fetch`, `download`", "looking up a name", _seconds(getting.LOOKUP_S)),
        ("`fetch`, `download`", "redirects", f"{getting.REDIRECTS_MAX}"),
        ("`fetch`", "a body", _size(fetch.BODY_BYTES_MAX)),
        ("`fetch`", "a result", f"{fetch.TEXT_CHARS_MAX:,} characters"),
        ("`download`", "a file", _size(download.FILE_BYTES_MAX)),
        ("`todos`", "steps", f"{todos.TODOS_MAX}"),
        ("`!command`", "time; output", _bounds_of_shell()),
        ("tools of packages", "all together", f"{entry_points.TOOLS_MAX}"),
        ("tools of yours", "output", _size(own.OUTPUT_BYTES_MAX)),
    )
    return _table("what", rows)


def _bounds_of_shell() -> str:
    return f"{_seconds(shell_command.WALL_S)}; {_size(shell_command.SHOWN_BYTES_MAX)}"


def processes_bounds() -> str:
    return _table(
        "when",
        (
            ("all", "processes at once", f"{holding.PROCESSES_MAX} orders"),
            ("start", "until it runs", _seconds(holding.START_BOUND_S)),
            ("end of a command", "what it left may end by itself", _seconds(shim.SETTLE_S)),
            ("end of a command", "then asked to end, for", _seconds(shim.SWEEP_GRACE_S)),
            ("kill", "between asking and ending", _seconds(processes_base.KILL_GRACE_S)),
            ("kill", "all of it, verified", _seconds(processes_base.KILL_BOUND_S)),
            ("a hanging keeper", "is replaced after", _seconds(holding.LOSS_BOUND_S)),
        ),
    )


def permission_bounds() -> str:
    return _table(
        "what",
        (
            ("open asks of a workspace", "permissions, and as many batches", f"{asks.ASKS_MAX}"),
            ("an ask of a headless run", "waits for", _seconds(gate.HEADLESS_WAIT_S)),
            ("a hook", "unless it has a time-out", _seconds(hooks.HOOK_S)),
            ("a hook", "output", _size(hooks.OUTPUT_BYTES_MAX)),
            ("hooks", "at once in a workspace", f"{hooks.HOOKS_AT_ONCE}"),
        ),
    )


def _table(head: str, rows: tuple[tuple[str, str, str], ...]) -> str:
    lines = [f"| {of} | {what} | {bound} |" for of, what, bound in rows]
    return "\n".join([f"| {head} | | bound |", "| --- | --- | --- |", *lines])


SECTIONS: dict[str, Callable[[], str]] = {
    **{f"tool_{name}": partial(tool, name) for name in TOOLS},
    "tool_bounds": tool_bounds,
    "custody_bounds": processes_bounds,
    "permission_bounds": permission_bounds,
    "read_only_commands": table_markdown,
}
