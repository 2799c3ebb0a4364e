"""The cost of a request: `culm serve` compared with a bare aiohttp server in the same run.

Usage: python -m bench.http [--quick]     table on stdout, JSON in bench/out/http.json

Exit status 1 if an answer was wrong or a descriptor was leaked; a missed target is only
reported, as this machine may be busy. What is measured and how: docs/benchmarks.md.

Run it as a module: started by its path, this file would hide the standard library's `http`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from statistics import median
from threading import Timer

import msgspec
from msgspec import Struct

from bench.fanout import ROUNDS_MIN, Row, describe_machine, named_ratios, table
from bench.ipc import Child, Command, end, open_child
from bench.ratios import OUT, NamedRatio, Ratio, write_result
from bench.serving import REQUEST_TIMEOUT_S
from bench.traffic import Drove, Pages, Place, Plan, cpu_s, raise_file_limit

START_TIMEOUT_S = 30.0
QUIET_S = 0.25  # A server that used no CPU for this long is idle ...
QUIET_CPU_S = 0.002
SETTLE_MAX_S = 20.0  # ... and is not waited for longer than this.
WARM_STREAMS = 20  # Warm-up: the extra cost of the first streams is not counted.
SETTINGS = {
    "clients_max": 2000,  # 1,000 streams of one client each, and the client that keeps it open.
    "detach_grace_s": 1.0,  # Disconnected clients are dropped while we wait.
    "linger_s": 600.0,
    "prepare_workers_s": 0.0,  # Nothing else uses the processor.
}


class Size(Struct, frozen=True):
    """The amount of work; a full run takes up to three minutes, a quick one 40 s.

    Many rounds of 50 ms, because a ratio of adjacent rounds survives a noisy machine.
    """

    rounds: int
    requests: int  # Per round.
    cycles: int
    openings: int  # Cycles that open and close the workspace.
    streams: int
    section_s: float  # A busy machine gets fewer rounds, but never fewer than three.


FULL = Size(rounds=40, requests=500, cycles=40, openings=5, streams=1000, section_s=12.0)
QUICK = Size(rounds=10, requests=400, cycles=30, openings=4, streams=500, section_s=1.5)


class Extra(Struct):
    """A figure without a target."""

    name: str
    unit: str
    measured: float
    yardstick: float | None = None
    ratio: float | None = None
    note: str = ""


class Result(Struct):
    rows: list[Row]
    extras: list[Extra]
    wrong: int  # Unexpected answers, and leaked descriptors.
    seconds: float
    machine: dict[str, str]


class Memory(Struct):
    rss_kb: int
    pss_kb: int
    files: int


def measure_memory(pid: int) -> Memory:
    process = Path(f"/proc/{pid}")
    rollup = (process / "smaps_rollup").read_text()
    sizes = {name: int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", rollup, re.M)}
    return Memory(sizes["Rss"], sizes["Pss"], sum(1 for _ in (process / "fd").iterdir()))


class Culm:
    """A `culm serve` with one workspace that a client keeps open. Made by `open_culm`."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self._folder = folder
        client_id = str(uuid.uuid4())
        self.directory = self.make_directory("kept")
        self.workspace, self.shown = self.create(self.directory, client_id)
        # The connection of a response without length lives as long as the response.
        path = f"{self.workspace}/events?client_id={client_id}"
        self._stream = self._request(self._connect(), "GET", path)

    def close(self) -> None:
        self._stream.close()

    def make_directory(self, name: str) -> str:
        path = self._folder / name
        path.mkdir()
        return str(path)

    def create(self, directory: str, client_id: str) -> tuple[str, str]:
        """Create a workspace for a client; return its path and description."""
        shown = self.ask("POST", "/v1/workspaces", {"path": directory, "client_id": client_id})
        workspace_id: str = msgspec.json.decode(shown)["id"]
        return f"/v1/workspaces/{workspace_id}", shown

    def ask(self, method: str, path: str, body: object = None) -> str:
        connection = self._connect()
        try:
            return self._request(connection, method, path, body).read().decode()
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.place.port, timeout=REQUEST_TIMEOUT_S)

    def _request(
        self, connection: HTTPConnection, method: str, path: str, body: object = None
    ) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {self.place.token}"}
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{method} {path} answered {response.status}: {response.read()!r}")
        return response


@contextmanager
def open_culm(folder: Path) -> Generator[Culm]:
    """Run `culm serve` with TCP and its token, and a unix socket."""
    folder.mkdir()
    settings = folder / "settings.json"
    settings.write_bytes(msgspec.json.encode(SETTINGS))
    data = folder / "data"
    # Not below the results: a socket's path may have 103 bytes only.
    with tempfile.TemporaryDirectory() as short:
        unix = str(Path(short) / "culm.sock")
        command = [sys.executable, "-m", "culm", "serve", "--host", "tcp://127.0.0.1:0"]
        command += ["--host", f"unix://{unix}", "--data-dir", str(data)]
        command += ["--config", str(settings), "--log-level", "error"]
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        late = Timer(START_TIMEOUT_S, process.kill)
        late.start()
        try:
            assert process.stdout is not None, "opened with a pipe"
            lines = [process.stdout.readline().decode() for _ in range(2)]
            late.cancel()
            found = re.fullmatch(r"listening tcp://127\.0\.0\.1:(\d+)\n", lines[0])
            if found is None or not lines[1]:
                raise RuntimeError(f"culm serve printed {lines!r}")
            token = (data / "token").read_text().strip()
            place = Place(process.pid, int(found[1]), unix, token)
            with closing(Culm(place, folder)) as culm:
                yield culm
        finally:
            late.cancel()
            end(process)


@contextmanager
def open_bare(culm: Culm, bodies: dict[str, str], first: str = "data: {}\n\n") -> Generator[Place]:
    with tempfile.TemporaryDirectory() as short:
        unix = str(Path(short) / "bare.sock")
        bodies = {culm.workspace: culm.shown, **bodies}
        pages = Pages(unix, culm.place.token, bodies, culm.workspace, first)
        with open_child("traffic", "bare", msgspec.json.encode(pages).decode()) as child:
            yield child.receive(Place)


def open_driver(role: str, plan: Plan) -> AbstractContextManager[Child]:
    return open_child("traffic", role, msgspec.json.encode(plan).decode())


class Bench:
    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self.rows: list[Row] = []
        self.extras: list[Extra] = []
        self.wrong = 0

    def _progress(self, what: str) -> None:
        print(f"  {what} …", file=sys.stderr, flush=True)

    def _rounds(self) -> Iterator[int]:
        end_s = time.monotonic() + self._size.section_s
        for number in range(self._size.rounds):
            if number < ROUNDS_MIN or time.monotonic() < end_s:
                yield number

    def _drive(self, child: Child, count: int) -> Drove:
        drove = child.ask(Command("round", bursts=count), Drove)
        self.wrong += drove.wrong
        return drove

    def _pairs(self, ours: Child, theirs: Child, count: int) -> list[tuple[Drove, Drove]]:
        """Run rounds of both sides in turn after a warm-up."""
        for child in (ours, theirs):
            self._drive(child, count)
        return [(self._drive(ours, count), self._drive(theirs, count)) for _ in self._rounds()]

    # --- one request

    def gets(self) -> None:
        with ExitStack() as stack:
            culm = stack.enter_context(open_culm(self._folder / "gets"))
            session = culm.ask("POST", f"{culm.workspace}/sessions", {"title": "a session"})
            session_id: str = msgspec.json.decode(session)["id"]
            w = culm.workspace
            stored = f"{w}/sessions/{session_id}"
            names = {
                "/v1/version": "GET /v1/version",
                w: "GET W",
                f"{w}/agent": "GET W/agent",
                f"{w}/permissions/skip": "GET W/permissions/skip",
                stored: "GET W/sessions/S, from SQLite",
            }
            bare = stack.enter_context(
                open_bare(culm, {path: culm.ask("GET", path) for path in names})
            )
            for unix in (False, True):
                for path, name in names.items():
                    name = f"{name}, {'unix' if unix else 'TCP'}"
                    self._progress(name)
                    self._get(name, culm.place, bare, path, unix=unix, aimed=path != stored)

    def _get(
        self, name: str, culm: Place, bare: Place, path: str, *, unix: bool, aimed: bool
    ) -> None:
        with (
            open_driver("gets", Plan(culm, unix, path)) as ours,
            open_driver("gets", Plan(bare, unix, path)) as theirs,
        ):
            pairs = self._pairs(ours, theirs, self._size.requests)
        us = [tuple(side.cpu_s / self._size.requests * 1e6 for side in pair) for pair in pairs]
        ratios = [a / b for a, b in us]
        busy = [
            median(side.cpu_s / side.wall_s for side in sides) for sides in zip(*pairs, strict=True)
        ]
        best = min(a for a, _ in us) / min(b for _, b in us)
        row = Row(
            f"{name}: CPU",
            "µs",
            median(a for a, _ in us),
            median(b for _, b in us),
            median(ratios),
            1.6,
            note=f"best against best {best:.2f}; busy {busy[0]:.0%}, {busy[1]:.0%}",
        )
        if aimed:
            self.rows.append(row)
        else:
            self.extras.append(
                Extra(row.name, row.unit, row.measured, row.yardstick, row.ratio, row.note)
            )

    # --- clients that connect and disconnect

    def cycles(self) -> None:
        with ExitStack() as stack:
            culm = stack.enter_context(open_culm(self._folder / "cycles"))
            bare = stack.enter_context(open_bare(culm, {}))
            for unix in (False, True):
                by = "unix" if unix else "TCP"
                self._progress(f"create, attach, detach, release, {by}")
                plan = Plan(culm.place, unix, culm.workspace, culm.directory)
                bare_plan = Plan(bare, unix, culm.workspace, culm.directory)
                self._cycle(f"join, attach, detach, release, {by}", plan, bare_plan)
            directory, client_id = culm.make_directory("opened"), str(uuid.uuid4())
            workspace, _ = culm.create(directory, client_id)
            culm.ask("DELETE", f"{workspace}?client_id={client_id}")
            self._progress("the same with opening and closing the workspace")
            self._open_and_close(Plan(culm.place, unix=False, path=workspace, directory=directory))

    def _cycle(self, name: str, plan: Plan, bare_plan: Plan) -> None:
        count = self._size.cycles
        with open_driver("cycles", plan) as ours, open_driver("cycles", bare_plan) as theirs:
            pairs = self._pairs(ours, theirs, count)
        cpu_ms, bare_cpu_ms = (
            [side.cpu_s / count * 1e3 for side in sides] for sides in zip(*pairs, strict=True)
        )
        wall_ms, bare_wall_ms = (
            [side.wall_s / count * 1e3 for side in sides] for sides in zip(*pairs, strict=True)
        )
        note = f"bare aiohttp: {median(bare_cpu_ms):.2f} ms; lowest round {min(cpu_ms):.2f} ms"
        self.rows.append(Row(f"{name}: CPU", "ms", median(cpu_ms), None, None, 3.0, note=note))
        self.extras.append(Extra(f"{name}: wall", "ms", median(wall_ms), median(bare_wall_ms)))

    def _open_and_close(self, plan: Plan) -> None:
        count = self._size.openings
        with open_driver("cycles", plan) as driver:
            self._drive(driver, count)
            rounds = [self._drive(driver, count) for _ in self._rounds()]
        name = "open, attach, detach, release and close, TCP"
        for what, seconds in (
            ("CPU", [side.cpu_s for side in rounds]),
            ("wall", [side.wall_s for side in rounds]),
        ):
            each_ms = [value / count * 1e3 for value in seconds]
            note = f"lowest round {min(each_ms):.2f} ms"
            self.extras.append(Extra(f"{name}: {what}", "ms", median(each_ms), note=note))

    # --- idle clients

    def streams(self) -> None:
        for view in ("crush", "delta"):
            with open_culm(self._folder / f"streams-{view}") as culm:
                self._progress(f"{self._size.streams:,} idle streams, view={view}")
                self._hold_streams(Plan(culm.place, unix=False, path=culm.workspace, view=view), "")
                if view == "crush":
                    self._progress(f"{self._size.streams:,} idle streams, bare aiohttp")
                    with open_bare(culm, {}) as bare:
                        self._hold_streams(
                            Plan(bare, unix=False, path=culm.workspace), "bare aiohttp"
                        )

    def _hold_streams(self, plan: Plan, server: str) -> None:
        count, pid = self._size.streams, plan.place.pid
        with open_driver("streams", plan) as driver:
            self._attach(driver, WARM_STREAMS)
            self._detach(driver)
            wait_idle(pid)
            before = measure_memory(pid)
            drove = self._attach(driver, count)
            wait_idle(pid)
            during = measure_memory(pid)
            self._detach(driver)
            after = wait_idle(pid, files=before.files)
        if after.files != before.files:
            self.wrong += 1
        each_kb = (during.rss_kb - before.rss_kb) / count
        megabytes = " → ".join(f"{memory.rss_kb / 1024:.1f}" for memory in (before, during, after))
        files = " → ".join(str(memory.files) for memory in (before, during, after))
        note = (
            f"PSS {(during.pss_kb - before.pss_kb) / count:.1f} kB; RSS {megabytes} MB; "
            f"descriptors {files}; attaching {drove.cpu_s / count * 1e3:.2f} ms CPU"
        )
        name = f"{count:,} idle streams, {server or f'view={plan.view}'}: each"
        if server:
            self.extras.append(Extra(name, "kB", each_kb, note=note))
        else:
            self.rows.append(Row(name, "kB", each_kb, None, None, 60.0, note=note))

    def _attach(self, driver: Child, count: int) -> Drove:
        drove = driver.ask(Command("attach", streams=count), Drove)
        self.wrong += drove.wrong
        return drove

    def _detach(self, driver: Child) -> None:
        self.wrong += driver.ask(Command("detach"), Drove).wrong


def wait_idle(pid: int, files: int | None = None) -> Memory:
    """Wait, with a limit, until a server is idle and has `files` descriptors, if given."""
    end_s = time.monotonic() + SETTLE_MAX_S
    while True:
        before_s = cpu_s(pid)
        time.sleep(QUIET_S)
        memory = measure_memory(pid)
        is_idle = cpu_s(pid) - before_s < QUIET_CPU_S and files in (None, memory.files)
        if is_idle or time.monotonic() > end_s:
            return memory


def extra_ratios(extras: list[Extra]) -> Iterator[NamedRatio]:
    for extra in extras:
        if extra.ratio is not None:
            yield NamedRatio(extra.name, Ratio(extra.ratio, "yardstick"))
        elif extra.yardstick is not None:
            yield NamedRatio(extra.name, Ratio(extra.measured / extra.yardstick, "yardstick"))


def extra_lines(extras: list[Extra]) -> str:
    lines: list[str] = []
    for extra in extras:
        parts = [f"{extra.name} {extra.measured:.3g} {extra.unit}"]
        if extra.yardstick is not None:
            parts.append(f"bare aiohttp {extra.yardstick:.3g} {extra.unit}")
        if extra.ratio is not None:
            parts.append(f"ratio {extra.ratio:.2f}")
        if extra.note:
            parts.append(extra.note)
        lines.append("; ".join(parts))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare requests with those of a bare server.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 40 s")
    size = QUICK if parser.parse_args().quick else FULL
    start_s = time.monotonic()
    raise_file_limit()  # Children inherit it.
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        bench = Bench(size, Path(folder))
        bench.gets()
        bench.cycles()
        bench.streams()
    seconds = time.monotonic() - start_s
    result = Result(bench.rows, bench.extras, bench.wrong, seconds, describe_machine())
    write_result("http", result, [*named_ratios(result.rows), *extra_ratios(result.extras)])
    print(table(result.rows))
    print(f"\nwithout a target:\n{extra_lines(result.extras)}")
    print(f"\nwrong answers, leaked descriptors: {result.wrong}; {seconds:.0f} s")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
