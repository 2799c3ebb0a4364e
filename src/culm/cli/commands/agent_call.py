"""`culm agent call`: one assignment to an agent; its answer on stdout, all else on stderr.

Owns the display of the call and the effect of a signal. The run belongs to the caller: it ends when
the caller leaves.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Raw

from culm.cli.discovery import discovery_of, get_agent
from culm.cli.exits import EXIT_CANCELED, EXIT_FAILED
from culm.cli.render.agent_events import (
    AgentCallRenderer,
    JsonCallRenderer,
    TextCallRenderer,
    ask_lines,
)
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.approval_prompt import LineInput, TerminalInput
from culm.cli.terminal.signals import cancelling
from culm.cli.terminal.streams import CannotWrite, close_output
from culm.errors import Failed, InvalidRequest
from culm.files import UnreadableFile, read_file
from culm.fleet import connect
from culm.fleet.executor import HostCallFailed
from culm.fleet.host.callbacks import WorkerAsk
from culm.fleet.host.run_control import RunControl
from culm.fleet.transport.base import ConnectFailed
from culm.wire.codec import Json, printable

TOKEN_BYTES_MAX = 4096
EXITS: Mapping[str, int] = {"completed": 0, "cancelled": EXIT_CANCELED}


@dataclass(frozen=True, slots=True)
class AgentCallOptions:
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
    plain = TextRenderer()
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
        self,
        renderer: AgentCallRenderer,
        lines: LineInput | None,
        approve: bool | None,  # noqa: FBT001
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
