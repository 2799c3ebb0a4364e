"""One connection of a worker: frames in, runs, frames out.

Carries out what the machine of `protocol/worker.py` decides. One task reads, one writes; a run has
one in which its executor works, and one that awaits that and tells how it ended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, assert_never

from msgspec import Raw

from culm.clock import Timer
from culm.fleet.executor import Executor, failed, limit_error
from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    BadFrame,
    Cancel,
    ChildFrame,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_parent_frame,
)
from culm.fleet.protocol.worker import (
    GRACE_S,
    AbortRun,
    ApprovalAnswered,
    Effect,
    HostCallReplied,
    RequestCancel,
    RevokeRun,
    SendFrame,
    StartRun,
    SteerRun,
    WorkerMachine,
)
from culm.fleet.transport.base import Link, LinkLost
from culm.fleet.worker_server.base import ServingSettings
from culm.fleet.worker_server.outbox import FrameOutbox
from culm.fleet.worker_server.run import WorkerRun
from culm.wire.codec import encodable

log = logging.getLogger(__name__)

STALL_S: Final = 60.0  # A host that for so long reads nothing of what a run left is let go.
ENDING_S: Final = GRACE_S  # If it has cancelled the run, it has so long for all of it.
IGNORED_A_LINE: Final = 1000  # Who sends nothing but garbage does not fill the log with it.
OWED_MAX: Final = 256  # Nobody else sends so many runs at once, each to supersede the last.


async def serve_connection(link: Link, executor: Executor, terms: ServingSettings) -> None:
    """Until the other side is gone, and its run with it; a cancel ends both at once."""
    await WorkerConnection(link, executor, terms).serve()


class WorkerConnection:
    def __init__(self, link: Link, executor: Executor, terms: ServingSettings) -> None:
        self._link = link
        self._executor = executor
        self._terms = terms
        self._machine = WorkerMachine(host_calls=terms.host_calls)
        self._outbox = FrameOutbox()
        self._tasks = asyncio.TaskGroup()
        self._run: WorkerRun | None = None
        self._quiet = asyncio.Event()  # No run goes on, or one that cannot be ended.
        self._quiet.set()
        self._over = asyncio.Event()  # Nobody reads, or writes, any more.
        self._ignored = 0  # Frames that could not be read.
        self._owed = 0  # Runs that were asked for, and whose endings are not written yet.
        # Endings in the outbox: their number there; and of a cancelled run the time it has.
        self._endings: deque[tuple[int, Timer | None]] = deque()
        self._is_cancelled = False  # The run that ended last.
        self._watch: Timer | None = None  # Over a host that has something of a past run to read.

    async def serve(self) -> None:
        try:
            async with self._tasks:
                reader = self._spawn(self._read, "fleet reader")
                writer = self._spawn(self._write, "fleet writer")
                await self._over.wait()
                self._lose()
                reader.cancel()
                writer.cancel()
                await self._link.close()
                await self._quiet.wait()
        finally:
            self._stop_watch()
            while self._endings:
                self._pop_ending()
            if self._run is not None:
                self._run.revoke()
            await self._link.close()

    def _spawn(self, work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(self._guarded(work), name=name)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        # Not left to the task group: of a failure and a cancel at once it tells only the failure.
        try:
            await work()
        except LinkLost as exc:
            log.info("a link was lost: %s", exc)
            self._over.set()
        except Exception:  # boundary: what goes wrong on one connection ends that one only
            log.exception("a connection failed")
            self._over.set()

    # --- in and out

    async def _read(self) -> None:
        while (data := await self._link.receive()) is not None:
            try:
                frame = parse_parent_frame(data)
            except BadFrame as exc:
                self._ignored += 1
                if self._ignored % IGNORED_A_LINE == 1:
                    log.warning("a frame was ignored, the %dth here: %s", self._ignored, exc)
                continue
            if isinstance(frame, RunSpec):
                self._owed += 1
                if self._owed > OWED_MAX:
                    self._cut("too many runs are asked for")
                    return
            self._carry_out(self._machine.on_frame(frame))
        self._over.set()

    async def _write(self) -> None:
        outbox = self._outbox
        while True:
            frame = outbox.take_nowait()
            if frame is None:
                await outbox.filled()
                continue
            await self._link.send(frame)
            while self._endings and self._endings[0][0] <= outbox.frames_taken:
                self._pop_ending()
                if not self._owed:
                    self._stop_watch()

    def _pop_ending(self) -> None:
        _, timer = self._endings.popleft()
        if timer is not None:
            timer.cancel()
        self._owed -= 1

    def _cut(self, reason: str) -> None:
        log.warning("a link is cut: %s", reason)
        self._over.set()

    def _lose(self) -> None:
        """Nobody is there any more: whatever waits for the host fails, and the run shall end."""
        self._outbox.drop_requests()
        if self._run is not None:
            self._run.host.end()
            self._run.sink.discard()
        self._carry_out(self._machine.on_lost())

    # --- what the machine decides

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartRun():
                    self._start(effect)
                case RequestCancel(run=number):
                    run = self._get(number)
                    run.stop()
                    run.after(GRACE_S, partial(self._on_grace, number))
                case AbortRun(run=number):
                    run = self._get(number)
                    run.abort()
                    run.after(GRACE_S, partial(self._on_grace, number))
                case RevokeRun(run=number):
                    self._revoke(self._get(number))
                case SteerRun(run=number, steer=steer):
                    self._get(number).inbox.put(steer)
                case ApprovalAnswered() | HostCallReplied():
                    if self._run is not None:
                        self._run.host.on_answer(effect)
                case SendFrame(frame=frame):
                    self._send(frame)
                case _:
                    assert_never(effect)

    def _get(self, number: int) -> WorkerRun:
        run = self._run
        assert run is not None, "it has not been revoked"
        assert run.number == number, "one run at a time"
        return run

    def _start(self, start: StartRun) -> None:
        requests = _Requests(start.run, self._machine, self._outbox, self._carry_out)
        self._run = run = WorkerRun(start, requests, self._outbox, self._terms)
        self._quiet.clear()
        run.begin(self._executor, self._tasks)
        self._spawn(partial(self._oversee, run), f"fleet run {start.run} ending")
        if self._terms.run_s is not None:
            run.after(self._terms.run_s, partial(self._on_limit, run, self._terms.run_s))

    async def _oversee(self, run: WorkerRun) -> None:
        """Say how a run ended, once. Its own cancel does not reach this."""
        outcome = await run.outcome()
        self._outbox.drop_requests()
        run.finish()
        self._mind_host()
        await run.sink.drained()
        self._carry_out(self._machine.on_ended(run.number, outcome))

    def _revoke(self, run: WorkerRun) -> None:
        if run.is_draining:
            self._cut("the events of a cancelled run are not read")
        self._is_cancelled = run.is_cancelled
        run.revoke()
        self._outbox.drop_requests()
        self._run = None
        self._quiet.set()

    def _send(self, frame: ChildFrame) -> None:
        if not isinstance(frame, TerminalFrame):
            self._outbox.put_request_nowait(_encoded(frame))
            return
        data = _encoded(frame)
        if len(data) > MESSAGE_BYTES_MAX:
            data = _encoded(
                TerminalFrame("error", error="the result is larger than a link carries")
            )
        self._outbox.put_nowait(data)
        timer: Timer | None = None
        if self._is_cancelled:
            late = partial(self._cut, "the ending of a cancelled run is not read")
            timer = self._terms.clock.call_later(ENDING_S, late)
        self._endings.append((self._outbox.frames_put, timer))
        self._mind_host()

    # --- time

    def _on_grace(self, number: int) -> None:
        self._carry_out(self._machine.on_grace(number))

    def _on_limit(self, run: WorkerRun, run_s: float) -> None:
        run.stop(failed(limit_error("run_timeout", f"the run took longer than {run_s:g} s")))
        run.after(GRACE_S, run.abort)
        run.after(2 * GRACE_S, partial(self._on_overrun, run))

    def _on_overrun(self, run: WorkerRun) -> None:
        """It does not end for its limit. The machine has words for a run that does not end."""
        if not run.is_draining:
            self._carry_out(self._machine.on_frame(Cancel()))

    def _mind_host(self) -> None:
        """Look after a while whether the host reads what a run left for it."""
        if self._watch is None:
            look = partial(self._on_watch, self._outbox.frames_taken)
            self._watch = self._terms.clock.call_later(STALL_S, look)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _on_watch(self, taken: int) -> None:
        self._watch = None
        is_draining = self._run is not None and self._run.is_draining
        if not self._endings and not is_draining:
            return
        if self._outbox.frames_taken == taken:
            self._cut("what a run left is not read")
        else:
            self._mind_host()


class _Requests:
    """The way of one run's requests to its host. Implements `Requests`."""

    def __init__(
        self,
        run: int,
        machine: WorkerMachine,
        outbox: FrameOutbox,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self._run = run
        self._machine = machine
        self._outbox = outbox
        self._carry_out = carry_out

    async def room(self) -> None:
        await self._outbox.request_room()

    def send_ask(self, ask_id: str, body: Raw) -> bool:
        effects = self._machine.on_ask(self._run, ask_id, body)
        self._carry_out(effects)
        return bool(effects)

    def send_call(self, call_id: str, tool_call_id: str, args: Raw) -> bool:
        effects = self._machine.on_call(self._run, call_id, tool_call_id, args)
        self._carry_out(effects)
        return bool(effects)

    def withdraw(self, open_id: str) -> None:
        self._machine.on_withdrawn(self._run, open_id)


def _encoded(frame: ChildFrame) -> bytes:
    try:
        return encode_frame(frame)
    except UnicodeEncodeError:
        return encode_frame(encodable(frame))
