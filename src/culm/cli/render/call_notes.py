"""What is told of calls while a run goes on: a line for each thing that happens to one.

Owns which calls go on and how much of their output was shown. Where a line goes is for whoever
tells it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from culm.cli.render.call_lines import LINES_MAX, call_line, head_of, margined, result_lines
from culm.cli.rules import rule_for
from culm.wire.asks import AskChanged
from culm.wire.messages import ToolCall, ToolResult

# How the server refuses what it would have asked somebody who is not there; a test holds it to it.
_ALONE = "Not allowed: this needs a person's permission"
_WITH_AGENTS = ("agent", "agent_wait", "agent_send")  # Who works for it tells more than these do.
_BEGUN_CHARS_MAX = 1000  # Of a line without an end.


class CallNotes(ABC):
    def __init__(self, *, has_rules: bool = False) -> None:
        self.has_rules = has_rules
        self._calls: dict[str, ToolCall] = {}  # Those that go on ...
        self._outputs: dict[str, tuple[int, str]] = {}  # ... lines shown of each, and a begun one.

    @abstractmethod
    def note(self, words: str) -> None:
        """Tell a person."""

    def call(self, call: ToolCall) -> None:
        self._calls[call.id] = call
        self.note(call_line(call))

    def output(self, call_id: str, text: str) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.name in _WITH_AGENTS:
            return
        passed, begun = self._outputs.get(call_id, (0, ""))
        *lines, begun = (begun + text).split("\n")
        for line in lines[: max(LINES_MAX - passed, 0)]:
            self.note(margined(line))
        # What a call puts out without end is counted, and not kept.
        self._outputs[call_id] = passed + len(lines), begun[:_BEGUN_CHARS_MAX]

    def result(self, result: ToolResult) -> None:
        call = self._calls.pop(result.tool_call_id, None)
        passed, _ = self._outputs.pop(result.tool_call_id, (0, ""))
        for line in result_lines(result, min(passed, LINES_MAX)):
            self.note(line)
        if call is not None and result.is_error and result.content.startswith(_ALONE):
            self.note(f"hint: --approve auto, or --approve {rule_for(call.name, call.input)}")

    def allowed(self, call: ToolCall) -> None:
        by = "--approve" if self.has_rules else "an earlier answer, or a hook"
        self.note(f"allowed: {call.name}: by {by}")

    def ask(self, ask: AskChanged) -> None:
        self.note(f"? {ask.tool_name}: {head_of(ask.description)}")
        if ask.deadline:
            short = ask.ask_id[:8]
            self.note(f"hint: `culm approve {short}`, or `culm deny {short}`, answers it")

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self.note(f"{ask.state}: {ask.tool_name}: {closed_by_text(ask, by_us=by_us)}")


def closed_by_text(ask: AskChanged, *, by_us: bool) -> str:
    """Who closed an ask."""
    match ask.state:
        case "expired":
            return "nobody answered in time"
        case "withdrawn":
            return "it is not needed any more"
        case _:
            return "by you" if by_us else "by another client"


def path_text(names: Sequence[str]) -> str:
    """Which agents lead to something that is asked."""
    return " > ".join(map(head_of, names))
