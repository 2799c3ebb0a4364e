"""Tool calls and their results as a few bounded lines without control characters.

The functions are pure and turn wire values into lines. `CallNotes` tracks the running calls and how
much of their output was shown; a subclass decides where a line is printed.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from culm.cli.prompt_options import arguments_of, rule_for
from culm.cli.render.text import HEAD_CHARS, head_of
from culm.wire.asks import AskChanged
from culm.wire.codec import Json, printable
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.tools import ToolFacts, ToolInfo

LINES_MAX = 12  # Lines shown of the output or the changes of one call ...
LINES_LAST = 3  # ... including its last ones, where a command reports its result.
DIFF_CHARS_MAX = 50_000  # Comparing more takes longer than a person looks at it.
ITEMS_SHOWN_MAX = 10  # Nobody reads more on one line.
MARGIN = "  | "

# The server's text for refusing a call that nobody is there to approve; a test compares them.
_NOBODY_TO_ASK = "Not allowed: this needs a person's permission"
_PARTIAL_LINE_CHARS_MAX = 1000  # Limit of a line whose end has not arrived.

KnownTools = Mapping[str, ToolInfo]  # By name; other tools are displayed without their facts.
_NO_FACTS = ToolFacts()


class _Change(Struct):
    """The metadata of a result of a tool that changes files."""

    additions: int | None = None
    removals: int | None = None
    old_content: str = ""
    new_content: str = ""
    diff: str = ""


def call_line(call: ToolCall, tools: KnownTools) -> str:
    """The tool and its most important arguments."""
    arguments = arguments_of(call.input)
    names = tools.get(call.name, _NO_FACTS).shown_arguments
    shown = " ".join(filter(None, (_argument_text(arguments.get(name), names) for name in names)))
    text = shown or ("" if call.input == "{}" else call.input)
    return f"→ {printable(call.name)} {head_of(text)}".rstrip()


def _argument_text(value: Json, names: Sequence[str]) -> str:
    """A text as it is; of a list the number of items and the first argument shown of each."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    items = cast("list[Json]", value)
    shown = "; ".join(_item_text(item, names) for item in items[:ITEMS_SHOWN_MAX])
    return f"{len(items):,}: {shown}" if items else ""


def _item_text(item: Json, names: Sequence[str]) -> str:
    if isinstance(item, dict):
        fields = cast("dict[str, Json]", item)
        item = next((fields[name] for name in names if name in fields), None)
    return head_of(item) if isinstance(item, str) else "?"


def result_lines(result: ToolResult, tools: KnownTools, shown: int = 0) -> Iterator[str]:
    """The result of a call, without the first `shown` lines, which were shown while it ran."""
    if result.is_error:
        yield f"✗ {result.name}: {head_of(result.content)}"
        return
    change = _change_of(result)
    if change.additions is not None and change.removals is not None:
        yield f"← {result.name}: +{change.additions} -{change.removals} lines"
        diff = change.diff.splitlines() or diff_lines(change.old_content, change.new_content)
        yield from block(diff)
    elif tools.get(result.name, _NO_FACTS).command_argument:
        lines = result.content.rstrip("\n").split("\n")
        if len(lines) == 1 and not shown:
            yield f"← {result.name}: {head_of(lines[0])}"
            return
        yield from block(lines, shown)
        yield f"← {result.name}: {len(lines):,} lines"
    else:
        yield f"← {result.name}: {len(result.content):,} chars"


def block(lines: Sequence[str], shown: int = 0) -> Iterator[str]:
    """Lines with a margin, without the first `shown`; if there are many, the first and the last."""
    left = lines[shown:]
    room = max(LINES_MAX - shown, LINES_LAST + 1)
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
    """The changes of a text with one line of context, or a note if it is too long to compare."""
    if max(len(before), len(after)) > DIFF_CHARS_MAX:
        return ["(too much to compare here)"]
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    return list(found)[2:]


def _change_of(result: ToolResult) -> _Change:
    try:
        return msgspec.json.decode(result.metadata or "{}", type=_Change)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Change()


class CallNotes(ABC):
    """Reports the progress of calls, one line per step."""

    def __init__(self, tools: KnownTools, *, has_rules: bool = False) -> None:
        self.tools = tools
        self.has_rules = has_rules
        self._calls: dict[str, ToolCall] = {}  # The running calls ...
        # ... and of each the number of lines seen and the line whose end has not arrived.
        self._outputs: dict[str, tuple[int, str]] = {}

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a line to the user."""

    def call(self, call: ToolCall) -> None:
        self._calls[call.id] = call
        self.note(call_line(call, self.tools))

    def output(self, call_id: str, text: str) -> None:
        call = self._calls.get(call_id)
        if call is not None and self.tools.get(call.name, _NO_FACTS).kind == "agent":
            return  # The lines of the agents themselves show more.
        seen, partial = self._outputs.get(call_id, (0, ""))
        *lines, partial = (partial + text).split("\n")
        for line in lines[: max(LINES_MAX - seen, 0)]:
            self.note(margined(line))
        # Output is counted but not stored, because a call may write without end.
        self._outputs[call_id] = seen + len(lines), partial[:_PARTIAL_LINE_CHARS_MAX]

    def result(self, result: ToolResult) -> None:
        call = self._calls.pop(result.tool_call_id, None)
        seen, _ = self._outputs.pop(result.tool_call_id, (0, ""))
        for line in result_lines(result, self.tools, min(seen, LINES_MAX)):
            self.note(line)
        if call is not None and result.is_error and result.content.startswith(_NOBODY_TO_ASK):
            facts = self.tools.get(call.name, _NO_FACTS)
            rule = rule_for(call.name, call.input, facts)
            self.note(f"hint: --approve auto, or --approve {rule}")

    def allowed(self, call: ToolCall) -> None:
        by = "--approve" if self.has_rules else "an earlier answer, or a hook"
        self.note(f"allowed: {call.name}: by {by}")

    def ask(self, ask: AskChanged) -> None:
        self.note(f"? {ask.tool_name}: {head_of(ask.description)}")
        if ask.deadline:
            short = ask.ask_id[:8]
            self.note(f"hint: answer with `culm approve {short}` or `culm deny {short}`")

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self.note(f"{ask.state}: {ask.tool_name}: {closed_by_text(ask, by_us=by_us)}")


def closed_by_text(ask: AskChanged, *, by_us: bool) -> str:
    """The reason why an ask is closed, or the client that answered it."""
    match ask.state:
        case "expired":
            return "nobody answered in time"
        case "withdrawn":
            return "no longer needed"
        case _:
            return "by you" if by_us else "by another client"


def path_text(names: Sequence[str]) -> str:
    """The chain of agents that leads to an ask."""
    return " > ".join(map(head_of, names))
