"""A call and what came of it, as a person reads it: few lines, bounded, nothing a terminal obeys.

Pure, from what the wire has to lines of text.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from culm.cli.rules import arguments_of
from culm.wire.codec import Json, printable
from culm.wire.messages import ToolCall, ToolResult

HEAD_CHARS = 200  # Of a call's input or an error, on one line.
LINES_MAX = 12  # Of what one call put out or changed ...
LINES_LAST = 3  # ... with its end, where a command says how it went.
DIFF_CHARS_MAX = 50_000  # Comparing more takes longer than a person looks at it.
ASSIGNMENTS_SHOWN_MAX = 10  # More are not read on one line.
MARGIN = "  | "

# All but tab and newline; and what turns the direction of reading, or is half a character.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The arguments that say what a call is about.
_TELLING: Mapping[str, tuple[str, ...]] = {
    "bash": ("command",),
    "view": ("file_path",),
    "ls": ("path",),
    "glob": ("pattern", "path"),
    "grep": ("pattern", "path", "include"),
    "edit": ("file_path",),
    "multiedit": ("file_path",),
    "write": ("file_path",),
    "fetch": ("url",),
    "download": ("url", "file_path"),
    "job_output": ("shell_id",),
    "job_kill": ("shell_id",),
    "agent": ("prompt",),
    "agent_send": ("agent", "message"),
    "mail": ("action", "to", "letter", "text"),
}


class _Change(Struct):
    """What a tool that changes files tells about a result."""

    additions: int | None = None
    removals: int | None = None
    old_content: str = ""
    new_content: str = ""
    diff: str = ""


def without_controls(text: str) -> str:
    return _CONTROL.sub("", text)


def head_of(text: str) -> str:
    """The beginning of a text, on one line that no terminal obeys."""
    words = without_controls(" ".join(text[: 2 * HEAD_CHARS].split()))
    return words if len(words) <= HEAD_CHARS else words[: HEAD_CHARS - 1] + "…"


def call_line(call: ToolCall) -> str:
    """What is called, and with what."""
    given = arguments_of(call.input)
    assignments = given.get("assignments")
    if call.name == "agent" and isinstance(assignments, list):
        several = cast("list[Json]", assignments)
        told = [f"{len(several):,}:", "; ".join(map(_task_of, several[:ASSIGNMENTS_SHOWN_MAX]))]
    else:
        values = [given.get(name) for name in _TELLING.get(call.name, ())]
        told = [value for value in values if isinstance(value, str) and value]
    said = " ".join(told) or ("" if call.input == "{}" else call.input)
    return f"→ {printable(call.name)} {head_of(said)}".rstrip()


def _task_of(assignment: Json) -> str:
    match assignment:
        case {"prompt": str(prompt)}:
            return head_of(prompt)
        case _:
            return "?"


def result_lines(result: ToolResult, passed: int = 0) -> Iterator[str]:
    """What came of a call; `passed` lines of it were shown while it ran."""
    if result.is_error:
        yield f"✗ {result.name}: {head_of(result.content)}"
        return
    change = _change_of(result)
    if change.additions is not None and change.removals is not None:
        yield f"← {result.name}: +{change.additions} -{change.removals} lines"
        diff = change.diff.splitlines() or diff_lines(change.old_content, change.new_content)
        yield from block(diff)
    elif result.name == "bash":
        lines = result.content.rstrip("\n").split("\n")
        if len(lines) == 1 and not passed:
            yield f"← bash: {head_of(lines[0])}"
            return
        yield from block(lines, passed)
        yield f"← bash: {len(lines):,} lines"
    else:
        yield f"← {result.name}: {len(result.content):,} chars"


def block(lines: Sequence[str], passed: int = 0) -> Iterator[str]:
    """Lines with a margin, without those that were shown; of many the first and the last."""
    left = lines[passed:]
    room = max(LINES_MAX - passed, LINES_LAST + 1)
    missing = len(left) - room
    if missing > 0:
        yield from map(margined, left[: room - LINES_LAST - 1])
        yield f"{MARGIN}… {missing + 1:,} more lines"
        left = left[-LINES_LAST:]
    yield from map(margined, left)


def margined(line: str) -> str:
    cut = line if len(line) <= HEAD_CHARS else line[: HEAD_CHARS - 1] + "…"
    return f"{MARGIN}{printable(cut.expandtabs(4))}"


def diff_lines(before: str, after: str) -> list[str]:
    """What changes in a text, with a line around it; nothing if that takes too long to find."""
    if max(len(before), len(after)) > DIFF_CHARS_MAX:
        return ["(too much to compare here)"]
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return list(found)[2:]


def _change_of(result: ToolResult) -> _Change:
    try:
        return msgspec.json.decode(result.metadata or "{}", type=_Change)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Change()
