"""The live runs of a workspace: accepted once, run in order, stopped on request, ended once.

Owns the runs from acceptance to their committed end, and one worker task per session with live
runs. `rules.py` makes the decisions, `turn.py` runs a turn, and `journal.py` stores it. The event
loop is the lock: an operation that must be atomic is a plain `def`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from culm.errors import (
    AgentNotReady,
    AppError,
    NothingRuns,
    RunFolded,
    RunIdReused,
    RunNotHeld,
    RunStarted,
    SessionBusy,
    WorkspaceClosing,
)
from culm.ids import RunId, SessionId
from culm.run import rules
from culm.run.budget import Accounts
from culm.run.journal import TurnJournal
from culm.run.limits import RunSpending
from culm.run.live_run import (
    AgentDuty,
    LiveRun,
    LiveRunControl,
    RunningTurn,
    RunRequest,
    WorkerLink,
    below_session,
    check_room,
    live_again,
    with_below,
)
from culm.run.recovery import RecoveryReport
from culm.run.titles import Titles
from culm.run.turn import TurnContext, run_turn, setting_of
from culm.store.base import Tx, Unit, together
from culm.store.runs import (
    NewRun,
    RunBody,
    StoredRun,
    accept_run,
    add_cancel,
    edit_prompt,
    hold_run,
    order_queue,
    release_run,
    set_limits,
)
from culm.wire.config import SelectedModel
from culm.wire.runs import (
    CANCELED,
    CancelTarget,
    Ending,
    Limits,
    QueueChanged,
    RunChanged,
    changed_of,
)

log = logging.getLogger(__name__)

END_WITHIN_S = 0.003  # A turn that only waits for its model ends sooner.
STOP_S = 5.0  # The time that a stopped run has to release everything it started.


class Runs:
    def __init__(self, context: TurnContext, on_live: Callable[[], None]) -> None:
        self._context = context
        self._on_live = on_live  # Called when the number of live runs changes.
        # Live runs of each session, in queue order.
        self._lines: dict[SessionId, list[LiveRun]] = {}
        self._by_id: dict[RunId, LiveRun] = {}
        self._workers: dict[SessionId, asyncio.Task[None]] = {}
        self._held: dict[RunId, RunChanged] = {}  # Held runs, which a person may start or drop.
        self._turns: dict[asyncio.Task[Ending], RunId] = {}
        self._accounts = Accounts(context.settings)
        self._titles = Titles(context)
        self._closing = False

    # --- reading

    def is_busy(self, session_id: str) -> bool:
        """Return True from the acceptance of a run until its end is committed."""
        return SessionId(session_id) in self._lines

    def live(self) -> list[LiveRun]:
        return list(self._by_id.values())

    def find(self, run_id: str) -> LiveRun | None:
        return self._by_id.get(RunId(run_id))

    def line(self, session_id: SessionId) -> Sequence[LiveRun]:
        return self._lines.get(session_id, ())

    def state_events(self) -> Iterable[RunChanged | QueueChanged]:
        """Return the events that show the current state to a new subscriber."""
        durable = [run for run in self.live() if run.control.accepted.done()]
        yield from (run.changed() for run in durable)
        yield from self._held.values()
        for session_id in self._lines:
            waiting = [run.head() for run in self.queued(session_id) if run in durable]
            if waiting:
                yield QueueChanged(session_id, waiting)

    def queued(self, session_id: SessionId) -> list[LiveRun]:
        """Return the waiting runs, which may still be changed."""
        return [run for run in self.line(session_id) if run.is_waiting]

    # --- accepting

    def accept(
        self,
        session_id: SessionId,
        asked: RunRequest,
        *,
        run_id: RunId | None = None,
        given: bool = True,
        digest: str = "",
        steers: bool = False,
        duty: AgentDuty | None = None,
        above: tuple[SessionId, ...] = (),
        before: Unit | None = None,
    ) -> LiveRun:
        """Accept a request. A cancel reaches it at once; `accepted` completes when it is durable.

        The same id with the same content is the same run. An id that is not `given` by the caller
        only makes the request idempotent, and the run may share a turn. `before` is written in the
        same transaction. Raises the errors that a caller must handle.
        """
        if self._closing:
            raise WorkspaceClosing
        if run_id is not None and (known := self._by_id.get(run_id)) is not None:
            if known.digest != digest:
                raise RunIdReused(run_id)
            return known
        line = self.line(session_id)
        chosen = asked.model or self._context.models.current.choose("large")
        if steers and line:  # It addresses the running turn, so it uses the settings of that run.
            chosen = SelectedModel(model=line[0].model, provider=line[0].provider)
            asked = replace(asked, approval=line[0].asked.approval)
        if chosen is None:
            raise AgentNotReady
        if steers and all(run.stop is not None for run in line):
            raise NothingRuns
        if asked.kind == "summary" and line:
            raise SessionBusy
        self.check_room([asked], line)
        works_for = None if duty is None else duty.works_for
        new = NewRun(
            id=run_id or self._context.ids.run(),
            session_id=session_id,
            kind=asked.kind,
            state=rules.state_at_acceptance(line),
            run_id_given=given and run_id is not None,
            digest=digest,
            prompt=asked.prompt,
            attachments=asked.attachments,
            limits=asked.limits,
            provider=chosen.provider,
            model=chosen.model,
            headless=asked.approval.headless,
            approve=asked.approval.approve,
            agent_id="" if duty is None else duty.agent_id,
            parent_run_id="" if works_for is None else works_for.id,
            detached=duty is not None and duty.is_detached,
        )
        unset: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        run = LiveRun(
            id=new.id,
            session_id=session_id,
            given=new.run_id_given,
            digest=digest,
            provider=new.provider,
            model=new.model,
            account=self._accounts.open(new.id, asked.limits, works_for and works_for.account),
            control=LiveRunControl(asked, new.state, unset),
            duty=duty,
            above=above if duty is None else duty.above,
        )
        self._enter(run)
        run.control.accepted = self._context.store.write(
            accept_run(new, before), partial(self._accepted, run), lambda _: self._leave(run)
        )
        run.control.accepted.add_done_callback(lambda _: self.join(session_id))
        return run

    def _accepted(self, run: LiveRun, seq: int | None) -> None:
        if seq is None:
            self._leave(run)  # The same request was accepted before, and has ended.
        else:
            run.control.seq = seq

    def join(self, session_id: SessionId) -> None:
        """Notify the running turn that a run with a durable request may join it."""
        for host in self.line(session_id)[:1]:
            if host.control.worker is not None:
                host.control.worker.on_join()

    def check_room(self, wanted: Sequence[RunRequest], line: Sequence[LiveRun] = ()) -> None:
        """Raise `LimitExceeded` if the requests cannot all be accepted behind the given queue."""
        check_room(self.live(), line, wanted, self._context.settings)

    def resume(self, recovered: RecoveryReport) -> None:
        """Take over the accepted runs of the last server, in the queue order of each session."""
        self._held = {run.id: changed_of(run) for run in recovered.held}
        self._context.gate.restore(recovered.asks)
        for one, body in recovered.resumed:
            # An active run waits, as the last server left it.
            state = "waiting" if one.run.state == "active" else one.run.state
            reenters = recovered.reentered.get(one.run.id)
            run = live_again(one, body, state, self._accounts.reopen(one), reenters)
            run.account.spent = RunSpending(
                one.run.tree_steps, one.run.tree_tokens, one.run.tree_cost
            )
            run.control.host = self._by_id.get(RunId(one.run.host_run_id))
            run.control.accepted.set_result(run.control.seq)
            if run.state in ("waiting", "folded"):
                self.admit([run])
            self._enter(run)

    def forget_held(self, run_id: RunId) -> None:
        """Forget a run that is no longer held."""
        self._held.pop(run_id, None)

    def forget_session(self, session_id: SessionId) -> None:
        """Forget a deleted session and its held runs."""
        self._titles.forget(session_id)
        self._held = {k: run for k, run in self._held.items() if run.session_id != session_id}

    def release(self, held: StoredRun, body: RunBody) -> LiveRun:
        """Queue a held run again. Like `accept`, it is durable once `accepted` completes."""
        if self._closing:
            raise WorkspaceClosing
        if (known := self._by_id.get(held.run.id)) is not None:
            raise RunNotHeld(known.id, known.state)
        line = self.line(held.run.session_id)
        state = rules.state_at_acceptance(line)
        run = live_again(held, body, state, self._accounts.reopen(held))
        self.check_room([run.asked], line)
        self._enter(run)
        run.control.accepted = self._context.store.write(
            release_run(run.id, run.session_id, state),
            lambda _: self.forget_held(run.id),
            lambda _: self._leave(run),
        )
        return run

    def _enter(self, run: LiveRun) -> None:
        self._by_id[run.id] = run
        self._lines.setdefault(run.session_id, []).append(run)
        if run.session_id not in self._workers and not self._closing:
            self._workers[run.session_id] = self._context.tasks.create_task(
                self._work(run.session_id), name=f"session {run.session_id}"
            )
        self._on_live()

    def _leave(self, run: LiveRun) -> None:
        if self._by_id.get(run.id) is not run:
            return
        del self._by_id[run.id]
        run.account.abandon()
        line = self._lines[run.session_id]
        line.remove(run)
        if not line:
            del self._lines[run.session_id]
        run.control.admitted.set()
        run.control.ended.set()
        self._context.gate.forget_run(run.id)
        self._on_live()

    def on_ended(self, run: LiveRun, ending: Ending, answer: str = "") -> None:
        """Remove a run whose end is durable, with the runs that shared its turn."""
        run.control.answer = answer
        folded = (one for one in self.line(run.session_id) if one.control.host is run)
        for one in (run, *folded):
            one.control.state, one.control.ending = "ended", ending
            self._leave(one)

    # --- changes of a waiting run

    def edit(self, run: LiveRun, prompt: str) -> asyncio.Future[None]:
        """Change the prompt of a waiting run; return the commit."""
        control, before = run.control, run.asked
        control.asked = replace(before, prompt=prompt)

        def failed(_: Exception) -> None:
            control.asked = before

        written = self._context.store.write(edit_prompt(run.id, prompt), on_fail=failed)
        return self._changing(run.session_id, [run], written)

    def reorder(self, session_id: SessionId, run_ids: Sequence[RunId]) -> asyncio.Future[None]:
        """Reorder the waiting runs; return the commit.

        Others stay in front, and later arrivals stay behind. No run starts before the order is
        stored.
        """
        positions = {run_id: position for position, run_id in enumerate(run_ids)}

        def position_of(run: LiveRun) -> int:
            return positions.get(run.id, len(positions)) if run.is_waiting else -1

        written = self._context.store.write(
            order_queue(session_id, run_ids),
            lambda _: self._lines.get(session_id, []).sort(key=position_of),
        )
        return self._changing(session_id, self.queued(session_id), written)

    def _changing(
        self, session_id: SessionId, runs: Sequence[LiveRun], written: asyncio.Future[None]
    ) -> asyncio.Future[None]:
        for run in runs:
            run.control.changing = written
        written.add_done_callback(lambda _: self.join(session_id))
        return written

    # --- changes by the turn of a run

    def joining(self, host: LiveRun) -> list[LiveRun]:
        """Return the other runs that could share this turn now: their requests are durable."""
        others = [run for run in self.line(host.session_id) if run is not host]
        return [run for run in others if run.is_settled and rules.folds(run, host)]

    def connect(self, run: LiveRun, worker: WorkerLink) -> None:
        """Record the worker that runs the turn; it decides which runs join."""
        run.control.worker = worker

    def share(self, host: LiveRun, send: Callable[[LiveRun], bool]) -> None:
        """Send the runs that may join to the worker of the turn, each once."""
        for other in self.joining(host):
            if not other.control.is_shared and not other.asked.attachments:
                other.control.is_shared = send(other)

    def unshare(self, host: LiveRun) -> None:
        """Let runs that the worker has not read wait for their own turn."""
        for other in self.line(host.session_id):
            other.control.is_shared = False

    def fold(self, host: LiveRun) -> list[LiveRun]:
        """Let the runs that may join share this turn, and return them."""
        worker = host.control.worker
        folded = [run for run in self.joining(host) if worker is None or worker.has_read(run)]
        for run in folded:
            run.control.state, run.control.host = "folded", host
        return folded

    def unfold(self, runs: Iterable[LiveRun]) -> None:
        """Undo `fold`, because it could not be stored."""
        for run in runs:
            run.control.state, run.control.host = "queued", None

    def admit(self, runs: Iterable[LiveRun]) -> None:
        """Record that the requests are part of the conversation."""
        for run in runs:
            run.control.was_admitted = True
            run.control.admitted.set()

    def on_active(self, run: LiveRun) -> None:
        run.control.state = "active"

    def on_delayed(self, run: LiveRun) -> None:
        """Record that the end of a run cannot be stored yet."""
        run.control.state = "ending"

    # --- stopping

    def cancel(
        self,
        runs: Iterable[LiveRun],
        target: CancelTarget,
        session_id: SessionId | None = None,
        first: Unit | None = None,
    ) -> list[asyncio.Future[list[RunId]]]:
        """Stop these runs and everything that works for them; the futures complete with the commit.

        Runs that are already stopping are not stopped again. A run accepted later is a different
        object and is not affected. The transaction of a cancel begins with `first`.
        """
        named = with_below(runs, self._by_id.values())
        fresh = [run for run in named if rules.covers(run)]
        if fresh:
            where = session_id or named[0].session_id
            ids = [run.id for run in fresh]
            add = add_cancel(self._context.ids.cancel(), where, target, ids)

            def unit(tx: Tx) -> list[RunId]:
                together(first)(tx)
                return add(tx)

            def committed(ended: list[RunId]) -> None:
                for run in fresh:
                    if run.id in ended:  # It was only waiting: the cancel itself ended it.
                        run.control.settled = "canceled"
                        self.on_ended(run, CANCELED)

            def settled(write: asyncio.Future[list[RunId]]) -> None:
                if write.exception() is not None:
                    for run in fresh:  # They stop nevertheless; another cancel records it.
                        run.control.cancelling = None

            # The ends of these runs, which often follow at once, share its commit.
            stops = any(run.control.turn is not None for run in fresh)
            written = self._context.store.write(
                unit, committed, patience_s=END_WITHIN_S if stops else 0.0
            )
            written.add_done_callback(settled)
            for run in fresh:
                run.control.cancelling = written
                self._stop(run, "canceled")
        commits = (run.control.cancelling for run in named)
        return [commit for commit in commits if commit is not None]

    def of_session(self, session_id: SessionId) -> list[LiveRun]:
        """Return its live runs and those of all agents below it, detached or not."""
        return [*self.line(session_id), *below_session(session_id, self._by_id.values())]

    def cancel_session(
        self, session_id: SessionId, target: CancelTarget = "session"
    ) -> list[asyncio.Future[list[RunId]]]:
        return self.cancel(self.of_session(session_id), target, session_id)

    def cancel_run(
        self, run: LiveRun, first: Unit | None = None
    ) -> list[asyncio.Future[list[RunId]]]:
        if run.control.host is not None:
            raise RunFolded(run.id, run.control.host.id)
        if run.control.is_shared:
            raise RunStarted(run.id)  # It was sent to the running turn and is being read.
        return self.cancel([run], "run", first=first)

    def orphan(self, run: LiveRun) -> None:
        """Stop a run whose result is no longer wanted, and everything below it."""
        control = run.control
        if control.host is None and not control.is_shared:  # Otherwise a turn continues with it.
            for one in with_below([run], self._by_id.values()):
                self._stop(one, "parent_ended")

    def _stop(self, run: LiveRun, why: rules.Stop) -> None:
        if run.stop is not None:
            return
        run.control.stop = why
        if (turn := run.control.turn) is not None:
            turn.task.cancel()
            turn.give_up_in(self._context.clock, STOP_S)

    def on_store_failing(self) -> None:
        """Stop every turn, as its results cannot be stored; they end once writing works again."""
        for run in self.live():
            # A run that waits for a person does nothing.
            if run.control.turn is not None and not run.may_park():
                self._stop(run, "store")

    async def stop(self, *, for_good: bool) -> None:
        """End active runs as interrupted; waiting ones stay accepted for the next start. Bounded.

        Runs that wait for a person keep waiting, too, unless `for_good`.
        """
        self._closing = True
        self._context.gate.stop()
        self._titles.stop()
        for run in self.live():
            if run.control.turn is not None:
                self._stop(run, "parked" if self._parks(run) and not for_good else "interrupted")
        stopped = [run for run in self.live() if run.stop == "interrupted"]
        if self._workers:
            # A failing store is not waited for: the next start recovers the runs.
            failing = self._context.store.health.state == "failing"
            bound_s = STOP_S if failing else 2 * STOP_S
            await asyncio.wait(self._workers.values(), timeout=bound_s)
        for worker in self._workers.values():
            worker.cancel()
        for run_id in self._turns.values():
            log.error("run %s did not stop in time and was abandoned", run_id)
        for run in self.live():
            # For waiters in this process; the next start continues the run.
            run.control.ended.set()
        interrupted = {run.session_id for run in stopped if run.is_interrupted}
        behind = [run for run in self.live() if run.session_id in interrupted]
        holding = [self._hold(run) for run in behind if run.is_waiting and not run.joins]
        if holding:
            await asyncio.wait(holding, timeout=STOP_S)

    def _hold(self, run: LiveRun) -> asyncio.Future[None]:
        def held(_: None) -> None:
            run.control.state = "held"

        return self._context.store.write(hold_run(run.id, rules.BEHIND_INTERRUPTED), held)

    def _parks(self, run: LiveRun) -> bool:
        is_answered = self._context.gate.is_being_answered(run.id)
        return run.is_unbegun or (run.may_park() and not is_answered)

    # --- working: one task per session, which alone takes its runs and stores their ends

    async def _work(self, session_id: SessionId) -> None:
        while not self._closing and (run := rules.next_run(self.line(session_id))) is not None:
            try:
                await self._carry_out(run)
            except Exception:  # boundary: a failing run must not block its session
                log.exception("the end of run %s was not written", run.id)
                self._leave(run)
            if run.control.ended.is_set():
                self._release(run)
            if not run.control.ended.is_set() and rules.next_run(self.line(session_id)) is run:
                break  # The store has closed; the next start recovers the rest.
        del self._workers[session_id]

    def _release(self, run: LiveRun) -> None:
        """Break the cycles of an ended run, which would keep its conversation in memory.

        The collector of cycles comes rarely, and long texts do not make it come sooner.
        """
        run.control.turn = run.control.worker = None

    async def _carry_out(self, run: LiveRun) -> None:
        context, control = self._context, run.control
        setting = setting_of(context, run.provider, run.model)
        journal = TurnJournal(run, self, setting, context.store, context.messages, context.clock)
        try:
            await asyncio.shield(control.accepted)
        except AppError:
            return  # It was refused and removed.
        trouble = await self._prepare(run, journal)
        while control.changing is not None and not run.is_settled:
            await asyncio.wait({control.changing})
        if control.ended.is_set() or self._closing:
            return
        if rules.next_run(self.line(run.session_id)) is not run:
            return  # A person has moved another run before it.
        if run.is_orphan:
            # It was offered to another turn until now, which did not admit it.
            self._stop(run, "parent_ended")
        if run.stop is None:
            ending = trouble or await self._take_turn(run, journal)
        else:
            ending = rules.ending_of_stop(run.stop)
        if run.stop == "parked":
            return  # Unchanged: the next start finds it waiting.
        left: list[int] = []
        if run.stop == "canceled":
            left = await context.find_left(run.id)
            is_over = control.turn is None or control.turn.task.done()
            if not is_over and run.pid:
                left.append(run.pid)
            control.settled = rules.settled_by(ending, stopped=is_over and not left)
        await journal.end(ending, left)

    async def _prepare(self, run: LiveRun, journal: TurnJournal) -> Ending | None:
        """Read the conversation so far; return the ending if that fails."""
        try:
            await journal.prepare()
        except AppError as exc:
            return Ending("error", "The conversation cannot be read", exc.message)
        except Exception:  # boundary: an unreadable conversation fails only its own run
            log.exception("the conversation of run %s cannot be read", run.id)
            return Ending("error", "The conversation cannot be read", "See the server's log.")
        return None

    async def _take_turn(self, run: LiveRun, journal: TurnJournal) -> Ending:
        context = self._context
        if run.state == "waiting":
            self.on_active(run)  # Active again, where the last server left it.

        def may_park() -> bool:
            # The state of a turn that runs elsewhere would be lost.
            is_own = run.duty is None
            return is_own and context.gate.waits(run.id) and not journal.has_begun_calls()

        # Not in the task group, which would wait for a tool that never stops; `stop` bounds it.
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._turn(run, journal), name=f"run {run.id}")
        turn = run.control.turn = RunningTurn(task, context.clock.monotonic_s(), may_park)
        self._turns[task] = run.id
        task.add_done_callback(self._turns.pop)
        self._limit_time(run, turn, run.account.limits.wall_s)
        try:
            await asyncio.wait({task, turn.given_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._limit_time(run, turn, 0)
        if task.done() and not task.cancelled():
            return task.result()
        if run.stop is None:  # Cancelled by code that does not own it.
            return Ending("error", "Internal error", "The run's task was cancelled unexpectedly.")
        return rules.ending_of_stop(run.stop, journal.refusal)

    def set_limits(self, run: LiveRun, asked: Limits) -> asyncio.Future[None]:
        """Change the limits of a run and everything that works for it; return the commit."""
        limits = self._accounts.limits(asked)
        run.account.set_limits(limits)
        if (turn := run.control.turn) is not None and not turn.task.done():
            self._limit_time(run, turn, limits.wall_s)
        return self._context.store.write(set_limits(run.id, asked))

    def _limit_time(self, run: LiveRun, turn: RunningTurn, wall_s: float) -> None:
        turn.limit_time(self._context.clock, wall_s, lambda: self._stop(run, "budget"))

    def _turn(self, run: LiveRun, journal: TurnJournal) -> Coroutine[Any, Any, Ending]:
        if run.duty is not None:
            return self._context.run_elsewhere(run, journal)
        begin_title = partial(self._titles.begin, run.asked)
        return run_turn(self._context, run, journal, lambda: begin_title(journal.session))
