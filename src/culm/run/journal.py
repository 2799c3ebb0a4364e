"""The journal of a turn: stores the messages and calls of one run, each before the next step.

Owns the messages of one turn. `runs.py` decides when a turn begins and why it ends, `loop.py` runs
it, and `draft.py` assembles the growing answer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from culm.clock import Clock, pause
from culm.errors import ModelFailed, SessionNotFound, StoreBusy, StoreClosed
from culm.run.context import as_user, continuation, history_of, needs_summary, user_message
from culm.run.draft import OpenAnswer, PendingWrites, calls_in
from culm.run.limits import FREE, Price, estimate
from culm.run.live_run import LiveRun
from culm.run.loop import Growth
from culm.run.messages import Messages
from culm.run.rules import leaves_rows, unanswered_call_text
from culm.store.base import Tx, Unit, together
from culm.store.letters import admit_letters
from culm.store.messages import close_message_of, conversation, delete_message
from culm.store.runs import (
    add_calls,
    add_run_usage,
    end_run,
    fold_runs,
    set_call_state,
    set_run_model,
    start_run,
    unless_ended,
)
from culm.store.sessions import add_usage, set_summary
from culm.store.store import Store
from culm.tools.base import CallRequest, CallResult, Tool
from culm.wire.events import CallOutput
from culm.wire.messages import (
    Finish,
    Message,
    Session,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import CrashPolicy, Ending, Outcome, Used, finish_of

log = logging.getLogger(__name__)

GOES_ON = Ending("end_turn", stop="tool_use")
RETRY_S = 1.0  # The retry interval while the store cannot write the end.


class JournalSetting(Struct, frozen=True):
    """Model settings of one turn, for its journal."""

    model_id: str = ""
    provider_id: str = ""
    # The size of the context window in tokens; 0 if it is unknown, or must not be summarized.
    window: int = 0
    tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    price: Price = FREE


class StepCalls(Struct):
    """The calls of one step: all, the started ones, and their results."""

    known: list[CallRequest] = field(default_factory=list[CallRequest])
    started: set[str] = field(default_factory=set[str])
    results: dict[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    answered: dict[str, Message] = field(default_factory=dict[str, Message])  # Stored results.
    # Results of an earlier server.
    before: dict[str, CallResult] = field(default_factory=dict[str, CallResult])
    refusal: Outcome | None = None  # How a result ends the turn, for example a denial.

    def take_over(self, messages: Iterable[Message]) -> None:
        """Load the results that an earlier server has stored."""
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolResultPart):
                    result = part.data
                    self.results[result.tool_call_id] = result
                    self.answered[result.tool_call_id] = message
                    self.before[result.tool_call_id] = CallResult(result.content, result.is_error)

    def answer(self, call: CallRequest, result: CallResult) -> ToolResult:
        """Convert the result of a call into its stored form."""
        self.refusal = self.refusal or result.ends_turn
        stored = self.results[call.id] = ToolResult(
            tool_call_id=call.id,
            name=call.name,
            content=result.content,
            data=result.data,
            mime_type=result.mime_type,
            metadata=result.metadata,
            is_error=result.is_error,
        )
        return stored

    def result_of(self, call: ToolCall, otherwise: str) -> ToolResult:
        """Return the result of a call, or an error with the text `otherwise` if it has none."""
        known = self.results.get(call.id)
        return known or ToolResult(call.id, call.name, otherwise, is_error=True)

    def stored_results(self) -> Sequence[Message]:
        """Return the stored results in the order of the calls."""
        return [self.answered[call.id] for call in self.known if call.id in self.answered]

    def has_begun(self) -> bool:
        """Return True if a call has started without a stored result: it may have had its effect."""
        return bool(self.started - self.answered.keys())


class TurnOwner(Protocol):
    """The owner of the runs, to which the journal reports their progress: `Runs`."""

    def fold(self, host: LiveRun) -> Sequence[LiveRun]: ...
    def unfold(self, runs: Iterable[LiveRun]) -> None: ...
    def admit(self, runs: Iterable[LiveRun]) -> None: ...
    def on_active(self, run: LiveRun) -> None: ...
    def on_delayed(self, run: LiveRun) -> None: ...
    def on_ended(self, run: LiveRun, ending: Ending, answer: str = "") -> None: ...


class TurnJournal:
    """The journal of one run. Implements `loop.LoopJournal`."""

    def __init__(
        self,
        run: LiveRun,
        owner: TurnOwner,
        setting: JournalSetting,
        store: Store,
        messages: Messages,
        clock: Clock,
    ) -> None:
        self._run = run
        self._owner = owner
        self._setting = setting
        self._store = store
        self._messages = messages
        self._compose = partial(messages.compose, run.session_id, run_id=run.id)
        self._clock = clock
        self._leaves_rows = leaves_rows(run.state)  # Also if the run never begins.
        self.history: list[Message] = []  # The messages that the model reads.
        self.session = Session(run.session_id)  # Read when the turn began.
        self._began = False  # The run is active; its user message and an answer are stored.
        self.user_messages: list[Message] = []  # User messages of this turn.
        self._answer: OpenAnswer | None = None
        self._calls = StepCalls()
        self._used: Used | None = None
        self._is_counted = False  # The usage is stored.
        self._last: Message | None = None  # The latest answer.
        # The ending stored in that answer, if it ended the turn.
        self._closed_by: Ending | None = None
        self._writes = PendingWrites()
        self._ending = False
        self._left: Sequence[int] = ()  # Processes that did not stop.
        # Called once, when the answer begins to grow, to start work that is not urgent.
        self.on_answer: Callable[[], None] | None = None

    async def prepare(self) -> None:
        """Read the conversation up to this turn."""
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
        """Continue a step of an earlier server: a complete answer, with some results."""
        draft = self._messages.reopen(message)
        self._answer = OpenAnswer(draft, self._messages, self._clock, self._writes.track)
        self._began, self._last = True, message
        self._calls.known = [replace(call, run_id=self._run.id) for call in calls_in(message)]
        self._calls.take_over(results)
        self.user_messages = [one for one in self.history if one.role == "user"][-1:]
        # Approximate; the real usage is already stored.
        self._used = estimate(self.history, message.parts, self._setting.price)
        self._is_counted = True

    @property
    def reentered(self) -> Sequence[CallRequest]:
        """The calls of a step that an earlier server began."""
        return self._calls.known if self._run.reenters else ()

    @property
    def answer_id(self) -> str:
        """The id of the open answer, or else of the latest one."""
        return "" if self._last is None else self._last.id

    def known_results(self) -> Mapping[str, CallResult]:
        return self._calls.before

    @property
    def refusal(self) -> Outcome | None:
        """The outcome with which a result of the present step ends the turn."""
        return self._calls.refusal

    def has_begun_calls(self) -> bool:
        return self._calls.has_begun()

    def _check_going(self) -> None:
        """Stop a turn that was cancelled: a tool may have swallowed its `CancelledError`."""
        if self._run.stop is not None:
            raise asyncio.CancelledError
        self._check_open()

    def _check_open(self) -> None:
        """Stop a turn that did not stop in time: the run has ended without it."""
        if self._ending:
            raise asyncio.CancelledError

    # --- a step

    async def begin_step(self) -> list[Message]:
        """Activate the run, store its user messages and open an answer, in one transaction."""
        self._check_going()
        self._closed_by = None
        run, units, messages = self._run, list[Unit](), list[Message]()
        joining = self._owner.fold(run)
        if not self._began:
            units.append(start_run(run.id, was_queued=run.state == "queued"))
        for active in joining if self._began else [run, *joining]:
            message, unit = self._compose("user", active.asked.parts())
            units.append(unit)
            messages.append(message)
        units.append(fold_runs([other.id for other in joining], run.id))

        def committed() -> None:
            self.history += messages
            self.user_messages += messages
            self._owner.admit([run, *joining])

        written = self._open(together(*units), committed)

        def on_written(write: asyncio.Future[None]) -> None:
            if write.exception() is not None:
                self._owner.unfold(joining)

        written.add_done_callback(on_written)
        await asyncio.shield(written)
        return self.history

    def user_text(self) -> str:
        """Return the user messages of this turn as one text."""
        return "\n\n".join(full_text(message.parts) for message in self.user_messages)

    async def begin_summary(self) -> list[Message]:
        """Open a summary like a step, but without user messages, and without joining runs."""
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
            self._owner.on_active(self._run)
            self._answer = OpenAnswer(draft, self._messages, self._clock, self._writes.track)
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
        return self._writes.track(written)

    def _present(self) -> OpenAnswer:
        assert self._answer is not None, "an answer was begun"
        return self._answer

    def grow(self, event: Growth) -> None:
        if self.on_answer is not None:
            self._notify_answered()
        self._present().grow(event)

    def _notify_answered(self) -> None:
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()

    async def clear(self) -> None:
        self._check_going()
        await self._present().clear()

    async def hand_over(self, setting: JournalSetting) -> None:
        """Switch to another model and discard the answer so far."""
        self._check_going()
        self._setting = setting
        unit = set_run_model(self._run.id, setting.provider_id, setting.model_id)
        named = self._store.write(unit)
        await asyncio.shield(self._writes.track(named))
        if self._answer is not None:
            await self._answer.clear(model=setting.model_id, provider=setting.provider_id)

    # --- calls

    async def record_calls(self) -> list[CallRequest]:
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
        await asyncio.shield(self._writes.track(self._store.write(unit)))

    def record_output(self, call_id: str, text: str) -> CallOutput | None:
        """Record output of a running call; None if it must not be published."""
        step = self._calls
        if self._answer is None or call_id not in step.started or call_id in step.answered:
            return None  # No result could contain it.
        return self._messages.record_output(self._answer.draft, call_id, text)

    async def answer_call(self, call: CallRequest, result: CallResult) -> None:
        self._check_open()
        step, draft = self._calls, self._present().draft
        message, unit = self._result(step.answer(call, result))

        def committed(_: None) -> None:
            step.answered[call.id] = message
            self._messages.forget_output(draft, call.id)

        await asyncio.shield(self._writes.track(self._store.write(unit, committed)))

    def _result(self, result: ToolResult) -> tuple[Message, Callable[[Tx], None]]:
        message, unit = self._compose("tool", [ToolResultPart(result)])
        of_message = self._present().draft.message.id
        return message, together(unit, set_call_state(of_message, result.tool_call_id, "answered"))

    # --- the end of a step

    def count(self, used: Used) -> None:
        self._used, self._is_counted = used, False

    def count_unreported(self, *, is_complete: bool = False) -> None:
        """Estimate the usage of a request without a report, with its cost if it was cut off."""
        parts = () if self._answer is None else self._answer.draft.fold().parts
        price = FREE if is_complete else self._setting.price
        self.count(estimate(self.history, parts, price))

    def store_count(self) -> None:
        """Store the usage now, as the end of the step may take long."""
        written = self._writes.track(self._store.write(together(self._usage())))
        self._is_counted = self._used is not None
        written.add_done_callback(self._check_counted)

    def is_nearly_full(self) -> bool:
        """Return True if the context has so little room left that it should be summarized."""
        used = self._used
        return used is not None and needs_summary(self._setting.window, used.all_tokens)

    async def end_step(self, ending: Ending | None = None) -> None:
        """Finish the answer: with `ending` for good, otherwise because another step follows."""
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
        await asyncio.shield(self._writes.track(written))

    def _usage(self) -> Unit | None:
        """Return the unit that stores the usage: once, with the calls or else with the end."""
        if self._used is None or self._is_counted:
            return None
        session = add_usage(self._run.session_id, self._used)
        return together(session, add_run_usage(self._run.id, self._used))

    async def end_summary(self, used: Used, prompt: str) -> None:
        """Replace the history with the summary, followed by `prompt` if the turn continues."""
        self._check_going()
        draft = self._present().draft
        if not full_text(draft.fold().parts).strip():
            self.count(used)  # It was charged nevertheless.
            raise ModelFailed("No summary", "The model returned an empty summary.")
        replaces = set_summary(self._run.session_id, draft.message.id, used)

        def committed() -> None:
            self._answer = None
            self.history = [as_user(draft.message)]
            if prompt:
                self.history.append(user_message(self._run.session_id, continuation(prompt)))

        finish = Finish("end_turn", int(self._clock.now_s()))
        after = together(replaces, add_run_usage(self._run.id, used))
        written = self._messages.finish(draft, finish, after=after, on_commit=committed)
        await asyncio.shield(self._writes.track(written))

    # --- the end of the run

    async def end(self, ending: Ending, left: Sequence[int] = ()) -> None:
        """Store the end of the run with everything that belongs to it, once and in one transaction.

        `left` are processes that did not stop. Retries while the store cannot write. Returns when
        the end is durable and its owner was notified, or when the workspace closes before that;
        then the next start recovers the run.
        """
        self._ending, self._left = True, left
        try:
            await self._write_end(ending)
        except Exception:  # boundary: the end is stored even if the store rejects the rest
            log.exception("cannot store the last messages of run %s", self._run.id)
            ending = Ending("error", "Internal error", "See the server's log.")
            closes = close_message_of(self._run.session_id, self._finish_of(ending))
            await self._end_without_answer(ending, None, [closes])

    async def _write_end(self, ending: Ending) -> None:
        if self._began:
            self._notify_answered()
        await self._writes.wait()
        if self._answer is not None and self._answer.draft.ended:
            # The end of its last step could not be stored and is being retried. Wait for it.
            self._owner.on_delayed(self._run)
            await self._answer.draft.gone.wait()
        answer = self._answer
        if answer is None or answer.draft.ended:
            await self._end_between(ending)
        elif answer.draft.message.is_summary_message:
            await self._end_in_summary(answer, ending)
        else:
            await self._end_in_answer(answer, ending)

    async def _end_in_answer(self, answer: OpenAnswer, ending: Ending) -> None:
        message = answer.draft.fold()
        if self._used is None and message.parts:
            self.count_unreported(is_complete=ending.outcome == "end_turn")
        missing = [unit for _, unit in self._missing_results(message, ending)]
        await self._finish(answer, ending, together(*missing, self._usage()), message)

    async def _end_in_summary(self, answer: OpenAnswer, ending: Ending) -> None:
        """Delete a partial summary, unless the run failed: then it shows the error."""
        if ending.outcome == "error":
            await self._finish(answer, ending, self._usage(), self._last)
            return
        message_id = answer.draft.message.id
        row, unit = self._closing_row(ending)
        units = [delete_message(message_id), unit]
        forget = partial(self._messages.forget, message_id)
        await self._end_without_answer(ending, row or self._last, units, forget)

    async def _end_between(self, ending: Ending) -> None:
        """End a run without an open answer: not begun, between two steps, or its draft is lost."""
        units: list[Unit | None] = []
        answer = self._last
        if self._answer is not None:
            units = [close_message_of(self._run.session_id, self._finish_of(ending))]
        elif self._began:
            row, unit = self._closing_row(ending)
            units, answer = [unit], row or answer
        elif self._run.kind == "prompt" and (self._leaves_rows or ending.failed):
            _, prompt = self._compose("user", self._run.asked.parts())
            row, unit = self._closing_row(ending)
            units = [prompt, lambda tx: admit_letters(tx, self._run.id), unit]
            answer = None if ending.outcome == "canceled" else row
            admit = partial(self._owner.admit, [self._run])
            await self._end_without_answer(ending, answer, [*units, self._usage()], admit)
            return
        await self._end_without_answer(ending, answer, [*units, self._usage()])

    def _finish_of(self, ending: Ending) -> Finish:
        return finish_of(ending, int(self._clock.now_s()))

    def _end_unit(self, answer: Message | None, ending: Ending) -> Callable[[Tx], None]:
        return end_run(
            self._run.id,
            ending,
            message_id="" if answer is None else answer.id,
            text=_text_of(answer),
            settled=self._run.control.settled,
            left=self._left,
        )

    def _closing_row(self, ending: Ending) -> tuple[Message | None, Unit | None]:
        """Add an answer that shows only the ending, if the run needs one."""
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
        """Return a result for every call without one."""
        missing: list[tuple[Message, Unit]] = []
        outputs = self._present().draft.outputs
        for part in message.parts:
            if isinstance(part, ToolCallPart) and part.data.id not in self._calls.answered:
                call = part.data
                started = self._crash_of(call.name) if call.id in self._calls.started else None
                text = unanswered_call_text(ending, started, outputs.get(call.id))
                missing.append(self._result(self._calls.result_of(call, text)))
        return missing

    async def _finish(
        self, open_answer: OpenAnswer, ending: Ending, before: Unit | None, answer: Message | None
    ) -> None:
        """End the run together with its open answer."""
        draft = open_answer.draft
        try:
            await self._messages.finish(
                draft,
                self._finish_of(ending),
                before=before,
                after=self._end_unit(answer, ending),
                on_commit=lambda: self._owner.on_ended(self._run, ending, _text_of(answer)),
            )
        except StoreBusy:
            self._owner.on_delayed(self._run)
            await draft.gone.wait()

    async def _end_without_answer(
        self,
        ending: Ending,
        answer: Message | None,
        units: Sequence[Unit | None],
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        """End the run with these units; retry until it is durable or the store has closed."""
        # A cancel may have ended it already, if it was only waiting.
        unit = unless_ended(self._run.id, together(*units, self._end_unit(answer, ending)))

        def committed(_: None) -> None:
            if on_commit is not None:
                on_commit()
            self._owner.on_ended(self._run, ending, _text_of(answer))

        while True:
            try:
                await self._store.write(unit, committed)
            except StoreClosed:
                return
            except StoreBusy:
                self._owner.on_delayed(self._run)
                await pause(self._clock, RETRY_S)
            else:
                return


def _text_of(answer: Message | None) -> str:
    return "" if answer is None else full_text(answer.parts)
