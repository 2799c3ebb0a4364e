"""A worker's record in the fabric: announced, renewed while it serves, withdrawn at its end.

The disk is never waited for on the loop. Whatever a slow disk still has to write when the worker
leaves, the withdrawal comes after it.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from culm import __version__
from culm.clock import Clock, pause
from culm.fleet.discovery.base import (
    RENEW_S,
    AgentRecord,
    Discovery,
    OwnerProcess,
    ProcessPlace,
    renewed,
)
from culm.fleet.provision import Identity, OwnerStamp
from culm.fleet.times import format_time
from culm.processes.linux import find_stat, read_world_id

SETTLE_S: Final = 0.25  # A thread beside the first connection would take milliseconds from it.
WITHDRAW_S: Final = 2.0  # A disk that takes longer leaves a record behind, whose lease runs out.
_log = logging.getLogger(__name__)

MakeRecord = Callable[[], AgentRecord]  # Called in a thread, when it is first needed.


def make_record(
    identity: Identity,
    labels: Sequence[str],
    endpoint: str,
    owner: OwnerStamp | None,
    now_s: float,
) -> AgentRecord:
    """Of this process, which began to serve at that time."""
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
    """None where processes cannot be told apart by when they started."""
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


class _Presence:
    """The disk works in threads, one at a time; a withdrawal is the last thing it does."""

    def __init__(self, discovery: Discovery, make: MakeRecord) -> None:
        self._discovery = discovery
        self._make = make
        self._record: AgentRecord | None = None
        self._lock = threading.Lock()
        self._is_begun = False  # A thread was told to write, whether or not it has begun to.
        self._is_over = False

    async def publish(self, now_s: float) -> None:
        """Raises OSError. If it is cancelled, it may still be written."""
        self._is_begun = True
        await asyncio.to_thread(self._publish, now_s)

    async def withdraw(self) -> None:
        """Raises OSError. Whatever was not written by now is not written any more."""
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
            # Somebody started anew under our id keeps its own.
            if found is None or found.pid == own.pid:
                self._discovery.withdraw(own.agent_id)


@asynccontextmanager
async def open_presence(
    discovery: Discovery, make: MakeRecord, clock: Clock, *, at_once: bool
) -> AsyncGenerator[None]:
    """Be found in the fabric until the block ends; `at_once`: before it begins, or raises OSError.

    Else it is found a moment later: somebody who does not look for it has work for us first.
    """
    presence = _Presence(discovery, make)
    try:
        if at_once:
            await presence.publish(clock.now_s())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_renew(presence, clock, at_once=at_once), name="presence")
            try:
                yield
            finally:
                task.cancel()
    finally:
        await _withdraw(presence)


async def _renew(presence: _Presence, clock: Clock, *, at_once: bool) -> None:
    await pause(clock, RENEW_S if at_once else SETTLE_S)
    while True:
        try:
            await presence.publish(clock.now_s())
        except OSError as exc:
            # Its parent may well know it by its socket; the next one may succeed.
            _log.warning("the record could not be written: %s", exc.strerror)
        await pause(clock, RENEW_S)


async def _withdraw(presence: _Presence) -> None:
    try:
        async with asyncio.timeout(WITHDRAW_S):
            await presence.withdraw()
    except TimeoutError:
        _log.warning("the record could not be withdrawn in %g s", WITHDRAW_S)
    except OSError as exc:
        _log.warning("the record could not be withdrawn: %s", exc.strerror)
