"""Every worker of a fleet, from its launch until it is verified gone.

Owns the set of workers and their endings. `dispatch.py` assigns the runs.
"""

import asyncio
import itertools
import logging
from typing import Final

from msgspec.structs import replace

from culm.fleet.host.base import Launcher, Worker
from culm.fleet.names import STEM_CHARS_MAX
from culm.fleet.provision import Provision

_log = logging.getLogger(__name__)

KILL_S: Final = 10.0  # A kill has its own bound, well below this.
NAME_CHARS_MAX: Final = STEM_CHARS_MAX - 10  # For a name that gets a number appended.


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
        """Begin to end it; None if it is already gone."""
        if worker not in self._workers:
            return None
        ending = self._endings.get(worker)
        if ending is None:
            ending = self._tasks.create_task(self._end(worker), name=f"end of worker {worker.id}")
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
