"""Processes started through another process's supervisor: a worker's side.

Owns the channel to the server's supervisor, which is requested with the first process and again
after that supervisor died. The server ends the processes of a dead supervisor and verifies that
before it hands out a new channel.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from culm.clock import Clock
from culm.processes.base import ProcessStartFailed
from culm.processes.supervised import (
    SupervisedProcess,
    SupervisedProcesses,
    SupervisorChannel,
    find_members,
    watch_processes,
)

_log = logging.getLogger(__name__)

RequestChannel = Callable[
    [], Awaitable[SupervisorChannel]
]  # In bounded time; raises `ProcessStartFailed`.


class RemoteProcesses(SupervisedProcesses):
    """Implements `Processes`."""

    worker_supervisor = None

    def __init__(self, request_channel: RequestChannel, clock: Clock) -> None:
        super().__init__(clock, "worker")
        self._request_channel = request_channel
        self._requesting = asyncio.Lock()

    def warm_nowait(self) -> None:
        """Do nothing: the server keeps its own supervisor ready."""

    async def _open_channel(self) -> SupervisorChannel:
        async with self._requesting:
            if self._is_closing:
                raise ProcessStartFailed("the worker is stopping")
            if self._channel is None:
                self._use(await self._request_channel())
            assert self._channel is not None
            return self._channel

    async def _recover(self, lost: list[SupervisedProcess]) -> list[int]:
        if not lost:
            return []
        try:
            # The server hands it out after it has ended them.
            await self._open_channel()
        except (ProcessStartFailed, OSError) as exc:
            _log.error("the supervisor died and cannot be replaced: %s", exc)
            found = await asyncio.to_thread(find_members, lost)
            return [stat.pid for _, members in found for stat in members]
        return []

    async def _close_supervisor(self, left: list[int]) -> list[int]:
        return left


def open_remote_processes(
    request_channel: RequestChannel, clock: Clock
) -> AbstractAsyncContextManager[RemoteProcesses]:
    """At the end of the block, no process it started is left."""
    return watch_processes(RemoteProcesses(request_channel, clock))
