"""`culm serve`: the time until it answers, and its memory when idle."""

import http.client
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Struct

from bench.ipc import Command, Ready, Spent, end, open_child
from bench.publisher import Filled

REQUEST_TIMEOUT_S = 10.0


class Started(Struct):
    first_200_s: float
    idle_mb: float


class Listed(Struct):
    cpu_ms: float
    wall_ms: float
    megabytes: float


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def start_once(folder: Path, *, idle_s: float) -> Started:
    """Start `culm serve`, request until it answers 200, let it idle, stop it."""
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "culm", "serve", "--host", "tcp://127.0.0.1:0"]
    command += ["--no-auth", "--data-dir", str(folder / "data"), "--log-level", "error"]
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None, "opened with a pipe"
        line = process.stdout.readline().decode()
        found = re.fullmatch(r"listening tcp://127\.0\.0\.1:(\d+)\n", line)
        if found is None:
            raise RuntimeError(f"culm serve printed {line!r}")
        status, _ = get(int(found[1]), "/v1/health")
        first_200_s = time.monotonic() - start_s
        if status != 200:
            raise RuntimeError(f"culm serve answered {status}")
        time.sleep(idle_s)
        return Started(first_200_s, _rss_mb(process.pid))
    finally:
        end(process)


def _rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "a running process has a resident size"
    return int(found[1]) / 1024


def list_messages(folder: Path, count: int, rounds: int) -> list[Listed]:
    """Get all messages of a session; measure the CPU of the server and the wait of the client."""
    with open_child("publisher", "culm", str(folder)) as server:
        port = server.receive(Ready).port
        path = server.ask(Command("fill", bursts=count), Filled).path
        found: list[Listed] = []
        for _ in range(rounds):
            before = server.ask(Command("cpu"), Spent)
            start_s = time.monotonic()
            status, body = get(port, path)
            wall_s = time.monotonic() - start_s
            after = server.ask(Command("cpu"), Spent)
            if status != 200 or body.count(b'"session_id"') != count:
                raise RuntimeError(f"listing {count} messages answered {status}")
            cpu_s = after.cpu_s - before.cpu_s
            found.append(Listed(cpu_s * 1000, wall_s * 1000, len(body) / 1e6))
        return found
