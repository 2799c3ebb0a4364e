"""A turn written down: the messages and calls of one run, each durable before what follows it.

Owns the messages of one turn. When a turn begins and why it ends is `runs.py`'s; what happens in
one is `loop.py`'s; how an answer grows is `answer.py`'s.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from culm.clock import Clock, pause
from culm.errors import ModelFailed, SessionNotFound, StoreBusy, StoreClosed
from culm.run.answer import OpenAnswer, calls_in
from culm.run.context import as_user, continuation, history_of, user_message
from culm.run.limits import estimate
from culm.run.live_run import LiveRun
from culm.run.loop import Growth
from culm.run.messages import Messages
from culm.run.rules import leaves_rows, unanswered_call_text
from culm.run.setting import JournalSetting
from culm.run.step_calls import StepCalls
from culm.store.base import Tx, Unit, together
from culm.store.calls import add_calls, set_call_state
from culm.store.letters import admit_letters
from culm.store.messages import close_message_of, conversation, delete_message
from culm.store.runs import count_on_run, end_run, fold_runs, name_model, start_run, unless_ended
from culm.store.sessions import add_usage, set_summary
from culm.store.store import Store
from culm.tools.base import CallRequest, CallResult
from culm.wire.endings import Ending, finish_of
from culm.wire.messages import (
    Finish,
    Message,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import CrashPolicy, Settled, Used
from culm.wire.sessions import Session

log = logging.getLogger(__name__)

GOES_ON = Ending("end_turn", stop="tool_use")
RETRY_S = 1.0  # How often a store that cannot write the end is tried again.


class TurnJournal:
    """The journal of one run; see `loop.Journal` for what a turn says to it."""

    def __init__(
        self,
        run: LiveRun,
        setting: JournalSetting,
        store: Store,
        messages: Messages,
        clock: Clock,
        joining: Callable[[], Sequence[LiveRun]],
    ) -> None:
        self._run = run
        self._setting = setting
        self._store = store
        self._messages = messages
        self._compose = partial(messages.compose, run.session_id, run_id=run.id)
        self._clock = clock
        self._joining = joining  # The runs that would share this turn now.
        self._leaves_rows = leaves_rows(run.state)  # Even if it never begins.
        self.history: list[Message] = []  # What the model reads.
        self.session = Session(run.session_id)  # As it was when the turn began.
        self._began = False  # The run is active, its user message and an answer are stored.
        self.said_messages: list[Message] = []  # By people, in this turn.
        self._answer: OpenAnswer | None = None
        self._calls = StepCalls()
        self._used: Used | None = None
        self._is_counted = False  # That is stored.
        self._last: Message | None = None  # The latest answer.
        self._closed_by: Ending | None = None  # What that answer was finished with, if for good.
        self._writes: set[asyncio.Future[None]] = set()
        self._ending = False
        # Called once, when the answer begins to grow: what is not urgent waits for that.
        self.on_answer: Callable[[], None] | None = None

    async def prepare(self) -> None:
        """Read what was said before."""
        found = await self._store.read(conversation(self._run.session_id))
        if found is None:
            raise SessionNotFound(self._run.session_id)
        self.session, messages = found
        open_at = [n for n, message in enumerate(messages) if message.id == self._run.reenters]
        read = messages[: open_at[0]] if open_at else messages
        self.history = history_of(read, self.session.summary_message_id)
        if open_at:
            self._reenter(messages[open_at[0]], messages[open_at[0] + 1 :])

    def _reenter(self, message: Message, results: Sequence[Message]) -> None:
        """Stand where the last server stood: an answer is complete, some calls have results."""
        draft = self._messages.reopen(message)
        self._answer = OpenAnswer(draft, self._messages, self._clock, self._track)
        self._began, self._last = True, message
        self._calls.known = [replace(call, run_id=self._run.id) for call in calls_in(message)]
        self._calls.take_over(results)
        self.said_messages = [said for said in self.history if said.role == "user"][-1:]
        self._used = estimate(self.history, message.parts)  # About; what it used is counted.
        self._is_counted = True

    @property
    def reentered(self) -> Sequence[CallRequest]:
        """The calls of the step that an earlier server had begun."""
        return self._calls.known if self._run.reenters else ()

    @property
    def answer_id(self) -> str:
        """Of the answer that is open, or was the latest."""
        return "" if self._last is None else self._last.id

    def known_results(self) -> Mapping[str, CallResult]:
        return self._calls.before

    def has_begun_calls(self) -> bool:
        return self._calls.has_begun()

    def _check_going(self) -> None:
        """A tool may swallow the cancel that stops its turn; no further step comes of that."""
        if self._run.stop is not None:
            raise asyncio.CancelledError
        self._check_open()

    def _check_open(self) -> None:
        """Who did not stop in time finds that the run has ended without it."""
        if self._ending:
            raise asyncio.CancelledError

    # --- a step

    async def begin_step(self) -> list[Message]:
        """One transaction: the run is active, what was said is stored, an answer is begun."""
        self._check_going()
        self._closed_by = None
        run, units, said = self._run, list[Unit](), list[Message]()
        joining = list(self._joining())
        if not self._began:
            units.append(start_run(run.id, was_queued=run.state == "queued"))
        for active in joining if self._began else [run, *joining]:
            message, unit = self._compose("user", active.asked.parts())
            units.append(unit)
            said.append(message)
        units.append(fold_runs([other.id for other in joining], run.id))
        for other in joining:
            other.state, other.host = "folded", run

        def committed() -> None:
            self.history += said
            self.said_messages += said
            for one in (run, *joining):
                one.admit()

        written = self._open(together(*units), committed)

        def settled(write: asyncio.Future[None]) -> None:
            if write.exception() is not None:
                for other in joining:
                    other.state, other.host = "queued", None

        written.add_done_callback(settled)
        await asyncio.shield(written)
        return self.history

    def said(self) -> str:
        """What people asked for in this turn."""
        return "\n\n".join(full_text(message.parts) for message in self.said_messages)

    async def begin_summary(self) -> list[Message]:
        """As `begin_step`, for a summary: nothing is said, and nobody joins."""
        self._check_going()
        was_queued = self._run.state == "queued"
        starts = None if self._began else start_run(self._run.id, was_queued=was_queued)
        await asyncio.shield(self._open(starts, lambda: None, summary=True))
        return self.history

    def _open(
        self, before: Unit | None, on_commit: Callable[[], None], *, summary: bool = False
    ) -> asyncio.Future[None]:
        self._used, self._is_counted = None, False
        self._calls = StepCalls()

        def committed() -> None:
            self._began = True
            self._run.state = "active"
            self._answer = OpenAnswer(draft, self._messages, self._clock, self._track)
            if not summary:
                self._last = draft.message
            on_commit()

        draft, written = self._messages.open(
            self._run.session_id,
            run_id=self._run.id,
            model=self._setting.model_id,
            provider=self._setting.provider_id,
            summary=summary,
            before=before,
            on_commit=committed,
        )
        return self._track(written)

    def _present(self) -> OpenAnswer:
        assert self._answer is not None, "an answer was begun"
        return self._answer

    def grow(self, event: Growth) -> None:
        if self.on_answer is not None:
            self._say_answered()
        self._present().grow(event)

    def _say_answered(self) -> None:
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()

    async def clear(self) -> None:
        self._check_going()
        await self._present().clear()

    async def hand_over(self, setting: JournalSetting) -> None:
        """Another model answers: what the last one said is taken back."""
        self._check_going()
        self._setting = setting
        named = self._store.write(name_model(self._run.id, setting.provider_id, setting.model_id))
        await asyncio.shield(self._track(named))
        if self._answer is not None:
            await self._answer.clear(model=setting.model_id, provider=setting.provider_id)

    # --- calls

    async def know_calls(self) -> list[CallRequest]:
        self._check_going()
        answer = self._present()
        answer.end_reasoning()
        calls = self._calls.known = [replace(c, run_id=self._run.id) for c in answer.calls()]
        rows = [(call.id, call.name, self._crash_of(call.name)) for call in calls]
        if calls:
            known = add_calls(self._run.id, answer.draft.message.id, rows)
            written = answer.complete(calls, together(known, self._usage()))
            self._is_counted = self._used is not None
            written.add_done_callback(self._check_counted)
            await asyncio.shield(written)
        return calls

    def _check_counted(self, written: asyncio.Future[None]) -> None:
        self._is_counted = self._is_counted and written.exception() is None

    def _crash_of(self, name: str) -> CrashPolicy:
        tool = self._setting.tools.get(name)
        return "again" if tool is None else tool.crash

    async def start_call(self, call: CallRequest) -> None:
        self._check_going()
        self._calls.started.add(call.id)
        unit = set_call_state(self._present().draft.message.id, call.id, "started")
        await asyncio.shield(self._track(self._store.write(unit)))

    async def answer_call(self, call: CallRequest, result: CallResult) -> None:
        self._check_open()
        step = self._calls
        message, unit = self._result(step.answer(call, result))

        def committed(_: None) -> None:
            step.answered[call.id] = message

        await asyncio.shield(self._track(self._store.write(unit, committed)))

    def _result(self, result: ToolResult) -> tuple[Message, Callable[[Tx], None]]:
        message, unit = self._compose("tool", [ToolResultPart(result)])
        of_message = self._present().draft.message.id
        return message, together(unit, set_call_state(of_message, result.tool_call_id, "answered"))

    # --- the end of a step

    def count(self, used: Used) -> None:
        self._used, self._is_counted = used, False

    def store_count(self) -> None:
        """Have that written down now: the end of the step may be long in coming."""
        written = self._track(self._store.write(together(self._usage())))
        self._is_counted = self._used is not None
        written.add_done_callback(self._check_counted)

    def is_nearly_full(self) -> bool:
        """Whether the context has so little room left that it should be summarized."""
        return self._setting.is_nearly_full(self._used)

    async def end_step(self, ending: Ending | None = None) -> None:
        """Finish the answer: for good with `ending`, else because another step follows."""
        self._check_going()
        draft = self._present().draft
        finish = self._finish_of(ending or GOES_ON)
        missing = [] if ending is None else self._missing_results(draft.fold(), ending)

        def committed() -> None:
            self._answer, self._is_counted = None, True
            self._closed_by = ending
            results = self._calls.stored_results()
            self.history += [draft.message, *results, *(message for message, _ in missing)]

        before = together(*(unit for _, unit in missing), self._usage())
        written = self._messages.finish(draft, finish, before=before, on_commit=committed)
        await asyncio.shield(self._track(written))

    def _usage(self) -> Unit | None:
        """What the answer used, once: with its calls if it has any, else with its end."""
        if self._used is None or self._is_counted:
            return None
        session = add_usage(self._run.session_id, self._used)
        return together(session, count_on_run(self._run.id, self._used))

    async def end_summary(self, used: Used, prompt: str) -> None:
        """From here on the model reads the summary, and `prompt` if it is to go on."""
        self._check_going()
        draft = self._present().draft
        if not full_text(draft.fold().parts).strip():
            self.count(used)  # It was paid for all the same.
            raise ModelFailed("No summary", "The model answered the request for one with nothing.")
        replaces = set_summary(self._run.session_id, draft.message.id, used)

        def committed() -> None:
            self._answer = None
            self.history = [as_user(draft.message)]
            if prompt:
                self.history.append(user_message(self._run.session_id, continuation(prompt)))

        finish = Finish("end_turn", int(self._clock.now_s()))
        after = together(replaces, count_on_run(self._run.id, used))
        written = self._messages.finish(draft, finish, after=after, on_commit=committed)
        await asyncio.shield(self._track(written))

    # --- the end of the run

    async def end(
        self, ending: Ending, settled: Settled | None, ended: Callable[[Ending], None]
    ) -> None:
        """Write the run's end with all that belongs to it, once and in one transaction.

        While the store cannot write it is tried again. Returns when it is durable, and `ended`
        was called; or when the workspace closes without it, and the next start finds the run.
        """
        self._ending = True
        try:
            await self._write_end(ending, settled, lambda: ended(ending))
        except Exception:  # boundary: what a run leaves may be refused; that it ended may not
            log.exception("what run %s leaves cannot be written", self._run.id)
            ending = Ending("error", "Internal error", "See the server's log.")
            closes = close_message_of(self._run.session_id, self._finish_of(ending))
            ends = together(closes, self._end_after(None, ending, settled))
            await self._insist(unless_ended(self._run.id, ends), lambda: ended(ending))

    async def _write_end(
        self, ending: Ending, settled: Settled | None, on_commit: Callable[[], None]
    ) -> None:
        if self._began:
            self._say_answered()
        if self._writes:
            await asyncio.wait(self._writes)
        if self._answer is not None and self._answer.draft.ended:
            # The end of its last step could not be written. That is tried again; ours comes after.
            self._run.state = "ending"
            await self._answer.draft.gone.wait()
        answer = self._answer
        if answer is None or answer.draft.ended:
            await self._end_between(ending, settled, on_commit)
        elif answer.draft.message.is_summary_message:
            await self._end_in_summary(answer, ending, settled, on_commit)
        else:
            await self._end_in_answer(answer, ending, settled, on_commit)

    async def _end_in_answer(
        self,
        answer: OpenAnswer,
        ending: Ending,
        settled: Settled | None,
        on_commit: Callable[[], None],
    ) -> None:
        message = answer.draft.fold()
        if self._used is None and message.parts:
            # It was cut off, so nobody counted: an estimate, which costs nothing.
            self._used = estimate(self.history, message.parts)
        missing = [unit for _, unit in self._missing_results(message, ending)]
        before = together(*missing, self._usage())
        await self._finish(
            answer, ending, before, self._end_after(message, ending, settled), on_commit
        )

    async def _end_in_summary(
        self,
        answer: OpenAnswer,
        ending: Ending,
        settled: Settled | None,
        on_commit: Callable[[], None],
    ) -> None:
        """A partial summary is never left behind, unless to say what went wrong."""
        message_id = answer.draft.message.id
        if ending.outcome == "error":
            ends = self._end_after(self._last, ending, settled)
            await self._finish(answer, ending, self._usage(), ends, on_commit)
            return
        row, unit = self._closing_row(ending)
        ends = together(unit, self._end_after(row or self._last, ending, settled))

        def deleted() -> None:
            self._messages.forget(message_id)
            on_commit()

        await self._insist(together(delete_message(message_id), ends), deleted)

    async def _end_between(
        self, ending: Ending, settled: Settled | None, on_commit: Callable[[], None]
    ) -> None:
        """No answer is open: it never began, it was between two steps, or a bug lost its draft."""
        units: list[Unit | None] = []
        answer = self._last
        if self._answer is not None:
            units = [close_message_of(self._run.session_id, self._finish_of(ending))]
        elif self._began:
            row, unit = self._closing_row(ending)
            units, answer = [unit], row or answer
        elif self._run.kind == "prompt" and (self._leaves_rows or ending.failed):
            said = self._compose("user", self._run.asked.parts())
            row, unit = self._closing_row(ending)
            units = [said[1], lambda tx: admit_letters(tx, self._run.id), unit]
            self._run.was_admitted = True
            answer = None if ending.outcome == "canceled" else row
        units += [self._usage(), self._end_after(answer, ending, settled)]
        # A cancel may have ended it already, if all it had done was wait.
        await self._insist(unless_ended(self._run.id, together(*units)), on_commit)

    def _finish_of(self, ending: Ending) -> Finish:
        return finish_of(ending, int(self._clock.now_s()))

    def _end_after(
        self, answer: Message | None, ending: Ending, settled: Settled | None
    ) -> Callable[[Tx], None]:
        text = self._run.answer = "" if answer is None else full_text(answer.parts)
        return end_run(
            self._run.id,
            ending,
            message_id="" if answer is None else answer.id,
            text=text,
            settled=settled,
            left=self._run.left,
        )

    def _closing_row(self, ending: Ending) -> tuple[Message | None, Unit | None]:
        """An answer that only says how the run ended, unless that is said or has no place."""
        if self._closed_by is not None or self._run.kind == "summary":
            return None, None
        return self._compose(
            "assistant",
            [],
            finish=self._finish_of(ending),
            model=self._setting.model_id,
            provider=self._setting.provider_id,
        )

    def _missing_results(self, message: Message, ending: Ending) -> list[tuple[Message, Unit]]:
        """A result for every call that has none."""
        missing: list[tuple[Message, Unit]] = []
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.id not in self._calls.answered:
                call = part.data
                started = self._crash_of(call.name) if call.id in self._calls.started else None
                words = unanswered_call_text(ending, started)
                missing.append(self._result(self._calls.result_of(call, words)))
        return missing

    async def _finish(
        self,
        answer: OpenAnswer,
        ending: Ending,
        before: Unit | None,
        after: Unit,
        on_commit: Callable[[], None],
    ) -> None:
        finish = self._finish_of(ending)
        try:
            await self._messages.finish(
                answer.draft, finish, before=before, after=after, on_commit=on_commit
            )
        except StoreBusy:
            self._run.state = "ending"
            await answer.draft.gone.wait()

    async def _insist(self, unit: Callable[[Tx], None], on_commit: Callable[[], None]) -> None:
        """Write until it is durable, or the store has closed."""
        while True:
            try:
                await self._store.write(unit, lambda _: on_commit())
            except StoreClosed:
                return
            except StoreBusy:
                self._run.state = "ending"
                await pause(self._clock, RETRY_S)
            else:
                return

    def _track(self, write: asyncio.Future[None]) -> asyncio.Future[None]:
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write
