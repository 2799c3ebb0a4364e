"""A worker's record in discovery: registered, renewed while it serves, withdrawn at its end.

Disk I/O never blocks the loop. If a slow disk is still writing when the worker leaves, the
withdrawal comes after that.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from culm import __version__
from culm.clock import Clock, format_time, pause
from culm.fleet.discovery.base import (
    RENEW_S,
    AgentRecord,
    Discovery,
    OwnerProcess,
    ProcessPlace,
    renewed,
)
from culm.fleet.provision import Identity, OwnerStamp
from culm.processes.linux import find_stat, read_world_id

SETTLE_S: Final = 0.25  # A thread during the first connection would delay it by milliseconds.
WITHDRAW_S: Final = 2.0  # A slower disk leaves a record behind, whose lease runs out.
_log = logging.getLogger(__name__)

MakeRecord = Callable[[], AgentRecord]  # Called in a thread, when the record is first needed.


def make_record(
    identity: Identity,
    labels: Sequence[str],
    endpoint: str,
    owner: OwnerStamp | None,
    now_s: float,
) -> AgentRecord:
    """Build the record of this process, which began to serve at `now_s`."""
    return renewed(
        AgentRecord(
            agent_id=identity.child_id,
            role=identity.role,
            labels=[*labels],
            endpoint=endpoint,
            pid=os.getpid(),
            version=__version__,
            started_at=format_time(now_s),
            lease_expires_at="",
            culm=_process_place(owner),
        ),
        now_s,
    )


def _process_place(owner: OwnerStamp | None) -> ProcessPlace | None:
    """Identify this process; None on systems without process start times."""
    own = find_stat(os.getpid())
    return (
        None if own is None else ProcessPlace(own.start_ticks, read_world_id(), _find_owner(owner))
    )


def _find_owner(stamp: OwnerStamp | None) -> OwnerProcess | None:
    if stamp is None:
        return None
    if isinstance(stamp.process_start_id, int):
        return OwnerProcess(stamp.process_id, stamp.process_start_id)
    stat = find_stat(stamp.process_id)
    return None if stat is None else OwnerProcess(stat.pid, stat.start_ticks)


class _Registration:
    """The record on disk, written in one thread at a time; the withdrawal comes last."""

    def __init__(self, discovery: Discovery, make: MakeRecord) -> None:
        self._discovery = discovery
        self._make = make
        self._record: AgentRecord | None = None
        self._lock = threading.Lock()
        self._is_begun = False  # A write was requested, whether or not its thread has started.
        self._is_over = False

    async def publish(self, now_s: float) -> None:
        """Write or renew the record; after a cancel it may still be written. Raises OSError."""
        self._is_begun = True
        await asyncio.to_thread(self._publish, now_s)

    async def withdraw(self) -> None:
        """Remove the record and write nothing afterwards. Raises OSError."""
        if self._is_begun:
            await asyncio.to_thread(self._withdraw)

    def _publish(self, now_s: float) -> None:
        with self._lock:
            if not self._is_over:
                self._record = self._record or self._make()
                self._discovery.publish(renewed(self._record, now_s))

    def _withdraw(self) -> None:
        with self._lock:
            self._is_over = True
            if (own := self._record) is None:
                return
            found = self._discovery.resolve(own.agent_id)
            # A new worker with the same id keeps its record.
            if found is None or found.pid == own.pid:
                self._discovery.withdraw(own.agent_id)


@asynccontextmanager
async def open_registration(
    discovery: Discovery, make: MakeRecord, clock: Clock, *, at_once: bool
) -> AsyncGenerator[None]:
    """Be registered in discovery until the block ends.

    With `at_once` the record is written before the block begins, which may raise OSError. Otherwise
    it is written a moment later: the host does not need it and has work for us first.
    """
    registration = _Registration(discovery, make)
    try:
        if at_once:
            await registration.publish(clock.now_s())
        async with asyncio.TaskGroup() as group:
            renewing = _renew(registration, clock, at_once=at_once)
            task = group.create_task(renewing, name="registration")
            try:
                yield
            finally:
                task.cancel()
    finally:
        await _withdraw(registration)


async def _renew(registration: _Registration, clock: Clock, *, at_once: bool) -> None:
    await pause(clock, RENEW_S if at_once else SETTLE_S)
    while True:
        try:
            await registration.publish(clock.now_s())
        except OSError as exc:
            # The host may still know the worker by its socket; the next attempt may succeed.
            _log.warning("cannot write the record: %s", exc.strerror)
        await pause(clock, RENEW_S)


async def _withdraw(registration: _Registration) -> None:
    try:
        async with asyncio.timeout(WITHDRAW_S):
            await registration.withdraw()
    except TimeoutError:
        _log.warning("cannot withdraw the record within %g s", WITHDRAW_S)
    except OSError as exc:
        _log.warning("cannot withdraw the record: %s", exc.strerror)
