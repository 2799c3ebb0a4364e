"""How one run looks to a person, or to a script: what is printed of it, and where.

Data goes to stdout, all else to stderr.
"""

import sys
from typing import Protocol

from culm.cli.call_lines import (
    LINES_MAX,
    call_line,
    head_of,
    margined,
    result_lines,
    without_controls,
)
from culm.cli.rules import rule_for
from culm.cli.streams import write
from culm.ids import MessageId
from culm.wire.asks import AskChanged
from culm.wire.codec import Json, encode, printable
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run

# How the server refuses what it would have asked somebody who is not there; a test holds it to it.
_ALONE = "Not allowed: this needs a person's permission"


class Face(Protocol):
    """How a run is shown."""

    def text(self, message_id: MessageId, text: str) -> None: ...
    def again(self, message_id: MessageId) -> None:
        """All text of the message is void; it begins anew."""
        ...

    def call(self, call: ToolCall) -> None: ...
    def output(self, call_id: str, text: str) -> None:
        """A call that goes on has put out more."""
        ...

    def result(self, result: ToolResult) -> None: ...
    def allowed(self, call: ToolCall) -> None:
        """A call that needs permission goes ahead, and nobody was asked."""
        ...

    def ask(self, ask: AskChanged) -> None: ...
    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        """What was asked is closed, whoever did it."""
        ...

    def note(self, words: str) -> None: ...
    def end(self, run: Run, text: str) -> None: ...


class Plain:
    """For people: the answer on stdout, one line for everything else on stderr."""

    def __init__(self, *, has_rules: bool = False) -> None:
        self._by = "--approve or --allow" if has_rules else "an earlier answer, or a hook"
        self._in_line = False  # Of stdout.
        self._in_prompt = False  # Somebody is asked to type something.
        self._message_id = ""
        self._is_screen = sys.stdout.isatty()
        self._calls: dict[str, ToolCall] = {}  # Those that go on ...
        self._outputs: dict[str, tuple[int, str]] = {}  # ... lines shown of each, and a begun one.

    def text(self, message_id: MessageId, text: str) -> None:
        if message_id != self._message_id or self._in_prompt:
            self._end_line()
            self._message_id = message_id
        # A model may repeat what stands in a file; a terminal would obey it.
        shown = without_controls(text) if self._is_screen else text
        try:
            write(sys.stdout, shown)
        except UnicodeEncodeError:
            write(sys.stdout, shown.encode("ascii", "backslashreplace").decode())
        self._in_line = not text.endswith("\n")

    def again(self, message_id: MessageId) -> None:
        self.note("(asked again)")

    def call(self, call: ToolCall) -> None:
        self._calls[call.id] = call
        self.note(call_line(call))

    def output(self, call_id: str, text: str) -> None:
        passed, begun = self._outputs.get(call_id, (0, ""))
        *lines, begun = (begun + text).split("\n")
        for line in lines[: max(LINES_MAX - passed, 0)]:
            self.note(margined(line))
        # What a call puts out without end is counted, and not kept.
        self._outputs[call_id] = passed + len(lines), begun[:1000]

    def result(self, result: ToolResult) -> None:
        call = self._calls.pop(result.tool_call_id, None)
        passed, _ = self._outputs.pop(result.tool_call_id, (0, ""))
        for line in result_lines(result, min(passed, LINES_MAX)):
            self.note(line)
        if call is not None and result.is_error and result.content.startswith(_ALONE):
            self.note(f"hint: --approve allow, or --allow {rule_for(call.name, call.input)}")

    def allowed(self, call: ToolCall) -> None:
        self.note(f"allowed: {call.name}: by {self._by}")

    def ask(self, ask: AskChanged) -> None:
        self.note(f"? {ask.tool_name}: {head_of(ask.description)}")
        if ask.deadline:
            self.note(f"hint: `culm answer {ask.ask_id[:8]} allow`, or deny, answers it")

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self.note(f"{ask.state}: {ask.tool_name}: {fate_of(ask, by_us=by_us)}")

    def note(self, words: str) -> None:
        self._end_line()
        _note(words)

    def prompt(self, words: str) -> None:
        """Ask for a line; what is noted next comes below, with or without an answer."""
        self._end_line()
        write(sys.stderr, printable(words))
        self._in_prompt = True

    def typed(self) -> None:
        """It was typed, with its end."""
        self._in_prompt = False

    def end(self, run: Run, text: str) -> None:
        self._end_line()
        if run.outcome != "end_turn":
            words, hint = words_of(run)
            self.note(f"culm: {words}")
            self.note(f"hint: {hint}")

    def _end_line(self) -> None:
        if self._in_prompt:
            write(sys.stderr, "\n")
            self._in_prompt = False
        if self._in_line:
            write(sys.stdout, "\n")
            self._in_line = False


class JsonLines:
    """For programs: one object a line on stdout; stderr is for people still."""

    def text(self, message_id: MessageId, text: str) -> None:
        self._put("text", text=text, message_id=message_id)

    def again(self, message_id: MessageId) -> None:
        self._put("again", message_id=message_id)

    def call(self, call: ToolCall) -> None:
        self._put("call", id=call.id, name=call.name, input=call.input)

    def output(self, call_id: str, text: str) -> None:
        self._put("output", id=call_id, text=text)

    def allowed(self, call: ToolCall) -> None:
        self._put("allowed", call_id=call.id)

    def ask(self, ask: AskChanged) -> None:
        self._put(
            "ask",
            id=ask.ask_id,
            call_id=ask.tool_call_id,
            tool=ask.tool_name,
            action=ask.action,
            description=ask.description,
            deadline=ask.deadline,
        )

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self._put("answered", id=ask.ask_id, call_id=ask.tool_call_id, state=ask.state, by=ask.by)

    def result(self, result: ToolResult) -> None:
        content, is_error = result.content, result.is_error
        self._put("result", id=result.tool_call_id, is_error=is_error, content=content)

    def note(self, words: str) -> None:
        _note(words)

    def end(self, run: Run, text: str) -> None:
        self._put(
            "end",
            outcome=run.outcome or run.state,
            run_id=run.id,
            session_id=run.session_id,
            text=text,
            error=": ".join(filter(None, (run.title, run.details))),
            provider=run.provider,
            model=run.model,
            steps=run.steps,
            prompt_tokens=run.prompt_tokens,
            completion_tokens=run.completion_tokens,
            cost=run.cost,
        )

    def _put(self, kind: str, **fields: Json) -> None:
        # Bytes: JSON is UTF-8, whatever the terminal speaks.
        write(sys.stdout.buffer, encode({"type": kind, **fields}) + b"\n")


def _note(words: str) -> None:
    """Tell a person. What files, models and providers say must not move the terminal."""
    lines = "\n".join(map(printable, words.split("\n")))
    try:
        write(sys.stderr, f"{lines}\n")
    except UnicodeEncodeError:
        write(sys.stderr, lines.encode("ascii", "backslashreplace").decode() + "\n")


def fate_of(ask: AskChanged, *, by_us: bool) -> str:
    """Who closed an ask."""
    match ask.state:
        case "expired":
            return "nobody answered in time"
        case "withdrawn":
            return "it is not needed any more"
        case _:
            return "by you" if by_us else "by another client"


def words_of(run: Run) -> tuple[str, str]:
    """What became of a run that did not end well, and what to do about it."""
    go_on = f"`culm run --session {run.session_id}` goes on from here"
    # The details of a failure may bring their own hint, as a line.
    reason, _, own = ": ".join(filter(None, (run.title, run.details))).partition("\nhint: ")
    if run.state == "held":
        return f"the run is held: {reason}", f"{go_on}; the held prompt can be started or dropped"
    match run.outcome:
        case "canceled":
            return "cancelled", go_on
        case "max_tokens":
            return "the answer was cut off: the model may write no more at once", go_on
        case "denied":
            return "the run ended because a call was denied", go_on
        case _:
            return reason or f"the run ended: {run.outcome}", own or go_on
