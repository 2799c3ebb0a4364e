"""`culm agent call`: one assignment to an agent; its answer on stdout, all else on stderr.

Owns the display of the call and the effect of a signal. The run belongs to the caller: it ends when
the caller leaves.
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import msgspec
from msgspec import Raw, Struct

from culm.cli.commands.agent import discovery_of, get_agent
from culm.cli.render.renderers import TextRenderer
from culm.cli.render.text import head_of
from culm.cli.terminal.approval_prompt import (
    LineInput,
    TerminalInput,
    location_lines,
    params_lines,
    whole_lines,
)
from culm.cli.terminal.process import (
    EXIT_CANCELED,
    EXIT_FAILED,
    CannotWrite,
    cancelling,
    close_output,
    write,
)
from culm.errors import Failed, InvalidRequest
from culm.files import UnreadableFile, read_file
from culm.fleet import connect
from culm.fleet.executor import HostCallFailed, Outcome
from culm.fleet.host.caller import RunControl, WorkerAsk
from culm.fleet.transport.base import ConnectFailed
from culm.ids import MessageId
from culm.tools.registry import SPECS
from culm.wire.codec import Json, encode, printable
from culm.wire.messages import ToolCall, ToolResult

TOKEN_BYTES_MAX = 4096
EXITS: Mapping[str, int] = {"completed": 0, "cancelled": EXIT_CANCELED}


class AgentCallRenderer(Protocol):
    """Output of one call of a remote agent."""

    def event(self, event: Mapping[str, Json]) -> None: ...
    def note(self, text: str) -> None: ...
    def answered(self, ask: WorkerAsk, *, approved: bool) -> None: ...
    def end(self, outcome: Outcome) -> None: ...


class AgentCallOptions(Struct, frozen=True):
    """Options of `culm agent call`."""

    name: str  # An id, a role, or an address.
    assignment: str
    data_dir: Path
    token_file: Path | None = None
    ca: Path | None = None
    as_json: bool = False
    approve: bool | None = None  # None: the person at this terminal decides ...
    interactive: bool = False  # ... if there is one.


def call_agent(calling: AgentCallOptions) -> int:
    """Run to the end and return the exit status; raises `AppError`."""
    # The agent is usually one of culm, and there is no server to ask about its tools.
    plain = TextRenderer({spec.name: spec.info() for spec in SPECS})
    renderer = JsonCallRenderer(plain) if calling.as_json else TextCallRenderer(plain)
    lines = TerminalInput(plain) if calling.interactive else None
    controls = RunControl()

    def cancel() -> None:
        renderer.note("(canceling; interrupt again to exit at once)")
        controls.cancel()

    try:
        with asyncio.Runner() as runner, cancelling(runner.get_loop(), cancel):
            return runner.run(call(calling, renderer, lines, controls))
    except CannotWrite as exc:
        return close_output(exc, "the run was canceled")


async def call(
    calling: AgentCallOptions,
    renderer: AgentCallRenderer,
    lines: LineInput | None,
    controls: RunControl,
) -> int:
    """Call the agent; raises `AppError` if it cannot be reached."""
    endpoint, token = await asyncio.to_thread(_find, calling)
    caller = CallCallbacks(renderer, lines, calling.approve)
    try:
        async with connect(endpoint, token=token, ca=calling.ca) as agent:
            outcome = await agent.run(calling.assignment, caller, controls)
    except ConnectFailed as exc:
        reason = str(exc).removeprefix(f"{calling.name}: ")
        message = printable(f"cannot reach {calling.name}: {reason}")
        raise Failed(message, hint=_hint(reason)) from exc
    renderer.end(outcome)
    return EXITS.get(outcome.status, EXIT_FAILED)


def _hint(reason: str) -> str:
    if "certificate" in reason:
        return "trust its certificate with --ca FILE"
    if "token" in reason:
        return "pass its token with --token-file FILE"
    return "`culm agent list` shows the agents that are running"


def _find(calling: AgentCallOptions) -> tuple[str, str | None]:
    """The endpoint and the token of the agent; raises `NotFound`, `InvalidRequest`."""
    if "://" in calling.name:
        return calling.name, _token(calling.token_file)
    discovery = discovery_of(calling.data_dir)
    record = get_agent(discovery, calling.name)
    file = calling.token_file or discovery.token_file(record.agent_id)
    return record.endpoint, _token(file, is_needed=calling.token_file is not None)


def _token(file: Path | None, *, is_needed: bool = True) -> str | None:
    if file is None:
        return None
    try:
        return read_file(file, TOKEN_BYTES_MAX).decode("ascii").strip() or None
    except FileNotFoundError:
        if not is_needed:
            return None
        raise InvalidRequest(f"token file {file} does not exist") from None
    except (OSError, UnreadableFile, UnicodeError) as exc:
        raise InvalidRequest(f"cannot read the token file {file}: {exc}") from exc


class CallCallbacks:
    """`HostCallbacks` that show the events and let the person at the terminal decide."""

    def __init__(
        self, renderer: AgentCallRenderer, lines: LineInput | None, approve: bool | None
    ) -> None:
        self._renderer = renderer
        self._lines = lines
        self._approve = approve
        self._one = asyncio.Lock()  # A person answers one question at a time.

    async def on_event(self, event: Raw) -> None:
        try:
            found = msgspec.json.decode(event, type=dict[str, Json])
        except (msgspec.DecodeError, RecursionError):
            return
        self._renderer.event(found)

    async def on_gap(self) -> None:
        self._renderer.note("(some events were lost on the way)")

    async def on_ask(self, ask: WorkerAsk) -> bool:
        async with self._one:
            approved = await self._decide(ask)
        self._renderer.answered(ask, approved=approved)
        return approved

    async def _decide(self, ask: WorkerAsk) -> bool:
        if self._approve is not None:
            return self._approve
        if self._lines is None:
            self._renderer.note("hint: there is no terminal to ask at; --approve yes allows it")
            return False
        for line in ask_lines(ask):
            self._renderer.note(line)
        try:
            return await self._ask(self._lines)
        except asyncio.CancelledError:
            self._renderer.note("(no longer open: it timed out, or the run has ended)")
            raise

    async def _ask(self, lines: LineInput) -> bool:
        while True:
            line = await lines.read("allow it? [y]es, [n]o: ")
            match line.strip().lower():
                case "y" | "yes":
                    return True
                case "n" | "no":
                    return False
                case _ if not line:  # A closed terminal is not consent.
                    return False
                case _:
                    continue

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        raise HostCallFailed("the caller of this agent does not handle calls")


# --- rendering


_OWN_TYPES = ("asked", "end")  # Line types of this command, not of the remote agent.


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
        lines = [*params_lines(params)]
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
