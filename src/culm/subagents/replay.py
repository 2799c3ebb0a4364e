"""Replay a worker's events into the journal of its run, as if the server had run the turn itself.

Owns the progress of one run's events. A worker runs the same loop, so its events are the steps of a
turn; they are repeated here on the run's journal, which is authoritative. Approval requests and
host calls are passed on to the `ReplayHost`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from culm.events.hub import TransientEvent
from culm.fleet.host.caller import WorkerAsk
from culm.ids import RunId
from culm.model.base import CallDelta, CallStarted, ReasoningDelta, TextDelta
from culm.run.journal import TurnJournal
from culm.run.live_run import LiveRun
from culm.tools.base import CallRequest, CallResult
from culm.wire.codec import Json, encode
from culm.wire.messages import (
    FinishPart,
    Message,
    ReasoningPart,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import Ending, Money, RunRetry, Tokens, Used, ending_of_finish

log = logging.getLogger(__name__)

UNNAMED = "?"  # The id of an answer whose message event has not arrived yet.
FILES_MAX = 1000  # Changed files recorded per run.


class _Used(Struct):
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    cost: Money = 0.0
    estimated: bool = False
    cached_tokens: Tokens = 0


class _Event(Struct):
    type: str
    content: str = ""
    tool_call_id: str = ""
    id: str = ""
    message: Raw = Raw(b"")
    reservation: str = ""
    used: _Used | None = None
    paths: list[str] = []
    by: str = ""
    delay_s: float = 0.0
    title: str = ""
    details: str = ""


_decoder = msgspec.json.Decoder(_Event)
_message_decoder = msgspec.json.Decoder(Message)


class ReplayHost(Protocol):
    """Decides the approval requests of a run and carries out its host calls."""

    async def decide(self, run: LiveRun, message_id: str, ask: WorkerAsk) -> bool: ...

    def on_allowed(self, run: LiveRun, call_id: str, by: str) -> None: ...

    async def carry_out(self, run: LiveRun, call: CallRequest, args: Mapping[str, Json]) -> Json:
        """Carry out a host call; raises `HostCallFailed`."""
        ...


class ReplayContext(Struct, frozen=True):
    """The parts of the workspace that a replay uses."""

    host: ReplayHost
    publish: Callable[[TransientEvent], None]
    on_begin: Callable[[LiveRun], None]  # Called when a worker starts executing the run.


def call_of(run: LiveRun, call_id: str, name: str, message_id: str = "") -> CallRequest:
    """Build a call whose arguments only the worker knows."""
    about = {"session_id": run.session_id, "run_id": run.id, "message_id": message_id}
    return CallRequest(call_id, name, "", None, **about)


class WorkerReplay:
    """Implements `HostCallbacks` for one run. The journal has begun its first step."""

    def __init__(
        self, run: LiveRun, journal: TurnJournal, context: ReplayContext, steer: Callable[[], None]
    ) -> None:
        self._run = run
        self._journal = journal
        self._context = context
        self._steer = steer  # Sends the worker the prompts that wait to join.
        self._open_id = ""  # The worker's id of the open answer.
        self._is_first = True  # The step that the journal has already begun is not used yet.
        self.admitted: set[str] = set()  # The prompts sent to the worker that it has read.
        self._calls: dict[str, CallRequest] = {}
        self._used: Used | None = None
        self._has_gap = False
        self._has_text = False
        self.ending: Ending | None = None  # From the worker's last answer.
        self.answer = ""  # The text of the latest finished answer.
        self.files: dict[str, None] = {}  # Changed files, in order.

    # --- callbacks of the fleet

    async def on_event(self, event: Raw) -> None:
        try:
            decoded = _decoder.decode(event)
            is_written = decoded.type == "session_message_written"
            message = _message_decoder.decode(decoded.message) if is_written else None
        except (msgspec.DecodeError, ValueError) as exc:  # ValueError: bytes that are not UTF-8.
            log.warning("invalid event of run %s: %s", self._run.id, exc)
            return
        if decoded.type == "usage_reported" and decoded.used is not None:
            self._used = Used(*msgspec.structs.astuple(decoded.used))
            self._run.account.settle(decoded.reservation, self._used)
        elif decoded.type == "reservation_forfeited":
            self._run.account.forfeit(decoded.reservation)
        elif self._run.stop is None:  # A run that is being stopped writes nothing more.
            await self._on_event(decoded, message)

    async def _on_event(self, event: _Event, message: Message | None) -> None:
        match event.type:
            case "token":
                await self._ensure_open()
                self._has_text = True
                self._journal.grow(TextDelta(event.content))
            case "reasoning_token":
                await self._ensure_open()
                self._journal.grow(ReasoningDelta(event.content))
            case "session_message_written" if message is not None:
                await self._on_message(message)
            case "tool_token":
                self._publish_output(event.tool_call_id, event.content)
            case "tool_start":
                await self._start(event.tool_call_id)
            case "answer_cleared":
                self._has_text = self._has_gap = False
                await self._journal.clear()
            case "message_admitted":
                self.admitted.add(event.id)
            case "files_changed":
                room = FILES_MAX - len(self.files)
                self.files |= dict.fromkeys(event.paths[: max(0, room)])
            case "run_retry":
                self._publish_retry(event)
            case "call_allowed":
                self._context.host.on_allowed(self._run, event.tool_call_id, event.by)
            case "execution_started":
                self._context.on_begin(self._run)
            case _:
                pass

    async def on_gap(self) -> None:
        self._has_gap = True

    async def on_ask(self, ask: WorkerAsk) -> bool:
        return await self._context.host.decide(self._run, self._journal.answer_id, ask)

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        call = self._calls.get(tool_call_id)
        if call is None:
            name, message_id = str(args.get("op", "")), self._journal.answer_id
            call = call_of(self._run, tool_call_id, name, message_id)
        return await self._context.host.carry_out(self._run, call, args)

    def steer(self) -> None:
        """Send the prompts that wait to join, but not before the worker's first step: the journal
        has already begun that step, so a prompt read there could not be recorded."""
        if not self._is_first:
            self._steer()

    # --- messages

    async def _on_message(self, message: Message) -> None:
        if message.role == "tool":
            for part in message.parts:
                if isinstance(part, ToolResultPart):
                    await self._answer(part.data)
        elif message.role == "assistant" and message.is_summary_message:
            await self._summarize(message)
        elif message.role == "assistant":
            await self._on_answer(message)

    async def _on_answer(self, message: Message) -> None:
        finish = next((p.data for p in message.parts if isinstance(p, FinishPart)), None)
        if self._open_id == UNNAMED:
            self._open_id = message.id
        if message.id != self._open_id:
            await self._begin(message.id)
        if finish is None and not message.parts:
            return
        if not self._calls:  # With calls it was already complete.
            await self._repair(message)
        if finish is None:
            await self._record_calls(message)
        elif finish.reason == "tool_use":
            await self._journal.end_step()
            self._open_id = ""
        else:
            self.count()
            self._journal.store_count()
            self.ending = ending_of_finish(finish)
            self.answer = full_text(message.parts)

    async def _ensure_open(self) -> None:
        """Open an answer for executors that send text but no message events."""
        if not self._open_id:
            await self._begin(UNNAMED)

    async def _begin(self, message_id: str) -> None:
        if self.ending is not None:  # The turn continues with a prompt that arrived at its end.
            await self._journal.end_step(self.ending)
            self.ending = None
        elif self._open_id:  # The event of its end was lost.
            await self._journal.end_step()
        if not self._is_first:
            await self._journal.begin_step()
        is_first, self._is_first = self._is_first, False
        self._open_id = message_id
        if is_first:
            self._steer()
        self._calls = {}
        self._has_text = self._has_gap = False

    async def finish(self, answer: str) -> None:
        """Complete the answer of a successful run, also for executors without text events."""
        await self._ensure_open()
        if not self._has_text:
            self._journal.grow(TextDelta(answer))
        self.count()

    async def _repair(self, message: Message) -> None:
        """Complete an answer from its message: some text events may have been dropped."""
        reasoning = [part.data for part in message.parts if isinstance(part, ReasoningPart)]
        text = full_text(message.parts)
        if self._has_gap:
            await self._journal.clear()
            for thought in reasoning:
                self._journal.grow(ReasoningDelta(thought.thinking))
        if text and (self._has_gap or not self._has_text):
            self._journal.grow(TextDelta(text))
        for thought in reasoning:
            if thought.signature:
                self._journal.grow(ReasoningDelta("", thought.signature))
        self._has_gap, self._has_text = False, True

    def count(self) -> None:
        """Add the usage to the latest answer, even if the rest of the answer never arrives."""
        if self._used is not None:
            self._journal.count(self._used)
            self._used = None

    async def _record_calls(self, message: Message) -> None:
        calls = [part.data for part in message.parts if isinstance(part, ToolCallPart)]
        for key, call in enumerate(calls):
            self._journal.grow(CallStarted(key, call.id, call.name))
            self._journal.grow(CallDelta(key, call.input))
        self.count()
        self._calls = {call.id: call for call in await self._journal.record_calls()}

    async def _start(self, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            await self._journal.start_call(call)

    async def _answer(self, result: ToolResult) -> None:
        call = self._calls.get(result.tool_call_id)
        if call is not None:
            known = CallResult(
                result.content,
                is_error=result.is_error,
                metadata=result.metadata,
                data=result.data,
                mime_type=result.mime_type,
            )
            await self._journal.answer_call(call, known)

    async def _summarize(self, message: Message) -> None:
        await self._journal.begin_summary()
        self._journal.grow(TextDelta(full_text(message.parts)))
        used, self._used = self._used, None
        # The worker keeps the context its model continues with; the server does not need it.
        await self._journal.end_summary(used or Used(0, 0, 0.0, estimated=True), "")

    # --- transient events

    def _publish_output(self, call_id: str, text: str) -> None:
        if (output := self._journal.record_output(call_id, text)) is not None:
            session_id = self._run.session_id
            self._context.publish(TransientEvent("call_output", session_id, encode(output)))

    def _publish_retry(self, event: _Event) -> None:
        run = self._run
        retry = RunRetry(RunId(run.id), run.session_id, event.delay_s, event.title, event.details)
        self._context.publish(TransientEvent("run_retry", run.session_id, encode(retry)))
