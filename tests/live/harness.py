"""Real server processes for tests: started, read, killed, and always reaped.

Owns every process it starts, by its handle.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from culm.client.follower import Follower
from culm.client.http import Client, open_client
from culm.client.mirror import Mirror
from culm.wire.messages import Message
from culm.wire.workspaces import Snapshot
from tests.support import WAIT_S

ROOT = Path(__file__).parents[2]
START_S = 20.0  # A cold interpreter on a busy machine.
# A client that finds no server doubles its pause from 0.25 s; while a server starts slowly, it
# may sleep through several of those.
RESUME_S = 20.0
SERVE = ("-m", "culm", "serve")
PUBLISHER = ("-m", "tests.live.publisher")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    status: int
    stdout: str
    stderr: str


class ProcessServer:
    """One running process and its output so far. Made by `open_process_server`."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.lines: list[str] = []  # Of stdout, so far.
        self._seen: set[str] = set()  # The same as a set: it is searched after every line.
        self.errors: list[str] = []  # Of stderr, so far.
        self.closed = False  # Both are at their end.
        self._changed = asyncio.Event()

    @property
    def urls(self) -> list[str]:
        """Where it listens, in the order of its --host options."""
        found = [line for line in self.lines if line.startswith("listening ")]
        return [line.removeprefix("listening ") for line in found]

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def token(self) -> str:
        return (self.folder / "data" / "token").read_text().strip()

    @property
    def ended(self) -> Ended:
        status = self.process.returncode
        assert status is not None, "it is still running"
        return Ended(status, "\n".join(self.lines), "\n".join(self.errors))

    async def until(self, condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        """Wait until its output makes `condition` true, or fail with that output."""
        await self.until_ended_or(condition, wait_s)
        assert condition(), f"it ended too early\n{self.output()}"

    async def until_ended_or(self, condition: Callable[[], bool], wait_s: float = START_S) -> None:
        """Like `until`, and also return when its output has ended."""
        try:
            async with asyncio.timeout(wait_s):
                while not (condition() or self.closed):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not true after {wait_s} s\n{self.output()}") from None

    async def until_line(self, line: str, wait_s: float = WAIT_S) -> None:
        """Wait for one line on stdout."""
        await self.until(lambda: line in self._seen, wait_s)

    def output(self) -> str:
        return "\n".join([*self.lines[-20:], *self.errors[-40:]])

    def send_line(self, line: str) -> None:
        """Write one line to its stdin."""
        assert self.process.stdin is not None, "asked for a pipe"
        self.process.stdin.write(f"{line}\n".encode())

    async def end(self, number: int = signal.SIGTERM, wait_s: float = WAIT_S) -> Ended:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return await self.wait(wait_s)

    async def wait(self, wait_s: float = WAIT_S) -> Ended:
        async with asyncio.timeout(wait_s):
            await self.process.wait()
            while not self.closed:
                self._changed.clear()
                await self._changed.wait()
        return self.ended

    async def kill(self) -> Ended:
        """Send SIGKILL: nothing is flushed."""
        return await self.end(signal.SIGKILL)

    async def read_output(self) -> None:
        """Read its output to the end."""
        assert self.process.stdout is not None, "asked for a pipe"
        assert self.process.stderr is not None, "asked for a pipe"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(self.process.stdout, self.lines), name="stdout")
            tasks.create_task(self._read(self.process.stderr, self.errors), name="stderr")
        self.closed = True
        self._changed.set()

    async def _read(self, source: asyncio.StreamReader, into: list[str]) -> None:
        while line := await source.readline():
            into.append(line.decode().rstrip("\n"))
            if into is self.lines:
                self._seen.add(into[-1])
            self._changed.set()


def environment(folder: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which every default path is inside `folder`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "CULM_"))}
    return {
        **kept,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        # This checkout, not the installed package; and the publisher beside it.
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        **(env or {}),
    }


@asynccontextmanager
async def open_process(
    folder: Path, *argv: str, env: dict[str, str] | None = None
) -> AsyncGenerator[ProcessServer]:
    """Run a Python program while in the block; afterwards it is ended and reaped."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *argv),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment(folder, env),
        cwd=folder,
    )
    running = ProcessServer(process, folder)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(running.read_output(), name=f"read {process.pid}")
        try:
            yield running
        finally:
            await _reap(process)


@asynccontextmanager
async def open_process_server(
    folder: Path,
    *args: str,
    program: tuple[str, ...] = SERVE,
    env: dict[str, str] | None = None,
) -> AsyncGenerator[ProcessServer]:
    """Run `culm serve` with its data in `folder`; inside the block all its hosts listen."""
    data = () if "--data-dir" in args else ("--data-dir", str(folder / "data"))
    async with open_process(folder, *program, *data, *args, env=env) as server:
        wanted = max(1, args.count("--host"))
        await server.until(lambda: len(server.urls) >= wanted, START_S)
        yield server


async def run_process(folder: Path, *argv: str, env: dict[str, str] | None = None) -> Ended:
    """Run a Python program that ends by itself."""
    async with open_process(folder, *argv, env=env) as running:
        return await running.wait(START_S)


async def run_serve(folder: Path, *args: str) -> Ended:
    """Run a `culm serve` that is expected to end by itself."""
    return await run_process(folder, *SERVE, "--data-dir", str(folder / "data"), *args)


async def _reap(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(WAIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@asynccontextmanager
async def open_client_of(server: ProcessServer, *, host: int = 0) -> AsyncGenerator[Client]:
    """A client at the server's n-th address, with the token if it needs one."""
    url = server.urls[host]
    token = server.token if url.startswith("tcp:") else None
    async with open_client(url, token=token) as client:
        yield client


def make_directory(folder: Path, name: str = "project") -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    return path


def find_database(folder: Path) -> Path:
    """The one database of a server that hosted one workspace."""
    (found,) = (folder / "data" / "projects").glob("*/culm.db")
    return found


# --- comparing the state of clients


def seq_of(cursor: str) -> int:
    return int(cursor.rpartition(".")[2])


async def caught_up(follower: Follower, snapshot: Snapshot[Message]) -> None:
    """Wait until a follower has every durable event that the snapshot has."""
    epoch, _, seq = snapshot.cursor.partition(".")

    def reached(mirror: Mirror) -> bool:
        return mirror.cursor.startswith(f"{epoch}.") and seq_of(mirror.cursor) >= int(seq)

    async with asyncio.timeout(RESUME_S):
        await follower.until(reached)


def assert_same(mirror: Mirror, snapshot: Snapshot[Message]) -> None:
    """Compare a mirror that has caught up with the snapshot, in every field of every row."""
    assert mirror.sessions == {session.id: session for session in snapshot.sessions}
    assert mirror.messages == {message.id: message for message in snapshot.messages}


# --- a network connection that can be cut


@dataclass
class Proxy:
    """A proxy to a server's socket whose connections a test can cut. Made by `open_proxy`."""

    url: str
    target: str
    refuses: bytes = b""  # While set, a request that contains it is cut off.
    refused: int = 0
    _live: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    def cut(self) -> None:
        """Drop every open connection; new ones pass."""
        for writer in list(self._live):
            writer.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._live |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, back, outward=True), name="out")
                tasks.create_task(self._pump(there, writer, outward=False), name="in")
        finally:
            self._live -= both
            for end in both:
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, outward: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if outward and self.refuses and self.refuses in data:
                    self.refused += 1
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()  # The other direction has nothing left to forward either.


@asynccontextmanager
async def open_proxy(folder: Path, target_url: str) -> AsyncGenerator[Proxy]:
    """Forward connections from a socket in `folder` to the unix socket of a server."""
    path = folder / "proxy"
    proxy = Proxy(f"unix://{path}", target_url.removeprefix("unix://"))
    server = await asyncio.start_unix_server(proxy.forward, path)
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()
