"""The yardsticks of `runs.py`: a durable commit, plain work, and a minimal fan-out.

Usage: runs_yardstick.py SOCKET     (a child: raw streams on a unix socket; commands on stdin)
"""

import asyncio
import os
import sqlite3
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import uvloop

from bench.ipc import STEP_TIMEOUT_S, Command, Spent, answer, commands
from bench.runs_host import Cores
from bench.yardstick import Connection

ROW = "x" * 400  # About the size of an accepted run.
WORK = 20_000  # Iterations: about a millisecond.


class LoneCommits:
    """Single commits on the disk the servers write to. Made by `open_commits`."""

    def __init__(self, connection: sqlite3.Connection, cores: Cores) -> None:
        self._connection = connection
        self._cores = cores

    def commit_ms(self) -> float:
        """Commit one row with the settings of the servers' stores, without other users of the file.

        On the cores of the servers, where other work delays both alike.
        """
        self._cores.pin_server(0)
        try:
            return self._commit_ms()
        finally:
            self._cores.pin_other(0)

    def _commit_ms(self) -> float:
        start_ns = time.monotonic_ns()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("INSERT INTO rows (body) VALUES (?)", (ROW,))
        self._connection.execute("COMMIT")
        return (time.monotonic_ns() - start_ns) / 1e6


@contextmanager
def open_commits(folder: Path, cores: Cores) -> Generator[LoneCommits]:
    with closing(sqlite3.connect(folder / "yardstick.db", isolation_level=None)) as connection:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, body TEXT NOT NULL)")
        yield LoneCommits(connection, cores)


def work_us() -> float:
    """Return the CPU time of a fixed amount of work: the current speed of the machine."""
    start_s = time.process_time()
    total = 0
    for n in range(WORK):
        total += n & 7
    return (time.process_time() - start_s) * 1e6


# --- the child: the same bytes to all, one write per connection and turn


async def _round(transports: list[asyncio.Transport], command: Command) -> Spent:
    data = b"x" * command.burst
    loop = asyncio.get_running_loop()
    cpu_s, start_s = time.process_time(), loop.time()
    for n in range(command.bursts):
        for transport in transports:
            transport.write(data)
        await asyncio.sleep(max(0.0, start_s + (n + 1) * command.pace_s - loop.time()))
    return Spent(time.process_time() - cpu_s, loop.time() - start_s)


async def _serve(path: str) -> None:
    transports: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    # A server that nothing refers to may be collected.
    _server = await loop.create_unix_server(lambda: Connection(transports), path, backlog=512)
    answer(Command(str(os.getpid())))
    async for command in commands():
        async with asyncio.timeout(STEP_TIMEOUT_S):
            if command.do == "forget":
                for transport in transports:
                    transport.close()
                transports.clear()
                answer(Command("forgotten"))
            else:
                answer(await _round(transports, command))


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
