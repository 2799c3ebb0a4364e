"""How a call of an agent looks to a person, or to a program: what is printed, and where."""

import sys
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

from culm.cli.render.call_lines import head_of
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.approval_prompt import location_lines, params_lines, whole_lines
from culm.cli.terminal.streams import write
from culm.fleet.executor import Outcome
from culm.fleet.host.callbacks import WorkerAsk
from culm.ids import MessageId
from culm.wire.codec import Json, encode
from culm.wire.messages import ToolCall, ToolResult

_OURS = ("asked", "end")  # What only we say to a program.


class AgentCallRenderer(Protocol):
    """How a call is shown."""

    def event(self, event: Mapping[str, Json]) -> None: ...
    def note(self, words: str) -> None: ...
    def asked(self, ask: WorkerAsk, *, approved: bool) -> None: ...
    def end(self, outcome: Outcome) -> None: ...


class TextCallRenderer:
    """For people."""

    def __init__(self, face: TextRenderer) -> None:
        self._face = face
        self._names: dict[str, str] = {}  # Of calls that go on.
        self._has_text = False
        self._in_line = False  # What is noted ends a line that was begun.

    def event(self, event: Mapping[str, Json]) -> None:
        def text(name: str) -> str:
            value = event.get(name)
            return value if isinstance(value, str) else ""

        call_id = text("tool_call_id")
        match event.get("type"):
            case "token":
                self._print(text("content"))
            case "tool_start":
                self._in_line = False
                self._names[call_id] = text("tool_name")
                given = encode(event.get("arguments")).decode()
                self._face.call(ToolCall(call_id, text("tool_name"), given))
            case "tool_complete":
                self._end_call(call_id, _result_text(event.get("result")), text("metadata"))
            case "tool_error":
                self._end_call(call_id, text("error"), "", is_error=True)
            case "answer_cleared":
                self.note("(it begins anew)")
            case "run_retry":
                self.note(f"({text('title')}; asking again)")
            case _:
                pass

    def _print(self, words: str) -> None:
        if words:
            self._has_text = True
            self._in_line = not words.endswith("\n")
            self._face.text(MessageId(""), words)

    def _end_call(self, call_id: str, words: str, about: str, *, is_error: bool = False) -> None:
        self._in_line = False
        name = self._names.pop(call_id, "")
        result = ToolResult(call_id, name, words, metadata=about, is_error=is_error)
        self._face.result(result)

    def note(self, words: str) -> None:
        self._in_line = False
        self._face.note(words)

    def asked(self, ask: WorkerAsk, *, approved: bool) -> None:
        state = "allowed" if approved else "denied"
        self.note(f"{state}: {head_of(ask.tool_name)}: {head_of(ask.resource or ask.question)}")

    def end(self, outcome: Outcome) -> None:
        if not self._has_text:
            self._print(outcome.result or "")
        if self._in_line:
            self._print("\n")
        if outcome.status != "completed":
            self._face.note(f"culm: {_describe(outcome)}")


class JsonCallRenderer:
    """For programs: every event as it came, one object a line; what is ours is ours alone."""

    def __init__(self, face: TextRenderer) -> None:
        self._face = face

    def event(self, event: Mapping[str, Json]) -> None:
        kind = event.get("type")
        self._put({**event, "type": f"agent_{kind}"} if kind in _OURS else event)

    def note(self, words: str) -> None:
        self._face.note(words)

    def asked(self, ask: WorkerAsk, *, approved: bool) -> None:
        self._put({**ask.body, "type": "asked", "approved": approved})

    def end(self, outcome: Outcome) -> None:
        self._put(
            {
                "type": "end",
                "status": outcome.status,
                "result": outcome.result,
                "error": outcome.error,
            }
        )

    def _put(self, value: Mapping[str, Json]) -> None:
        # Bytes: JSON is UTF-8, whatever the terminal speaks.
        write(sys.stdout.buffer, encode(value) + b"\n")


def ask_lines(ask: WorkerAsk) -> Iterator[str]:
    """All that is asked: a question may be a harmless beginning."""

    def text(name: str) -> str:
        value = ask.body.get(name)
        return value if isinstance(value, str) else ""

    head = head_of(ask.question or ask.resource)
    yield f"? {head_of(ask.tool_name)}: {head}"
    about = [*whole_lines(ask.resource)] if ask.resource else []
    yield from about
    if given := ask.body.get("params"):
        params = [*params_lines(ask.tool_name, given)]
        yield from params if params != about else ()
    elif len(ask.question) > len(head):
        yield from whole_lines(ask.question)
    yield from location_lines(text("path"), text("why"))


def _result_text(result: Json) -> str:
    """What a tool said: hosts of another kind have it in an object."""
    inner = cast("dict[str, Json]", result).get("result") if isinstance(result, dict) else result
    return inner if isinstance(inner, str) else encode(inner).decode()


def _describe(outcome: Outcome) -> str:
    match outcome.status:
        case "cancelled":
            return "cancelled"
        case "suspended":
            return "the agent stopped to wait for others, which nobody here can do"
        case _:
            return outcome.error or "it failed, and did not say why"
