"""What a worker tells of its run, written down as the server writes down its own.

Owns how far one run's events have come. A worker runs the same loop, so what it tells are the steps
of a turn; here they are taken again with the run's journal, which is the truth. Who asks and what
is called on the way is passed on.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from culm.events.hub import TransientEvent
from culm.fleet.host.callbacks import WorkerAsk
from culm.ids import RunId, SessionId
from culm.model.base import CallDelta, CallStarted, ReasoningDelta, TextDelta
from culm.run.journal import TurnJournal
from culm.run.live_run import LiveRun
from culm.tools.base import CallRequest, CallResult
from culm.wire.codec import Json, clean, encode
from culm.wire.endings import Ending, ending_of_finish
from culm.wire.events import CallOutput
from culm.wire.messages import (
    FinishPart,
    Message,
    ReasoningPart,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import Money, RunRetry, Tokens, Used

log = logging.getLogger(__name__)

UNNAMED = "?"  # An answer whose message nobody has told of yet.
FILES_MAX = 1000  # Noted of one run.


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
    """Who decides and does what a run wants of its host."""

    async def decide(self, run: LiveRun, message_id: str, ask: WorkerAsk) -> bool: ...

    def on_allowed(self, run: LiveRun, call_id: str, by: str) -> None: ...

    async def carry_out(self, run: LiveRun, call: CallRequest, args: Mapping[str, Json]) -> Json:
        """Raises `CallFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class ReplayContext:
    """What a replay needs of the workspace."""

    host: ReplayHost
    publish: Callable[[TransientEvent], None]
    on_begin: Callable[[LiveRun], None]  # A worker was heard.


def call_of(run: LiveRun, call_id: str, name: str, message_id: str = "") -> CallRequest:
    """A call of which only the worker knows the arguments."""
    about = {"session_id": run.session_id, "run_id": run.id, "message_id": message_id}
    return CallRequest(call_id, name, "", None, **about)


class WorkerReplay:
    """Implements `Overseer`, for one run. The journal has begun its first step."""

    def __init__(
        self, run: LiveRun, journal: TurnJournal, around: ReplayContext, steer: Callable[[], None]
    ) -> None:
        self._run = run
        self._journal = journal
        self._around = around
        self._steer = steer  # Says to the worker what waits to join.
        self._open_id = ""  # The worker's own name for the answer that is open.
        self._is_first = True  # The step that the journal began by itself is not taken yet.
        self.admitted: set[str] = set()  # What was said to it, and it has heard.
        self._calls: dict[str, CallRequest] = {}
        self._offsets: dict[str, int] = {}  # How much each call has put out.
        self._used: Used | None = None
        self._has_gap = False
        self._has_text = False
        self.ending: Ending | None = None  # As the worker's last answer says it.
        self.answer = ""  # What the latest finished one says.
        self.files: dict[str, None] = {}  # Those that were changed.

    # --- what a fleet tells and asks

    async def on_event(self, event: Raw) -> None:
        try:
            told = _decoder.decode(event)
            is_written = told.type == "session_message_written"
            message = _message_decoder.decode(told.message) if is_written else None
        except (msgspec.DecodeError, ValueError) as exc:  # Bytes that are no text are one.
            log.warning("an event of run %s cannot be read: %s", self._run.id, exc)
            return
        if told.type == "usage_reported" and told.used is not None:
            self._used = Used(*msgspec.structs.astuple(told.used))
            self._run.account.settle(told.reservation, self._used)
        elif told.type == "reservation_forfeited":
            self._run.account.forfeit(told.reservation)
        elif self._run.stop is None:  # Else it ends as it is, and nothing more is written.
            await self._on_event(told, message)

    async def _on_event(self, told: _Event, message: Message | None) -> None:
        match told.type:
            case "token":
                await self._ensure_open()
                self._has_text = True
                self._journal.grow(TextDelta(told.content))
            case "reasoning_token":
                await self._ensure_open()
                self._journal.grow(ReasoningDelta(told.content))
            case "session_message_written" if message is not None:
                await self._on_message(message)
            case "tool_token":
                self._put_out(told.tool_call_id, told.content)
            case "tool_start":
                await self._start(told.tool_call_id)
            case "answer_cleared":
                self._has_text = self._has_gap = False
                await self._journal.clear()
            case "message_admitted":
                self.admitted.add(told.id)
            case "files_changed":
                room = FILES_MAX - len(self.files)
                self.files |= dict.fromkeys(told.paths[: max(0, room)])
            case "run_retry":
                self._retry(told)
            case "call_allowed":
                self._around.host.on_allowed(self._run, told.tool_call_id, told.by)
            case "execution_started":
                self._around.on_begin(self._run)
            case _:
                pass

    async def on_gap(self) -> None:
        self._has_gap = True

    async def on_ask(self, ask: WorkerAsk) -> bool:
        return await self._around.host.decide(self._run, self._journal.answer_id, ask)

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        call = self._calls.get(tool_call_id)
        if call is None:
            name, message_id = str(args.get("op", "")), self._journal.answer_id
            call = call_of(self._run, tool_call_id, name, message_id)
        return await self._around.host.carry_out(self._run, call, args)

    def steer(self) -> None:
        """Something waits to join. Not before the worker's first step, which is begun already:
        what it heard there would have no place in it."""
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
        if not self._calls:  # Else it was whole before.
            await self._repair(message)
        if finish is None:
            await self._know_calls(message)
        elif finish.reason == "tool_use":
            await self._journal.end_step()
            self._open_id = ""
        else:
            self.count()
            self._journal.store_count()
            self.ending = ending_of_finish(finish)
            self.answer = full_text(message.parts)

    async def _ensure_open(self) -> None:
        """Not every executor tells of messages; its text is one."""
        if not self._open_id:
            await self._begin(UNNAMED)

    async def _begin(self, message_id: str) -> None:
        if self.ending is not None:  # The turn went on with what was said too late for it.
            await self._journal.end_step(self.ending)
            self.ending = None
        elif self._open_id:  # Its end was lost on the way.
            await self._journal.end_step()
        if not self._is_first:
            await self._journal.begin_step()
        is_first, self._is_first = self._is_first, False
        self._open_id = message_id
        if is_first:
            self._steer()
        self._calls, self._offsets = {}, {}
        self._has_text = self._has_gap = False

    async def finish(self, answer: str) -> None:
        """The run has ended well: what it says is there, whoever told of it."""
        await self._ensure_open()
        if not self._has_text:
            self._journal.grow(TextDelta(answer))
        self.count()

    async def _repair(self, message: Message) -> None:
        """Have all of an answer: some of its text may have been dropped on the way."""
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
        """What the latest answer used is part of it, also if the rest of it never comes."""
        if self._used is not None:
            self._journal.count(self._used)
            self._used = None

    async def _know_calls(self, message: Message) -> None:
        calls = [part.data for part in message.parts if isinstance(part, ToolCallPart)]
        for key, call in enumerate(calls):
            self._journal.grow(CallStarted(key, call.id, call.name))
            self._journal.grow(CallDelta(key, call.input))
        self.count()
        self._calls = {call.id: call for call in await self._journal.know_calls()}

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
        # What the worker's model goes on with is the worker's; here nothing is read of it.
        await self._journal.end_summary(used or Used(0, 0, 0.0, estimated=True), "")

    # --- what is only watched

    def _put_out(self, call_id: str, text: str) -> None:
        offset = self._offsets.get(call_id, 0)
        self._offsets[call_id] = offset + len(text)
        session_id = self._run.session_id
        output = CallOutput(SessionId(session_id), call_id, offset, clean(text))
        self._around.publish(TransientEvent("call_output", session_id, encode(output)))

    def _retry(self, told: _Event) -> None:
        run = self._run
        retry = RunRetry(RunId(run.id), run.session_id, told.delay_s, told.title, told.details)
        self._around.publish(TransientEvent("run_retry", run.session_id, encode(retry)))
