"""`culm agent call`: one assignment to an agent, what it says on stdout, all else on stderr.

Owns what a person or a script sees of it and what a signal does to it. The run is the caller's: it
ends when the caller leaves.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Raw

from culm.cli.agents import discovery_of, get_agent
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
from culm.cli.terminal.streams import CannotWrite, let_go
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
    """What `culm agent call` was asked for."""

    name: str  # An id, a role, or an address.
    assignment: str
    data_dir: Path
    token_file: Path | None = None
    ca: Path | None = None
    as_json: bool = False
    approve: bool | None = None  # None: whoever sits at this terminal says it ...
    interactive: bool = False  # ... if somebody does.


def call_agent(calling: AgentCallOptions) -> int:
    """Run to the end and return the exit status; raises `AppError`."""
    plain = TextRenderer()
    shower = JsonCallRenderer(plain) if calling.as_json else TextCallRenderer(plain)
    lines = TerminalInput(plain) if calling.interactive else None
    controls = RunControl()

    def cancel() -> None:
        shower.note("(cancelling; once more to leave at once)")
        controls.cancel()

    try:
        with asyncio.Runner() as runner, cancelling(runner.get_loop(), cancel):
            return runner.run(call(calling, shower, lines, controls))
    except CannotWrite as exc:
        return let_go(exc, "the run was cancelled")


async def call(
    calling: AgentCallOptions,
    shower: AgentCallRenderer,
    lines: LineInput | None,
    controls: RunControl,
) -> int:
    """Raises `AppError` if nobody can be called."""
    endpoint, token = await asyncio.to_thread(_find, calling)
    caller = CallCallbacks(shower, lines, calling.approve)
    try:
        async with connect(endpoint, token=token, ca=calling.ca) as agent:
            outcome = await agent.run(calling.assignment, caller, controls)
    except ConnectFailed as exc:
        reason = str(exc).removeprefix(f"{calling.name}: ")
        message = printable(f"cannot reach {calling.name}: {reason}")
        raise Failed(message, hint=_hint(reason)) from exc
    shower.end(outcome)
    return EXITS.get(outcome.status, EXIT_FAILED)


def _hint(reason: str) -> str:
    if "certificate" in reason:
        return "--ca FILE names the certificates to trust"
    if "token" in reason:
        return "--token-file FILE gives its token"
    return "`culm agent list` shows who is there"


def _find(calling: AgentCallOptions) -> tuple[str, str | None]:
    """Where it is, and the token it wants; raises `NotFound`, `InvalidRequest`."""
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
        raise InvalidRequest(f"there is no token file {file}") from None
    except (OSError, UnreadableFile, UnicodeError) as exc:
        raise InvalidRequest(f"cannot read the token file {file}: {exc}") from exc


class CallCallbacks:
    """Implements `Overseer`: shows what happens, and asks whoever sits at the terminal."""

    def __init__(
        self,
        shower: AgentCallRenderer,
        lines: LineInput | None,
        approve: bool | None,  # noqa: FBT001
    ) -> None:
        self._shower = shower
        self._lines = lines
        self._approve = approve
        self._one = asyncio.Lock()  # Nobody answers two questions at once.

    async def on_event(self, event: Raw) -> None:
        try:
            found = msgspec.json.decode(event, type=dict[str, Json])
        except (msgspec.DecodeError, RecursionError):
            return
        self._shower.event(found)

    async def on_gap(self) -> None:
        self._shower.note("(some of what it said was lost on the way)")

    async def on_ask(self, ask: WorkerAsk) -> bool:
        async with self._one:
            approved = await self._decide(ask)
        self._shower.asked(ask, approved=approved)
        return approved

    async def _decide(self, ask: WorkerAsk) -> bool:
        if self._approve is not None:
            return self._approve
        if self._lines is None:
            self._shower.note("hint: nobody can be asked here; --approve yes allows it")
            return False
        for line in ask_lines(ask):
            self._shower.note(line)
        try:
            return await self._ask(self._lines)
        except asyncio.CancelledError:
            self._shower.note("(not asked any more: time is over, or the run is)")
            raise

    async def _ask(self, lines: LineInput) -> bool:
        while True:
            said = await lines.read("allow it? [y]es, [n]o: ")
            match said.strip().lower():
                case "y" | "yes":
                    return True
                case "n" | "no":
                    return False
                case _ if not said:  # Who closes the terminal has not agreed.
                    return False
                case _:
                    continue

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        raise HostCallFailed("whoever called this agent does nothing for it")
