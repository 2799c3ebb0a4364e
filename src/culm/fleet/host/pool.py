"""The workers of a fleet, from their launch until they are verified gone.

`WorkerRoster` owns all workers and their endings; `dispatch.py` assigns the runs. Decisions about
idle ones (which is reused, which stays, which must go) are pure functions of the time and of the
idle workers, ordered by the time they were parked. A worker may be reused for another child if both
would have been provisioned alike, which their fingerprints show.
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from culm.files import STEM_CHARS_MAX
from culm.fleet.host.base import Launcher, Worker
from culm.fleet.provision import Provision

_log = logging.getLogger(__name__)

IDLE_S: Final = 300.0
# A worker itself waits this much longer: the host sweeps, and so retires it, before that.
IDLE_MARGIN_S: Final = 60.0
KILL_S: Final = 10.0  # A kill has its own bound, well below this.
NAME_CHARS_MAX: Final = STEM_CHARS_MAX - 10  # For a name that gets a number appended.
# Object keys are sorted, because their order has no meaning.
_encoder = msgspec.json.Encoder(order="deterministic")


class IdleWorker(Protocol):
    @property
    def is_alive(self) -> bool: ...


W = TypeVar("W", bound=IdleWorker)


class PoolBounds(Struct, frozen=True):
    idle_per_key_max: int = 4
    idle_max: int = 16
    idle_s: float = IDLE_S
    sweep_s: float = 30.0


class ParkedWorker(Struct, Generic[W], frozen=True):
    worker: W
    key: str  # Its fingerprint.
    until_s: float  # From then on it is not handed out.


class PoolDecision(Struct, Generic[W], frozen=True):
    """Every idle worker, including the new one, is in exactly one of these."""

    idle: tuple[ParkedWorker[W], ...]
    retired: tuple[W, ...] = ()
    chosen: W | None = None


def check_out(waiting: tuple[ParkedWorker[W], ...], key: str, now_s: float) -> PoolDecision[W]:
    """Reuse a worker of that key: the newest, so that surplus workers grow old and are retired."""
    decided = sweep(waiting, now_s)
    for parked in reversed(decided.idle):
        if parked.key == key:
            kept = tuple(one for one in decided.idle if one is not parked)
            return PoolDecision(kept, decided.retired, parked.worker)
    return decided


def park(
    waiting: tuple[ParkedWorker[W], ...],
    newcomer: ParkedWorker[W],
    bounds: PoolBounds,
    now_s: float,
) -> PoolDecision[W]:
    """Add an idle worker. Above a limit the oldest are retired: first of its key, then of all."""
    decided = sweep((*waiting, newcomer), now_s)
    kept, first = _limit(decided.idle, bounds.idle_per_key_max, lambda one: one.key == newcomer.key)
    kept, second = _limit(kept, bounds.idle_max, lambda _: True)
    return PoolDecision(kept, (*decided.retired, *first, *second))


def sweep(waiting: tuple[ParkedWorker[W], ...], now_s: float) -> PoolDecision[W]:
    """Retire workers that died or were idle too long."""
    kept = tuple(one for one in waiting if one.worker.is_alive and now_s < one.until_s)
    if len(kept) == len(waiting):
        return PoolDecision(waiting)
    staying = {id(one) for one in kept}
    return PoolDecision(kept, tuple(one.worker for one in waiting if id(one) not in staying))


def _limit(
    waiting: tuple[ParkedWorker[W], ...], at_most: int, counts: Callable[[ParkedWorker[W]], bool]
) -> tuple[tuple[ParkedWorker[W], ...], tuple[W, ...]]:
    counted = [one for one in waiting if counts(one)]
    surplus = counted[: max(0, len(counted) - at_most)]
    going = {id(one) for one in surplus}
    kept = tuple(one for one in waiting if id(one) not in going)
    return kept, tuple(one.worker for one in surplus)


def fingerprint(provision: Provision) -> str:
    """Digest of a provision, equal for children that differ only in identity and tool order.

    Every part of the document counts unless it is reset here; data sent with each run is not in it.
    Secrets count, so that a run with a changed key never gets a worker with the old one; they
    cannot be recovered from the digest.
    """
    alike = replace(
        provision,
        identity=replace(provision.identity, child_id="", parent_id=None),
        owner=None,
        secrets=replace(provision.secrets, worker_auth_token=None),
        culm=replace(provision.culm, control_fd=None),
        disabled_tools=_sorted(provision.disabled_tools),
    )
    return hashlib.sha256(_encoder.encode(alike)).hexdigest()


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))


class WorkerRoster:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._names: set[str] = set()  # Including those that are being launched.
        self._workers: dict[Worker, str] = {}
        self._endings: dict[Worker, asyncio.Task[None]] = {}
        self._stuck: set[Worker] = set()  # Workers that could not be ended.

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers)

    async def launch(self, launcher: Launcher, provision: Provision) -> Worker:
        """Raises `LaunchFailed`, `BadProvision`. Canceling it leaves nothing behind."""
        name = self._free_name(provision.identity.child_id)
        self._names.add(name)
        worker: Worker | None = None
        try:
            identity = replace(provision.identity, child_id=name)
            worker = await launcher.launch(replace(provision, identity=identity))
            self._workers[worker] = name
            return worker
        finally:
            if worker is None:
                self._names.discard(name)

    async def end(self, worker: Worker) -> None:
        """Wait until it is gone or cannot be ended. It is ended even if the wait is canceled."""
        ending = self.end_nowait(worker)
        if ending is not None:
            await asyncio.wait({ending})

    def end_nowait(self, worker: Worker) -> asyncio.Task[None] | None:
        """Begin to end it; None if it is gone, or if the tasks here are being canceled.

        In the latter case the end of its launcher ends it.
        """
        if worker not in self._workers:
            return None
        if (ending := self._endings.get(worker)) is not None:
            return ending
        end = self._end(worker)
        try:
            ending = self._tasks.create_task(end, name=f"end of worker {worker.id}")
        except RuntimeError:  # The group starts nothing while it is being canceled.
            end.close()
            return None
        self._endings[worker] = ending
        return ending

    def end_stuck_nowait(self) -> None:
        """Retry the workers that could not be ended."""
        for worker in tuple(self._stuck):
            self.end_nowait(worker)

    async def end_all(self) -> None:
        endings = {ending for worker in self.workers if (ending := self.end_nowait(worker))}
        if endings:
            await asyncio.wait(endings, timeout=KILL_S)

    async def _end(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                await worker.kill()
        except Exception:  # boundary: the others go on, and the next sweep retries
            _log.exception("worker %s could not be ended", worker.id)
            self._stuck.add(worker)
        else:
            self._stuck.discard(worker)
            self._names.discard(self._workers.pop(worker))
        finally:
            self._endings.pop(worker, None)

    def _free_name(self, wanted: str) -> str:
        """Find a name that no living worker has, because record and storage are named after it.

        A worker keeps its name when it works for another child, and a child may return.
        """
        if wanted not in self._names:
            return wanted
        numbered = (f"{wanted[:NAME_CHARS_MAX]}-{n}" for n in itertools.count(2))
        return next(name for name in numbered if name not in self._names)
