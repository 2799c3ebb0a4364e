"""A worker process on this machine: connected by its link, ended with all it started."""

import asyncio
import logging
import shutil
from contextlib import suppress
from typing import Final

from culm.fleet.discovery.base import Discovery
from culm.fleet.host.control_socket import ControlSocket
from culm.fleet.host.worker_process import WorkerProcess
from culm.fleet.provision import Provision, storage_of
from culm.fleet.tail import StderrTail
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.websocket import connect_websocket
from culm.processes.base import WorkerChannel

_log = logging.getLogger(__name__)

# For the commands of a killed worker: their shims allow 0.3 s, then kill them.
COMMANDS_S: Final = 3.0
TIDY_S: Final = 2.0


class LocalWorker:
    """Implements `Worker`. `provision` is the provision its process received, with its token."""

    def __init__(self, provision: Provision, discovery: Discovery) -> None:
        self.id = provision.identity.child_id
        self.endpoint = ""  # Set once it is ready.
        self.process: WorkerProcess | None = None  # Set once it is started.
        self.control: ControlSocket | None = None  # Only for workers of ours.
        self.worker_channels: list[WorkerChannel] = []  # Its channels to the supervisor.
        self.tail = StderrTail()
        self.is_ended = False
        self._token = provision.secrets.worker_auth_token or None
        self._discovery = discovery
        self._own_storage = None if provision.storage_dir is not None else storage_of(provision)
        self._ending = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and not self.process.ended.is_set()

    async def connect(self) -> Link:
        if not self.is_alive:
            raise ConnectFailed("the worker has ended")
        return await connect_websocket(self.endpoint, self._token)

    async def stderr_tail(self) -> str:
        return await self.tail.final_text()

    async def kill(self) -> None:
        async with self._ending:
            if self.is_ended:
                return
            try:
                if self.process is not None and not await self.process.kill():
                    _log.error("worker %s, pid %s, could not be ended", self.id, self.pid)
            finally:
                # Even if that was interrupted: without an owner it ends by itself.
                if self.control is not None:
                    self.control.close()
                self.tail.close()
            await self._commands_gone()
            await self._tidy_up()
            self.is_ended = True

    async def _commands_gone(self) -> None:
        """Verify that the processes it started have ended, which they do by themselves."""
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMANDS_S):
                for worker_channel in self.worker_channels:
                    await worker_channel.over.wait()
                return
        _log.error("commands of worker %s are left", self.id)

    async def _tidy_up(self) -> None:
        """Remove what the worker would have removed itself."""
        try:
            async with asyncio.timeout(TIDY_S):
                await asyncio.to_thread(self._remove_traces)
        except (OSError, TimeoutError) as exc:
            _log.warning("files of worker %s could not be removed: %s", self.id, exc)

    def _remove_traces(self) -> None:
        self._discovery.withdraw(self.id)
        if self._own_storage is not None:
            shutil.rmtree(self._own_storage, ignore_errors=True)
