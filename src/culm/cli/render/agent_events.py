"""Renderers for `culm agent call`: the events of a remote agent as text or as JSON lines."""

import sys
from collections.abc import Iterator, Mapping
from typing import Protocol, cast

from culm.cli.render.renderers import TextRenderer
from culm.cli.render.text import head_of
from culm.cli.terminal.approval_prompt import location_lines, params_lines, whole_lines
from culm.cli.terminal.streams import write
from culm.fleet.executor import Outcome
from culm.fleet.host.callbacks import WorkerAsk
from culm.ids import MessageId
from culm.wire.codec import Json, encode
from culm.wire.messages import ToolCall, ToolResult

_OWN_TYPES = ("asked", "end")  # Line types of this command, not of the remote agent.


class AgentCallRenderer(Protocol):
    """Output of one call of a remote agent."""

    def event(self, event: Mapping[str, Json]) -> None: ...
    def note(self, text: str) -> None: ...
    def answered(self, ask: WorkerAsk, *, approved: bool) -> None: ...
    def end(self, outcome: Outcome) -> None: ...


class TextCallRenderer:
    """Readable text for people."""

    def __init__(self, renderer: TextRenderer) -> None:
        self._renderer = renderer
        self._names: dict[str, str] = {}  # Tool names of the running calls.
        self._has_text = False
        self._in_line = False  # The last printed text did not end its line; a note does.

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
                arguments = encode(event.get("arguments")).decode()
                self._renderer.call(ToolCall(call_id, text("tool_name"), arguments))
            case "tool_complete":
                self._end_call(call_id, _result_text(event.get("result")), text("metadata"))
            case "tool_error":
                self._end_call(call_id, text("error"), "", is_error=True)
            case "answer_cleared":
                self.note("(the answer starts again)")
            case "run_retry":
                self.note(f"({text('title')}; retrying)")
            case _:
                pass

    def _print(self, text: str) -> None:
        if text:
            self._has_text = True
            self._in_line = not text.endswith("\n")
            self._renderer.text(MessageId(""), text)

    def _end_call(self, call_id: str, text: str, metadata: str, *, is_error: bool = False) -> None:
        self._in_line = False
        name = self._names.pop(call_id, "")
        result = ToolResult(call_id, name, text, metadata=metadata, is_error=is_error)
        self._renderer.result(result)

    def note(self, text: str) -> None:
        self._in_line = False
        self._renderer.note(text)

    def answered(self, ask: WorkerAsk, *, approved: bool) -> None:
        state = "allowed" if approved else "denied"
        self.note(f"{state}: {head_of(ask.tool_name)}: {head_of(ask.resource or ask.question)}")

    def end(self, outcome: Outcome) -> None:
        if not self._has_text:
            self._print(outcome.result or "")
        if self._in_line:
            self._print("\n")
        if outcome.status != "completed":
            self._renderer.note(f"culm: {_describe(outcome)}")


class JsonCallRenderer:
    """One JSON object per line for programs: every event as it was received.

    An event whose type is also one of this command's own is prefixed with `agent_`.
    """

    def __init__(self, renderer: TextRenderer) -> None:
        self._renderer = renderer

    def event(self, event: Mapping[str, Json]) -> None:
        kind = event.get("type")
        self._write({**event, "type": f"agent_{kind}"} if kind in _OWN_TYPES else event)

    def note(self, text: str) -> None:
        self._renderer.note(text)

    def answered(self, ask: WorkerAsk, *, approved: bool) -> None:
        self._write({**ask.body, "type": "asked", "approved": approved})

    def end(self, outcome: Outcome) -> None:
        self._write(
            {
                "type": "end",
                "status": outcome.status,
                "result": outcome.result,
                "error": outcome.error,
            }
        )

    def _write(self, value: Mapping[str, Json]) -> None:
        # Written as bytes: JSON is UTF-8, whatever the encoding of the terminal.
        write(sys.stdout.buffer, encode(value) + b"\n")


def ask_lines(ask: WorkerAsk) -> Iterator[str]:
    """The whole request: its question alone may look harmless."""

    def text(name: str) -> str:
        value = ask.body.get(name)
        return value if isinstance(value, str) else ""

    head = head_of(ask.question or ask.resource)
    yield f"? {head_of(ask.tool_name)}: {head}"
    resource = [*whole_lines(ask.resource)] if ask.resource else []
    yield from resource
    if params := ask.body.get("params"):
        lines = [*params_lines(ask.tool_name, params)]
        yield from lines if lines != resource else ()
    elif len(ask.question) > len(head):
        yield from whole_lines(ask.question)
    yield from location_lines(text("path"), text("why"))


def _result_text(result: Json) -> str:
    """The text of a tool result; hosts other than culm wrap it in an object."""
    inner = cast("dict[str, Json]", result).get("result") if isinstance(result, dict) else result
    return inner if isinstance(inner, str) else encode(inner).decode()


def _describe(outcome: Outcome) -> str:
    match outcome.status:
        case "cancelled":
            return "canceled"
        case "suspended":
            return "the agent was suspended to wait for other agents, which is not supported here"
        case _:
            return outcome.error or "the agent failed without giving a reason"
