"""The journal of a worker's run, which sends every change to the host and stores nothing.

Owns the messages of one run: the history for its model, the growing answer, and its calls. Changes
are sent in order. A foreign host reads the texts, the calls and the end; a culm host also receives
every message as it is written (`session_message_written`, where the latest per id counts), cleared
answers (`answer_cleared`), and admitted prompts (`message_admitted`).
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from culm.clock import Clock
from culm.errors import ModelFailed
from culm.fleet.executor import CancelToken, SteerInbox, SteerMessage
from culm.fleet.worker.executors.runtime_events import EventSender
from culm.ids import Ids, RunId, SessionId
from culm.run.context import as_user, continuation, needs_summary, user_message
from culm.run.draft import Draft, OpenAnswer, check_part, check_size, put_parts
from culm.run.journal import JournalSetting, StepCalls
from culm.run.limits import RunSpending, estimate
from culm.run.loop import Growth
from culm.run.rules import unanswered_call_text
from culm.store.base import Unit
from culm.tools.base import CallRequest, CallResult
from culm.wire.codec import Json, clean, encodable
from culm.wire.messages import (
    Finish,
    FinishPart,
    Growing,
    Message,
    Part,
    Role,
    Session,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    close_parts,
    full_text,
    new_part,
)
from culm.wire.runs import Ending, Used, finish_of

SendEvent = Callable[[Growing, str], None]


class RunUsage(NamedTuple):
    """The usage of a run so far."""

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
    """Writes an answer in memory and sends each growth at once."""

    def __init__(self, send: SendEvent) -> None:
        self._send = send

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None:
        text = clean(text)
        check_size(draft.size + len(text))
        if part == len(draft.message.parts):
            check_part(part)
            draft.message.parts.append(new_part(kind))
        draft.pieces.setdefault(part, []).append(text)
        draft.size += len(text)
        self._send(kind, text)

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
    """The journal of one run; `run/loop.py` documents its methods."""

    def __init__(
        self,
        events: EventSender,
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
        self._events = events
        self._steer = steer
        self._cancel = cancel
        self._setting = setting
        self._clock = clock
        self._ids = ids
        self._run_id = run_id
        self._session_id = session_id
        self.session = Session(session_id)
        self.history = history  # For the model.
        self._prompts = [full_text(m.parts) for m in history if m.role == "user"][-1:]
        self._waiting: list[SteerMessage] = []  # Received from the host and not admitted yet.
        self._answer: OpenAnswer | None = None
        self._calls = StepCalls()
        self._last: Message | None = None  # The latest answer.
        self._used: Used | None = None  # By the current step.
        self.usage = RunUsage()
        self.spent = RunSpending()
        self.denied = ""  # The denied call and the reason, which end the turn.

    def _check_going(self) -> None:
        """Raise a cancel that a tool may have swallowed, so that no further step begins."""
        if self._cancel.is_set():
            raise asyncio.CancelledError

    # --- a step

    async def begin_step(self) -> list[Message]:
        self._check_going()
        for steer in self._take_steering():
            self.history.append(user_message(self._session_id, steer.text))
            self._prompts.append(steer.text)
            if steer.id:
                await self._events.send({"type": "message_admitted", "id": steer.id})
        progress = {"session_id": self._session_id, "round_count": self.spent.steps + 1}
        self._events.send_nowait({"type": "runner_progress", **progress})
        self._last = self._open(self._send_growth)
        await self._send_message(self._last)
        return self.history

    def _take_steering(self) -> list[SteerMessage]:
        taken, self._waiting = [*self._waiting, *self._steer.take_nowait()], []
        return taken

    def is_steered(self) -> bool:
        """Return True if a prompt of the host is waiting to be admitted."""
        self._waiting = self._take_steering()
        return bool(self._waiting)

    def _open(self, send: SendEvent, *, summary: bool = False) -> Message:
        message = self._new("assistant", [])
        message.model, message.provider = self._setting.model_id, self._setting.provider_id
        message.is_summary_message = summary
        self._used = None
        self._calls = StepCalls()
        self._answer = OpenAnswer(
            Draft(message), EventWriter(send), self._clock, lambda written: written
        )
        return message

    def _send_growth(self, kind: Growing, text: str) -> None:
        if kind != "input":  # Calls are sent when they are complete.
            self._events.grow("token" if kind == "text" else "reasoning_token", text)

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
            await self._events.send({"type": "answer_cleared", "message_id": message.id})

    # --- calls

    async def record_calls(self) -> list[CallRequest]:
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
        await self._events.send({"type": "tool_start", "tool_call_id": call.id, **about})

    async def answer_call(self, call: CallRequest, result: CallResult) -> None:
        if result.ends_turn is not None:
            self._check_going()  # A cancelled run has its approval requests denied.
        if call.id not in self._calls.started:  # Refused calls are sent, too.
            await self._send_start(call)
        if result.ends_turn == "denied":
            self.denied = f"{call.name}: {result.content}"
        stored = encodable(self._calls.answer(call, result))
        await self._send_result(stored)
        await self._write_result(stored)

    async def _send_result(self, result: ToolResult) -> None:
        event: dict[str, Json] = {"tool_call_id": result.tool_call_id, "metadata": result.metadata}
        if result.is_error:
            event |= {"type": "tool_error", "error": result.content}
        else:
            value = {"success": True, "result": result.content}
            event |= {"type": "tool_complete", "result": value}
        await self._events.send(event)

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
        self._events.send_nowait({"type": "token_budget_updated", "usage": self.usage.shown()})

    def is_nearly_full(self) -> bool:
        """Return True if the context has so little room left that it should be summarized."""
        used = self._used
        return used is not None and needs_summary(self._setting.window, used.all_tokens)

    async def end_step(self) -> None:
        self._check_going()
        await self._finish(Finish("tool_use", int(self._clock.now_s())))

    async def end(self, ending: Ending) -> None:
        """End the turn: finish the open answer, if any, with a result for every call."""
        if self._answer is None or self._answer.draft.message.is_summary_message:
            return
        message = self._answer.draft.fold()
        if self._used is None and message.parts:
            # It was cut off before the provider reported usage.
            self._add_usage(estimate(self.history, message.parts, self._setting.price))
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.id not in self._calls.answered:
                await self._answer_missing(part.data, ending)
        await self._finish(finish_of(ending, int(self._clock.now_s())))

    async def _answer_missing(self, call: ToolCall, ending: Ending) -> None:
        """Write the result of a call that did not end or start, or whose result was not written."""
        known = self._calls.results.get(call.id)
        if known is None:
            has_started = call.id in self._calls.started
            text = unanswered_call_text(ending, "ask" if has_started else None)
            known = ToolResult(call.id, call.name, text, is_error=True)
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
        """Return the text of the latest answer."""
        return "" if self._last is None else full_text(self._last.parts)

    # --- summaries

    def prompt_text(self) -> str:
        """Return the assignment and all admitted prompts."""
        return "\n\n".join(self._prompts)

    async def begin_summary(self) -> list[Message]:
        self._check_going()
        self._open(_send_nothing, summary=True)  # An unfinished summary is not sent.
        return self.history

    async def end_summary(self, used: Used, prompt: str) -> None:
        """Replace the history by the summary and a prompt to continue with."""
        summary = self._present().draft.fold()
        if not full_text(summary.parts).strip():
            raise ModelFailed("No summary", "The model returned an empty summary.")
        self._add_usage(used)
        await self._finish(Finish("end_turn", int(self._clock.now_s())))
        again = user_message(self._session_id, continuation(prompt))
        self.history = [as_user(summary), again]

    # --- messages

    def _new(self, role: Role, parts: list[Part]) -> Message:
        now = int(self._clock.now_s())
        message_id = self._ids.message()
        return Message(message_id, role, self._session_id, parts, created_at=now, updated_at=now)

    async def _send_message(self, message: Message) -> None:
        # A copy, as the message may change before it is sent.
        copy = msgspec.to_builtins(message)
        await self._events.send({"type": "session_message_written", "message": copy})


def _send_nothing(kind: Growing, text: str) -> None:
    pass


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
