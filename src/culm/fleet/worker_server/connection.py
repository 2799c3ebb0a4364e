"""The connections of a worker: one, one after the other, or many at once.

A connection receives frames, executes runs and sends frames, and carries out the effects of
`protocol/worker.py`. One task reads and one writes; a run has one task for its executor, and one
that awaits it and reports the outcome.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, assert_never

from msgspec import Struct

from culm.clock import Clock, Timer, time_limit
from culm.fleet.executor import Executor, failed, limit_error
from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    ApprovalReply,
    BadFrame,
    Cancel,
    RunSpec,
    SubAgentReply,
    TerminalFrame,
    encode_frame,
    parse_parent_frame,
)
from culm.fleet.protocol.worker import (
    GRACE_S,
    AbortRun,
    Effect,
    RequestCancel,
    RevokeRun,
    StartRun,
    SteerRun,
    WorkerMachine,
)
from culm.fleet.provision import ACCEPT_S, IDLE_S
from culm.fleet.transport.base import Link, LinkListener, LinkLost
from culm.fleet.worker_server.outbox import FrameOutbox, encode_safely
from culm.fleet.worker_server.run import ServingSettings, WorkerRun

log = logging.getLogger(__name__)

STALL_S: Final = 60.0  # A host that reads nothing for this long after a run is disconnected.
ENDING_S: Final = GRACE_S  # If it has canceled the run, it has this long in total.
IGNORED_A_LINE: Final = 1000  # Limits the log of a peer that sends only garbage.
OWED_MAX: Final = 256  # No regular host sends this many runs at once, each superseding the last.


class ServeOnce(Struct, frozen=True):
    """Serve one connection. None in time is an error; `accept_s=None` waits forever."""

    accept_s: float | None = ACCEPT_S


class ServeInTurn(Struct, frozen=True):
    """Serve one connection after the other; end when none comes for `idle_s`."""

    idle_s: float = IDLE_S


class ServeMany(Struct, frozen=True):
    """Serve many independent connections at once, until canceled."""

    connections_max: int = 512


Mode = ServeOnce | ServeInTurn | ServeMany


class ConnectTimeout(Exception):
    """No connection was made in time."""


async def serve_on(
    listener: LinkListener, executor: Executor, mode: Mode, settings: ServingSettings
) -> None:
    """Serve connections until the mode ends; raises `ConnectTimeout`."""
    match mode:
        case ServeOnce(accept_s=accept_s):
            try:
                link = await _accept(listener, settings.clock, accept_s)
            except TimeoutError as exc:
                raise ConnectTimeout(f"no host connected within {accept_s:g} s") from exc
            await _serve(link, executor, settings)
        case ServeInTurn(idle_s=idle_s):
            while True:
                try:
                    link = await _accept(listener, settings.clock, idle_s)
                except TimeoutError:
                    return
                await _serve(link, executor, settings)
        case ServeMany(connections_max=connections_max):
            await _serve_many(listener, executor, settings, connections_max)
        case _:
            assert_never(mode)


async def _serve_many(
    listener: LinkListener, executor: Executor, settings: ServingSettings, connections_max: int
) -> None:
    slots = asyncio.Semaphore(connections_max)

    async def serve(link: Link) -> None:
        try:
            await _serve(link, executor, settings)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await slots.acquire()
            group.create_task(serve(await listener.accept()), name="fleet connection")


async def _serve(link: Link, executor: Executor, settings: ServingSettings) -> None:
    try:
        await WorkerConnection(link, executor, settings).serve()
    except Exception:  # boundary: a failure ends only this connection
        log.exception("a connection failed")


async def _accept(listener: LinkListener, clock: Clock, within_s: float | None) -> Link:
    """Raises TimeoutError."""
    if within_s is None:
        return await listener.accept()
    async with time_limit(clock, within_s):
        return await listener.accept()


class WorkerConnection:
    """Serves until the peer and its run are gone; a cancel ends both at once."""

    def __init__(self, link: Link, executor: Executor, settings: ServingSettings) -> None:
        self._link = link
        self._executor = executor
        self._settings = settings
        self._machine = WorkerMachine(host_calls=settings.limits.host_calls)
        self._outbox = FrameOutbox()
        self._tasks = asyncio.TaskGroup()
        self._run: WorkerRun | None = None
        self._quiet = asyncio.Event()  # No run is active, except one that cannot be ended.
        self._quiet.set()
        self._over = asyncio.Event()  # The connection is over in at least one direction.
        self._ignored = 0  # Unreadable frames.
        self._owed = 0  # Requested runs whose endings are not written yet.
        # Endings in the outbox: their position there, and the timer of a canceled run.
        self._endings: deque[tuple[int, Timer | None]] = deque()
        self._is_cancelled = False  # The run that ended last was canceled.
        # Watches a host that still has frames of a past run to read.
        self._watch: Timer | None = None

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
        # Not left to the task group: of a simultaneous failure and cancel it reports only the
        # failure.
        try:
            await work()
        except LinkLost as exc:
            log.info("a link was lost: %s", exc)
            self._over.set()
        except Exception:  # boundary: a failure ends only this connection
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
                    self._cut("too many runs were requested")
                    return
            self._carry_out(self._machine.on_frame(frame))
        self._over.set()

    async def _write(self) -> None:
        outbox = self._outbox
        while True:
            frames = outbox.take_nowait(self._link.room)
            if not frames:
                await outbox.filled()
                continue
            await self._link.send(*frames)
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
        log.warning("cutting a link: %s", reason)
        self._over.set()

    def _lose(self) -> None:
        """The host is gone: open requests fail, and the run shall end."""
        self._outbox.drop_requests()
        if self._run is not None:
            self._run.host.end()
            self._run.sink.discard()
        self._carry_out(self._machine.on_lost())

    # --- effects

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
                case ApprovalReply() | SubAgentReply():
                    if self._run is not None:
                        self._run.host.on_answer(effect)
                case TerminalFrame():
                    self._send(effect)
                case _:
                    assert_never(effect)

    def _get(self, number: int) -> WorkerRun:
        run = self._run
        assert run is not None, "it has not been revoked"
        assert run.number == number, "one run at a time"
        return run

    def _start(self, start: StartRun) -> None:
        self._run = run = WorkerRun(start, self._machine, self._outbox, self._settings)
        self._quiet.clear()
        run.begin(self._executor, self._tasks)
        self._spawn(partial(self._report_end, run), f"fleet run {start.run} ending")
        if (run_s := self._settings.limits.run_s) is not None:
            run.after(run_s, partial(self._on_limit, run, run_s))

    async def _report_end(self, run: WorkerRun) -> None:
        """Report the outcome of a run, once. A cancel of the run does not reach this task."""
        outcome = await run.outcome()
        self._outbox.drop_requests()
        run.finish()
        self._watch_host()
        await run.sink.drained()
        self._carry_out(self._machine.on_ended(run.number, outcome))

    def _revoke(self, run: WorkerRun) -> None:
        if run.is_draining:
            self._cut("the events of a canceled run are not read")
        self._is_cancelled = run.is_cancelled
        run.revoke()
        self._outbox.drop_requests()
        self._run = None
        self._quiet.set()

    def _send(self, frame: TerminalFrame) -> None:
        data = encode_safely(frame)
        if len(data) > MESSAGE_BYTES_MAX:
            error = "the result exceeds the size limit of a link"
            data = encode_frame(TerminalFrame("error", error=error))
        self._outbox.put_nowait(data)
        timer: Timer | None = None
        if self._is_cancelled:
            late = partial(self._cut, "the ending of a canceled run is not read")
            timer = self._settings.clock.call_later(ENDING_S, late)
        self._endings.append((self._outbox.frames_put, timer))
        self._watch_host()

    # --- time

    def _on_grace(self, number: int) -> None:
        self._carry_out(self._machine.on_grace(number))

    def _on_limit(self, run: WorkerRun, run_s: float) -> None:
        run.stop(failed(limit_error("run_timeout", f"the run took longer than {run_s:g} s")))
        run.after(GRACE_S, run.abort)
        run.after(2 * GRACE_S, partial(self._on_overrun, run))

    def _on_overrun(self, run: WorkerRun) -> None:
        """Cancel a run that does not end at its limit; the machine handles one that never ends."""
        if not run.is_draining:
            self._carry_out(self._machine.on_frame(Cancel()))

    def _watch_host(self) -> None:
        """Check later that the host reads the remaining frames of a run."""
        if self._watch is None:
            check = partial(self._on_watch, self._outbox.frames_taken)
            self._watch = self._settings.clock.call_later(STALL_S, check)

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
            self._cut("the remaining frames of a run are not read")
        else:
            self._watch_host()
