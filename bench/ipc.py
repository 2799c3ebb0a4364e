"""The protocol between benchmark processes: one JSON line per command and per answer."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")

STEP_TIMEOUT_S = 60.0  # The longest single command takes a few seconds.
END_TIMEOUT_S = 10.0


class Ready(Struct):
    """A publisher listens: the address of its streams, and of the acknowledgements."""

    port: int
    ack_port: int
    path: str  # The path to GET, with {client_id}.


class Command(Struct, omit_defaults=True):
    do: str
    streams: int = 0
    bursts: int = 0
    burst: int = 1
    pace_s: float = 0.0  # 0: as fast as the reader acknowledges.
    where: Ready | None = None


class Spent(Struct):
    """CPU and wall time of a publisher, over all its threads."""

    cpu_s: float
    wall_s: float


class Received(Struct):
    """The results of a reader in one round."""

    events: int  # On each stream.
    wrong: int  # Events lost, reordered or damaged, and streams that differ from the first.
    frame_bytes: float
    reads_per_write: float
    p50_us: float = 0.0
    p99_us: float = 0.0


class Child:
    """A process of the benchmark. Made by `open_child`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, command: Command, kind: type[T]) -> T:
        """Send a command and wait for its answer; a child that hangs ends itself."""
        assert self._process.stdin is not None, "opened with pipes"
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()
        return self.receive(kind)

    def receive(self, kind: type[T]) -> T:
        assert self._process.stdout is not None, "opened with pipes"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended early; its error is above")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def open_child(module: str, *arguments: str) -> Generator[Child]:
    """Run a module beside this one; it ends when its stdin does, or is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"bench.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


async def commands() -> AsyncGenerator[Command]:
    """In a child: yield the commands of the parent until it closes the pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield msgspec.json.decode(line, type=Command)


def answer(reply: Struct) -> None:
    print(msgspec.json.encode(reply).decode(), flush=True)
