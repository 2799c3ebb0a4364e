"""A turn as its host hears of it: nothing is stored here, the host owns the truth.

Owns the messages of one run: what its model reads, the answer while it grows, and its calls. Each
change is told before what follows it. A foreign host reads the texts, the calls and the end; ours
also hears every message as it is written (`session_message_written`, the latest of an id counts),
when an answer is taken back (`answer_cleared`), and what was admitted (`message_admitted`).
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from culm.clock import Clock
from culm.errors import ModelFailed
from culm.fleet.executor import CancelToken, SteerInbox, SteerMessage
from culm.fleet.worker.executors.runtime_events import EventSender
from culm.ids import Ids, RunId, SessionId
from culm.run.answer import OpenAnswer
from culm.run.context import as_user, continuation, user_message
from culm.run.draft import Draft, check_part, check_size, put_parts
from culm.run.limits import RunSpending, estimate
from culm.run.loop import Growth
from culm.run.rules import unanswered_call_text
from culm.run.setting import JournalSetting
from culm.run.step_calls import StepCalls
from culm.store.base import Unit
from culm.tools.base import CallRequest, CallResult
from culm.wire.codec import Json, clean, encodable
from culm.wire.endings import Ending, finish_of
from culm.wire.messages import (
    Finish,
    FinishPart,
    Growing,
    Message,
    Part,
    Role,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    close_parts,
    full_text,
    new_part,
)
from culm.wire.runs import Used
from culm.wire.sessions import Session

SendEvent = Callable[[Growing, str], None]


class RunUsage(NamedTuple):
    """What a run has used so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    estimated: bool = False

    def plus(self, used: Used) -> "RunUsage":
        return RunUsage(
            self.prompt_tokens + used.prompt_tokens + used.cached_tokens,
            self.completion_tokens + used.completion_tokens,
            self.cost + used.cost,
            self.estimated or used.estimated,
        )

    def shown(self) -> dict[str, Json]:
        total = self.prompt_tokens + self.completion_tokens
        return {**self._asdict(), "total_tokens": total}


class EventWriter:
    """Where an answer is written (`run.answer.Writing`): in memory, each growth told at once."""

    def __init__(self, tell: SendEvent) -> None:
        self._tell = tell

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None:
        text = clean(text)
        check_size(draft.size + len(text))
        if part == len(draft.message.parts):
            check_part(part)
            draft.message.parts.append(new_part(kind))
        draft.pieces.setdefault(part, []).append(text)
        draft.size += len(text)
        self._tell(kind, text)

    def put(self, draft: Draft, part: int, value: Part) -> asyncio.Future[None]:
        return self.put_all(draft, {part: value})

    def put_all(
        self, draft: Draft, parts: Mapping[int, Part], *, after: Unit | None = None
    ) -> asyncio.Future[None]:
        check_part(max(parts))
        put_parts(draft.fold(), parts)
        return _done()

    def clear(self, draft: Draft, *, model: str = "", provider: str = "") -> asyncio.Future[None]:
        message = draft.fold()
        message.parts.clear()
        message.rev += 1
        draft.size = 0
        return _done()


class EventJournal:
    """The journal of one run; see `loop.Journal` for what a turn says to it."""

    def __init__(
        self,
        telling: EventSender,
        steer: SteerInbox,
        cancel: CancelToken,
        setting: JournalSetting,
        clock: Clock,
        ids: Ids,
        *,
        run_id: RunId,
        session_id: SessionId,
        history: list[Message],
    ) -> None:
        self._telling = telling
        self._steer = steer
        self._cancel = cancel
        self._setting = setting
        self._clock = clock
        self._ids = ids
        self._run_id = run_id
        self._session_id = session_id
        self.session = Session(session_id)
        self.history = history  # What the model reads.
        self._said = [full_text(m.parts) for m in history if m.role == "user"][-1:]
        self._waiting: list[SteerMessage] = []  # Taken from the host, and not admitted yet.
        self._answer: OpenAnswer | None = None
        self._calls = StepCalls()
        self._last: Message | None = None  # The latest answer.
        self._used: Used | None = None  # By the present step.
        self.usage = RunUsage()
        self.spent = RunSpending()
        self.denied = ""  # Which call was, and by what: the turn ends with it.

    def _check_going(self) -> None:
        """A tool may swallow the cancel that stops its turn; no further step comes of that."""
        if self._cancel.is_set():
            raise asyncio.CancelledError

    # --- a step

    async def begin_step(self) -> list[Message]:
        self._check_going()
        for steer in self._take_steering():
            self.history.append(user_message(self._session_id, steer.text))
            self._said.append(steer.text)
            if steer.id:
                await self._telling.send({"type": "message_admitted", "id": steer.id})
        progress = {"session_id": self._session_id, "round_count": self.spent.steps + 1}
        self._telling.send_nowait({"type": "runner_progress", **progress})
        self._last = self._open(self._send_growth)
        await self._send_message(self._last)
        return self.history

    def _take_steering(self) -> list[SteerMessage]:
        taken, self._waiting = [*self._waiting, *self._steer.take_nowait()], []
        return taken

    def is_steered(self) -> bool:
        """Whether the host has said something that no step has heard yet."""
        self._waiting = self._take_steering()
        return bool(self._waiting)

    def _open(self, tell: SendEvent, *, summary: bool = False) -> Message:
        message = self._new("assistant", [])
        message.model, message.provider = self._setting.model_id, self._setting.provider_id
        message.is_summary_message = summary
        self._used = None
        self._calls = StepCalls()
        self._answer = OpenAnswer(
            Draft(message), EventWriter(tell), self._clock, lambda written: written
        )
        return message

    def _send_growth(self, kind: Growing, text: str) -> None:
        if kind != "input":  # Calls are told when they are whole.
            self._telling.grow("token" if kind == "text" else "reasoning_token", text)

    def _present(self) -> OpenAnswer:
        assert self._answer is not None, "an answer was begun"
        return self._answer

    def grow(self, event: Growth) -> None:
        self._present().grow(event)

    async def clear(self) -> None:
        self._check_going()
        await self._present().clear()
        message = self._present().draft.message
        if not message.is_summary_message:
            await self._telling.send({"type": "answer_cleared", "message_id": message.id})

    # --- calls

    async def know_calls(self) -> list[CallRequest]:
        self._check_going()
        answer = self._present()
        answer.end_reasoning()
        calls = self._calls.known = [replace(call, run_id=self._run_id) for call in answer.calls()]
        if calls:
            await answer.complete(calls)
            await self._send_message(answer.draft.fold())
        return calls

    def known_results(self) -> Mapping[str, CallResult]:
        return self._calls.before

    async def start_call(self, call: CallRequest) -> None:
        self._check_going()
        self._calls.started.add(call.id)
        await self._send_start(call)

    async def _send_start(self, call: CallRequest) -> None:
        about = {"tool_name": call.name, "arguments": encodable(call.arguments or {})}
        await self._telling.send({"type": "tool_start", "tool_call_id": call.id, **about})

    async def answer_call(self, call: CallRequest, result: CallResult) -> None:
        if result.ends_turn is not None:
            self._check_going()  # To a run that is cancelled its host denies what it was asked.
        if call.id not in self._calls.started:  # It was refused, and a host hears of that, too.
            await self._send_start(call)
        if result.ends_turn == "denied":
            self.denied = f"{call.name}: {result.content}"
        told = encodable(self._calls.answer(call, result))
        await self._send_result(told)
        await self._write_result(told)

    async def _send_result(self, result: ToolResult) -> None:
        event: dict[str, Json] = {"tool_call_id": result.tool_call_id, "metadata": result.metadata}
        if result.is_error:
            event |= {"type": "tool_error", "error": result.content}
        else:
            told = {"success": True, "result": result.content}
            event |= {"type": "tool_complete", "result": told}
        await self._telling.send(event)

    async def _write_result(self, result: ToolResult) -> None:
        message = self._new("tool", [ToolResultPart(result), FinishPart(Finish("stop", 0))])
        self._calls.answered[result.tool_call_id] = message
        await self._send_message(message)

    # --- the end of a step

    def count(self, used: Used) -> None:
        self._used = used
        self.spent = self.spent.plus(used)
        self._add_usage(used)

    def _add_usage(self, used: Used) -> None:
        self.usage = self.usage.plus(used)
        self._telling.send_nowait({"type": "token_budget_updated", "usage": self.usage.shown()})

    def is_nearly_full(self) -> bool:
        """Whether the context has so little room left that it should be summarized."""
        return self._setting.is_nearly_full(self._used)

    async def end_step(self) -> None:
        self._check_going()
        await self._finish(Finish("tool_use", int(self._clock.now_s())))

    async def end(self, ending: Ending) -> None:
        """The turn is over: finish its answer, if one is open, with a result for every call."""
        if self._answer is None or self._answer.draft.message.is_summary_message:
            return
        message = self._answer.draft.fold()
        if self._used is None and message.parts:
            # It was cut off, so nobody counted: an estimate, which costs nothing.
            self._add_usage(estimate(self.history, message.parts))
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.id not in self._calls.answered:
                await self._answer_missing(part.data, ending)
        await self._finish(finish_of(ending, int(self._clock.now_s())))

    async def _answer_missing(self, call: ToolCall, ending: Ending) -> None:
        """A call has no result: it did not end, it was not started, or only its message is new."""
        known = self._calls.results.get(call.id)
        if known is None:
            has_started = call.id in self._calls.started
            words = unanswered_call_text(ending, "ask" if has_started else None)
            known = ToolResult(call.id, call.name, words, is_error=True)
            if has_started:
                await self._send_result(known)
        await self._write_result(known)

    async def _finish(self, finish: Finish) -> None:
        message = self._present().draft.fold()
        self._answer = None
        now = int(self._clock.now_s())
        close_parts(message.parts, now)
        message.parts.append(FinishPart(finish))
        message.rev += 1
        message.updated_at = now
        self.history += [message, *self._calls.stored_results()]
        await self._send_message(message)

    def text(self) -> str:
        """What the latest answer says."""
        return "" if self._last is None else full_text(self._last.parts)

    # --- summaries

    def said(self) -> str:
        """What the host asked for."""
        return "\n\n".join(self._said)

    async def begin_summary(self) -> list[Message]:
        self._check_going()
        self._open(_send_nothing, summary=True)  # Nobody hears of one that is not finished.
        return self.history

    async def end_summary(self, used: Used, prompt: str) -> None:
        """From here on the model reads the summary, and `prompt` to go on with."""
        summary = self._present().draft.fold()
        if not full_text(summary.parts).strip():
            raise ModelFailed("No summary", "The model answered the request for one with nothing.")
        self._add_usage(used)
        await self._finish(Finish("end_turn", int(self._clock.now_s())))
        again = user_message(self._session_id, continuation(prompt))
        self.history = [as_user(summary), again]

    # --- telling

    def _new(self, role: Role, parts: list[Part]) -> Message:
        now = int(self._clock.now_s())
        message_id = self._ids.message()
        return Message(message_id, role, self._session_id, parts, created_at=now, updated_at=now)

    async def _send_message(self, message: Message) -> None:
        # As it is now: it may change before it is sent.
        told = msgspec.to_builtins(message)
        await self._telling.send({"type": "session_message_written", "message": told})


def _send_nothing(kind: Growing, text: str) -> None:
    pass


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
