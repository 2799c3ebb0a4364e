"""What the tests of custody share: scripts with an ear at their output, and who is alive."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from culm.clock import LoopClock
from culm.custody.base import Custody, Exit, Held, Order, Owner
from culm.custody.client import open_custody
from culm.custody.linux import find_stat
from culm.ids import Ids
from tests.support import WAIT_S

WORKSPACE = "w"
OWNER = Owner(WORKSPACE, "call", session_id="s", run_id="r", tool_call_id="c")
ENV = {"PATH": os.environ["PATH"]}


def make_order(
    *argv: str, descriptors: Sequence[int] = (), cwd: str = "/", title: str = ""
) -> Order:
    return Order(argv, cwd, ENV, OWNER, descriptors, title)


def is_alive(pid: int) -> bool:
    """A zombie is not: it was ended, and waits for whoever is to collect it."""
    stat = find_stat(pid)
    return stat is not None and stat.is_alive


class Yard:
    """Starts scripts and hears what they say. Made by `open_yard`."""

    def __init__(self, custody: Custody) -> None:
        self.custody = custody

    async def start(self, *argv: str) -> "Running":
        ear, mouth = os.pipe()
        os.set_blocking(ear, False)
        null = os.open(os.devnull, os.O_RDWR)
        try:
            held = await self.custody.start(make_order(*argv, descriptors=(null, mouth, null)))
        except BaseException:
            os.close(ear)
            raise
        finally:
            os.close(mouth)
            os.close(null)
        return Running(held, ear)

    async def bash(self, script: str) -> "Running":
        return await self.start("bash", "-c", script)

    async def python(self, script: str) -> "Running":
        return await self.start(sys.executable, "-I", "-S", "-c", script)


class Running:
    """A script, and the pipe it writes to."""

    def __init__(self, held: Held, ear: int) -> None:
        self.held = held
        self._ear = ear
        self._heard = b""

    async def line(self) -> str:
        """Its next line."""
        while b"\n" not in self._heard:
            part = await self._more()
            assert part, "it ended without a further line"
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    async def pid(self) -> int:
        return int(await self.line())

    async def rest(self) -> str:
        """What it says until nobody holds its output open."""
        while part := await self._more():
            self._heard += part
        return self._heard.decode()

    async def _more(self) -> bytes:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._ear, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._ear)
        return os.read(self._ear, 1 << 16)

    async def wait(self) -> Exit:
        exit_ = await self.held.wait()
        os.close(self._ear)
        return exit_

    async def kill(self, grace_s: float = 1.0) -> Exit:
        exit_ = await self.held.kill(grace_s)
        os.close(self._ear)
        return exit_


@asynccontextmanager
async def open_yard(folder: Path, bound_s: float = 2 * WAIT_S) -> AsyncGenerator[Yard]:
    async with asyncio.timeout(bound_s), open_custody(folder, LoopClock(), Ids()) as custody:
        yield Yard(custody)
