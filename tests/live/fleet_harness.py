"""A test's side of `fleet_owner.py`: its instructions, its output, and its leftovers.

The processes of a fleet are found in three ways: by descent, by the folder that all of them work
in, and by the sockets they listen at.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from culm.clock import LoopClock
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import (
    AnyKind,
    Credential,
    CulmExtension,
    EchoKind,
    Identity,
    ModelName,
    Provision,
    RuntimeKind,
    Secrets,
)
from culm.processes.linux import ProcStat, descendants_of, find_stat, read_table
from culm.testing.model_server import ModelServer
from culm.wire.codec import Json
from tests.live.fleet_owner import Ended, Instruction
from tests.live.harness import ProcessServer, make_directory, open_process

BOUND_S = 30.0  # For anything that happens by itself on a busy machine.
POLL_S = 0.02
_LISTENING = "0A"  # The state in /proc/net/tcp.
ROLES: Mapping[str, str] = {
    "culm-supervisor": "supervisor",
    "culm-zygote": "zygote",
    "culm-prefork": "preforks",
    "culm-worker": "workers",
    "culm-shim": "shims",
}


async def until(condition: Callable[[], bool], describe: Callable[[], object]) -> None:
    """Poll until the condition is true, or fail with a description of the current state."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not true after {BOUND_S} s: {describe()}") from None


# --- processes


@dataclass(frozen=True, slots=True)
class FleetProcesses:
    """All processes of an owner at one moment."""

    by_role: Mapping[str, list[ProcStat]]  # server, supervisor, zygote, workers, shims, commands
    listening: frozenset[str] = frozenset()  # Its sockets, by inode.

    @property
    def names(self) -> dict[str, list[str]]:
        return {role: sorted(s.comm for s in stats) for role, stats in self.by_role.items()}

    def pids(self, *roles: str) -> list[int]:
        return [stat.pid for role in roles for stat in self.by_role[role]]

    def kill(self, *roles: str) -> None:
        """`kill -9` all of them at once: none sees another die."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids(*roles):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def alive(self, *roles: str) -> list[str]:
        """Return those that still live, with their names; of all roles unless some are given."""
        before = [stat for role in roles or self.by_role for stat in self.by_role[role]]
        return [f"{stat.comm} {stat.pid}" for stat in before if is_same_alive(stat)]


def is_same_alive(before: ProcStat) -> bool:
    now = find_stat(before.pid)
    return now is not None and now.is_alive and now.start_ticks == before.start_ticks


def find_processes(server: int) -> FleetProcesses:
    """Return the live descendants of a server."""
    table = read_table()
    by_role: dict[str, list[ProcStat]] = {"server": [table[server]]}
    by_role.update({role: [] for role in (*ROLES.values(), "commands")})
    for stat in descendants_of(server, table):
        parent = table.get(stat.parent)
        # A fork has the name of its parent until it gives itself another one.
        is_newborn = parent is not None and parent.comm == stat.comm in ROLES
        if stat.is_alive:
            role = "preforks" if is_newborn else ROLES.get(stat.comm, "commands")
            by_role[role].append(stat)
    return FleetProcesses(by_role)


def find_processes_and_sockets(server: int) -> FleetProcesses:
    """Return the live descendants of a server and the sockets they listen at."""
    processes = find_processes(server)
    held = {inode for pid in processes.pids(*processes.by_role) for inode in _sockets_of(pid)}
    return FleetProcesses(processes.by_role, frozenset(held & _listening()))


def _sockets_of(pid: int) -> set[str]:
    links = _links(f"/proc/{pid}/fd")
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _links(folder: str) -> list[str]:
    """Return the targets of the links in a folder of /proc, without those that are unreadable."""
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found.append(str(Path(entry.path).readlink()))
    return found


def _listening() -> set[str]:
    """Return the inodes of all listening sockets of this machine."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[3] == _LISTENING}


def _mentions(pid: int, folder: Path) -> bool:
    """True if a process works in the folder, has a file of it open, or was given its name."""
    base, name = Path(f"/proc/{pid}"), str(folder)
    found = _links(f"{base}/fd")
    with suppress(OSError):
        found.append(str((base / "cwd").readlink()))
        found += [
            (base / file).read_bytes().decode(errors="replace") for file in ("cmdline", "environ")
        ]
    return any(name in text for text in found)


def related_processes(folder: Path) -> list[str]:
    """Return the processes other than this one that use the folder, whatever started them."""
    found = [stat for stat in read_table().values() if stat.is_alive and stat.pid != os.getpid()]
    return [f"{stat.comm} {stat.pid}" for stat in found if _mentions(stat.pid, folder)]


# --- leftovers


def leftovers(folder: Path, processes: FleetProcesses) -> list[str]:
    """Return processes, sockets, records and storage of a dead owner or of its workers."""
    found = processes.alive()
    found += [f"socket {inode}" for inode in sorted(processes.listening & _listening())]
    data = folder / "data"
    found += sorted(str(path) for name in ("fabric", "workers") for path in (data / name).glob("*"))
    return found


async def until_nothing_left(folder: Path, processes: FleetProcesses) -> None:
    """Wait until nothing of an owner is left, known to the test or not."""
    await until(lambda: not leftovers(folder, processes), lambda: leftovers(folder, processes))
    await until(lambda: not related_processes(folder), lambda: related_processes(folder))


# --- an owner


class FleetHarness:
    """Made by `open_fleet_harness`."""

    def __init__(self, process: ProcessServer, folder: Path, model: ModelServer | None) -> None:
        self.process = process
        self.folder = folder
        self._model = model
        self._read = 0  # Number of lines that were read.
        self._events: dict[str, list[dict[str, Json]]] = {}
        self._ended: dict[str, Ended] = {}
        self._known: dict[int, ProcStat] = {}  # All processes that were ever seen, by pid.

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def provision(self, name: str, kind: AnyKind | None = None, role: str = "") -> Provision:
        """A provision of our runtime if there is a model, else of an echo."""
        kind = kind or (RuntimeKind() if self._model else EchoKind())
        given = Provision(
            2,
            Identity(name, role=role, depth=1),
            kind,
            str(self.folder / "data" / "fabric"),
            workspace=str(make_directory(self.folder)),
            culm=CulmExtension(env={"PATH": os.environ["PATH"], "HOME": str(self.folder)}),
        )
        if self._model is None or not isinstance(kind, RuntimeKind):
            return given
        credential = Credential("demo", "k", self._model.url, "openai-compat")
        return msgspec.structs.replace(
            given, model=ModelName("demo", "demo-1"), secrets=Secrets([credential])
        )

    def begin(
        self,
        name: str,
        assignment: str,
        kind: AnyKind | None = None,
        *,
        role: str = "",
        fleet: str = "own",
        is_quiet: bool = False,
    ) -> None:
        provision = self.provision(name, kind, role)
        self._send(Instruction(name, provision, assignment, fleet, is_quiet))

    def cancel(self, name: str) -> None:
        self._send(Instruction(name, cancel=True))

    def _send(self, instruction: Instruction) -> None:
        self.process.send_line(msgspec.json.encode(instruction).decode())

    async def end(self, name: str) -> Ended:
        """Wait for the end of a run."""
        await self._until(lambda: name in self._ended)
        return self._ended[name]

    async def any_event(self) -> None:
        """Wait for the first event of the first run that has one."""
        await self._until(lambda: bool(self._events))

    async def event(self, name: str, type_: str, **fields: Json) -> dict[str, Json]:
        """Wait for an event of a run that has these fields."""
        wanted = {"type": type_, **fields}

        def found() -> list[dict[str, Json]]:
            return [one for one in self._events.get(name, []) if wanted.items() <= one.items()]

        await self._until(lambda: bool(found()))
        return found()[0]

    def processes(self) -> FleetProcesses:
        return self._remember(find_processes(self.pid))

    def _remember(self, processes: FleetProcesses) -> FleetProcesses:
        self._known.update(
            {stat.pid: stat for stats in processes.by_role.values() for stat in stats}
        )
        return processes

    async def until_processes(self, **counts: int) -> FleetProcesses:
        """Wait until there are so many of each role and every worker has announced itself."""
        discovery = FileDiscovery(self.folder / "data" / "fabric", LoopClock())
        processes = self.processes()

        def counted() -> dict[str, int]:
            nonlocal processes
            processes = self._remember(find_processes_and_sockets(self.pid))
            found = {role: len(processes.by_role[role]) for role in counts}
            return {
                **found,
                "records": len(discovery.records()),
                "sockets": len(processes.listening),
            }

        wanted = {**counts, "records": counts["workers"], "sockets": counts["workers"]}
        await until(lambda: counted() == wanted, lambda: (counted(), self.processes().names))
        return processes

    async def shut_down(self) -> None:
        """Close its stdin, and assert that it exits 0 without a traceback."""
        assert self.process.process.stdin is not None
        self.process.process.stdin.close()
        ended = await self.process.wait(BOUND_S)
        assert (ended.status, "Traceback" in ended.stderr) == (0, False), ended.stderr

    def end_all(self) -> None:
        """Kill everything that is left, also after a failed test."""
        for stat in self._known.values():
            if is_same_alive(stat):
                os.kill(stat.pid, signal.SIGKILL)

    async def _until(self, condition: Callable[[], bool]) -> None:
        def is_reached() -> bool:
            for line in self.process.lines[self._read :]:
                self._read += 1
                self._read_line(line)
            return condition()

        await self.process.until(is_reached, BOUND_S)

    def _read_line(self, line: str) -> None:
        decoded = msgspec.json.decode(line)
        if "event" in decoded:
            self._events.setdefault(decoded["run"], []).append(decoded["event"])
        elif "status" in decoded:
            ended = msgspec.convert(decoded, Ended)
            assert ended.run not in self._ended, "a run ended twice"
            self._ended[ended.run] = ended


@asynccontextmanager
async def open_fleet_harness(
    folder: Path, model: ModelServer | None = None
) -> AsyncGenerator[FleetHarness]:
    """Start an owner; afterwards it and everything it started is ended."""
    argv = ("-m", "tests.live.fleet_owner", str(folder / "data"))
    harness: FleetHarness | None = None
    try:
        async with open_process(folder, *argv) as process:
            harness = FleetHarness(process, folder, model)
            await process.until_line(f'{{"up":{process.process.pid}}}', BOUND_S)
            yield harness
    finally:
        if harness is not None:
            harness.end_all()
