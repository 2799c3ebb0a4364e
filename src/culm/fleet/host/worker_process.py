"""The process of a worker, however it was started: watched by a handle, ended for certain."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from culm.processes.base import KILL_BOUND_S, ProcessHandle

STATUS_S: Final = 0.3  # For the zygote's word on how one of its forks ended.


class WorkerProcess(Protocol):
    pid: int
    ended: asyncio.Event
    on_end: Callable[[], None]  # Called once it did.

    async def how(self) -> str:
        """How it ended, in words. Only if it did."""
        ...

    async def was_killed(self) -> bool:
        """Whether a signal ended it, as far as is known. Only if it ended."""
        ...

    async def kill(self) -> bool:
        """End it now, and wait until it is gone; in bounded time. Whether it is."""
        ...


class ForkedProcess:
    """A fork of the zygote: a grandchild, or a child of ours if keeper and zygote died."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self._handle: int | None = handle
        self._status: int | None = None  # As `waitpid` has it.
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(handle, self._on_end)

    def on_exited(self, status: int) -> None:
        """The zygote collected it."""
        self._status = status
        self._told.set()

    async def how(self) -> str:
        return describe_status(await self._find_status())

    async def was_killed(self) -> bool:
        status = await self._find_status()
        return status is not None and os.WIFSIGNALED(status)

    async def _find_status(self) -> int | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                await self._told.wait()
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
        # Whose child it is depends on who died before it; if it is ours, nobody else collects it.
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.on_exited(status)
        self.ended.set()
        self.on_end()


class SpawnedProcess:
    """A command in custody, with a warden: all it starts ends with it."""

    def __init__(self, held: ProcessHandle) -> None:
        self.pid = held.pid
        self.ended = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self._held = held

    async def watch(self) -> None:
        """Until it ended. Its owner runs this."""
        await self._held.wait()
        self.ended.set()
        self.on_end()

    async def how(self) -> str:
        exit_ = await self._held.wait()
        if exit_.code is not None:
            return f"exit status {exit_.code}"
        return "how is not known" if exit_.signal is None else _describe_signal(exit_.signal)

    async def was_killed(self) -> bool:
        return (await self._held.wait()).signal is not None

    async def kill(self) -> bool:
        return not (await self._held.kill(0)).left


def describe_status(status: int | None) -> str:
    if status is None:
        return "how is not known"
    if os.WIFSIGNALED(status):
        return _describe_signal(os.WTERMSIG(status))
    return f"exit status {os.WEXITSTATUS(status)}"


def _describe_signal(number: int) -> str:
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
