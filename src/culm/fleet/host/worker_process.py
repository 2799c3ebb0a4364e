"""The process of a worker, forked or spawned: watched by a handle and ended reliably."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from culm.processes.base import KILL_BOUND_S, ProcessHandle

STATUS_S: Final = 0.3  # For the zygote's report on the exit of a fork.


class WorkerProcess(Protocol):
    pid: int
    ended: asyncio.Event
    on_end: Callable[[], None]  # Called once it has ended.

    async def describe_exit(self) -> str:
        """Describe its exit. Only valid after its end."""
        ...

    async def was_killed(self) -> bool:
        """True if a signal ended it, as far as is known. Only valid after its end."""
        ...

    async def kill(self) -> bool:
        """Kill it and wait until it is gone, in bounded time; return whether it is."""
        ...


class ForkedProcess:
    """A fork of the zygote: a grandchild, or our child if supervisor and zygote died."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self._handle: int | None = handle
        self._status: int | None = None  # As from `waitpid`.
        self._status_known = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(handle, self._on_end)

    def on_exited(self, status: int) -> None:
        """The zygote reaped it."""
        self._status = status
        self._status_known.set()

    async def describe_exit(self) -> str:
        return describe_status(await self._find_status())

    async def was_killed(self) -> bool:
        status = await self._find_status()
        return status is not None and os.WIFSIGNALED(status)

    async def _find_status(self) -> int | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                await self._status_known.wait()
        return self._status

    async def kill(self) -> bool:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_BOUND_S):
                await self.ended.wait()
        return self.ended.is_set()

    def _on_end(self) -> None:
        assert self._handle is not None, "it ends once"
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        self._handle = None
        # The parent depends on which process died first; if it is our child, nobody else reaps it.
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.on_exited(status)
        self.ended.set()
        self.on_end()


class SpawnedProcess:
    """A supervised command with a shim: all it starts ends with it."""

    def __init__(self, held: ProcessHandle) -> None:
        self.pid = held.pid
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self._held = held

    async def watch(self) -> None:
        """Wait until it has ended. Its owner runs this."""
        await self._held.wait()
        self.ended.set()
        self.on_end()

    async def describe_exit(self) -> str:
        exit_ = await self._held.wait()
        if exit_.code is not None:
            return f"exit status {exit_.code}"
        return "exit status unknown" if exit_.signal is None else _describe_signal(exit_.signal)

    async def was_killed(self) -> bool:
        return (await self._held.wait()).signal is not None

    async def kill(self) -> bool:
        return not (await self._held.kill(0)).left


def describe_status(status: int | None) -> str:
    if status is None:
        return "exit status unknown"
    if os.WIFSIGNALED(status):
        return _describe_signal(os.WTERMSIG(status))
    return f"exit status {os.WEXITSTATUS(status)}"


def _describe_signal(number: int) -> str:
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
