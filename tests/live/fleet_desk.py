"""A test's side of `fleet_owner.py`: what it is told to do, what it said, and what is left of it.

Whatever a fleet is made of is found in three ways: by descent, by the folder that all of it works
in, and by the sockets it listens at.
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
from culm.processes.linux import ProcStat, find_stat, read_table
from culm.processes.tree import descendants_of
from culm.testing.model_server import ModelServer
from culm.wire.codec import Json
from tests.live.fleet_owner import Ended, Wanted
from tests.live.harness import ProcessServer, make_directory, open_process

BOUND_S = 30.0  # For whatever is to happen by itself, on a busy machine.
POLL_S = 0.02
_LISTENING = "0A"  # As /proc/net/tcp has it.
ROLES: Mapping[str, str] = {
    "culm-keeper": "keeper",
    "culm-zygote": "zygote",
    "culm-bud": "buds",
    "culm-worker": "workers",
    "culm-warden": "wardens",
}


async def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Look again and again, as nobody tells us when it is so; or fail with what there is."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"waited {BOUND_S} s in vain: {what()}") from None


# --- who is there


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything of an owner at one moment."""

    by_role: Mapping[str, list[ProcStat]]  # server, keeper, zygote, workers, wardens, commands
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
        """Who is still there, with its name; of all, unless roles are given."""
        before = [stat for role in roles or self.by_role for stat in self.by_role[role]]
        return [f"{stat.comm} {stat.pid}" for stat in before if is_same_alive(stat)]


def is_same_alive(before: ProcStat) -> bool:
    now = find_stat(before.pid)
    return now is not None and now.is_alive and now.start_ticks == before.start_ticks


def look(server: int) -> Seen:
    """Whoever descends from it, and lives."""
    table = read_table()
    by_role: dict[str, list[ProcStat]] = {"server": [table[server]]}
    by_role.update({role: [] for role in (*ROLES.values(), "commands")})
    for stat in descendants_of(server, table):
        parent = table.get(stat.parent)
        # A fork has the name of its parent until it gives itself another one.
        is_newborn = parent is not None and parent.comm == stat.comm in ROLES
        if stat.is_alive:
            role = "buds" if is_newborn else ROLES.get(stat.comm, "commands")
            by_role[role].append(stat)
    return Seen(by_role)


def look_closely(server: int) -> Seen:
    """Also where they listen."""
    seen = look(server)
    held = {inode for pid in seen.pids(*seen.by_role) for inode in _sockets_of(pid)}
    return Seen(seen.by_role, frozenset(held & _listening()))


def _sockets_of(pid: int) -> set[str]:
    links = _links(f"/proc/{pid}/fd")
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _links(folder: str) -> list[str]:
    """Where the links in a folder of /proc lead; whatever is gone, or not ours, leads nowhere."""
    found: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                found.append(str(Path(entry.path).readlink()))
    return found


def _listening() -> set[str]:
    """The inodes of all sockets of this machine at which somebody listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[3] == _LISTENING}


def _mentions(pid: int, folder: Path) -> bool:
    """Whether a process works in that folder, holds a file of it, or was started with its name."""
    base, name = Path(f"/proc/{pid}"), str(folder)
    found = _links(f"{base}/fd")
    with suppress(OSError):
        found.append(str((base / "cwd").readlink()))
        found += [
            (base / file).read_bytes().decode(errors="replace") for file in ("cmdline", "environ")
        ]
    return any(name in text for text in found)


def strangers(folder: Path) -> list[str]:
    """Processes other than this one that have to do with the folder, whoever started them."""
    found = [stat for stat in read_table().values() if stat.is_alive and stat.pid != os.getpid()]
    return [f"{stat.comm} {stat.pid}" for stat in found if _mentions(stat.pid, folder)]


# --- what is left


def remains(folder: Path, seen: Seen) -> list[str]:
    """Processes, sockets, records and storage of an owner that is gone; or of its workers."""
    found = seen.alive()
    found += [f"socket {inode}" for inode in sorted(seen.listening & _listening())]
    data = folder / "data"
    found += sorted(str(path) for name in ("fabric", "workers") for path in (data / name).glob("*"))
    return found


async def nothing_left(folder: Path, seen: Seen) -> None:
    """Wait until nothing remains of an owner, and nobody is there whom we had not seen."""
    await until(lambda: not remains(folder, seen), lambda: remains(folder, seen))
    await until(lambda: not strangers(folder), lambda: strangers(folder))


# --- an owner


class FleetDesk:
    """Made by `open_desk`."""

    def __init__(self, process: ProcessServer, folder: Path, model: ModelServer | None) -> None:
        self.process = process
        self.folder = folder
        self._model = model
        self._read = 0  # Lines that were understood.
        self._events: dict[str, list[dict[str, Json]]] = {}
        self._ended: dict[str, Ended] = {}
        self._known: dict[int, ProcStat] = {}  # Whoever was ever seen, by pid.

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def provision(self, name: str, kind: AnyKind | None = None, role: str = "") -> Provision:
        """Of our runtime if there is a model, else of an echo."""
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
        self._say(Wanted(name, provision, assignment, fleet, is_quiet))

    def cancel(self, name: str) -> None:
        self._say(Wanted(name, cancel=True))

    def _say(self, wanted: Wanted) -> None:
        self.process.tell(msgspec.json.encode(wanted).decode())

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

    def look(self) -> Seen:
        return self._remember(look(self.pid))

    def _remember(self, seen: Seen) -> Seen:
        self._known.update({stat.pid: stat for stats in seen.by_role.values() for stat in stats})
        return seen

    async def seen(self, **counts: int) -> Seen:
        """Everybody who is there, once these are, and every worker has announced itself."""
        discovery = FileDiscovery(self.folder / "data" / "fabric", LoopClock())
        seen = self.look()

        def there() -> dict[str, int]:
            nonlocal seen
            seen = self._remember(look_closely(self.pid))
            found = {role: len(seen.by_role[role]) for role in counts}
            return {**found, "records": len(discovery.records()), "sockets": len(seen.listening)}

        wanted = {**counts, "records": counts["workers"], "sockets": counts["workers"]}
        await until(lambda: there() == wanted, lambda: (there(), self.look().names))
        return seen

    async def leave(self) -> None:
        """Have it end in order, and see that it does, and that nothing went wrong in it."""
        assert self.process.process.stdin is not None
        self.process.process.stdin.close()
        ended = await self.process.wait(BOUND_S)
        assert (ended.status, "Traceback" in ended.stderr) == (0, False), ended.stderr

    def end_all(self) -> None:
        """A test that failed leaves nobody behind either."""
        for stat in self._known.values():
            if is_same_alive(stat):
                os.kill(stat.pid, signal.SIGKILL)

    async def _until(self, condition: Callable[[], bool]) -> None:
        def heard() -> bool:
            for line in self.process.lines[self._read :]:
                self._read += 1
                self._take(line)
            return condition()

        await self.process.until(heard, BOUND_S)

    def _take(self, line: str) -> None:
        said = msgspec.json.decode(line)
        if "event" in said:
            self._events.setdefault(said["run"], []).append(said["event"])
        elif "status" in said:
            ended = msgspec.convert(said, Ended)
            assert ended.run not in self._ended, "a run ended twice"
            self._ended[ended.run] = ended


@asynccontextmanager
async def open_desk(folder: Path, model: ModelServer | None = None) -> AsyncGenerator[FleetDesk]:
    """An owner that is up; afterwards it is gone, and what it had started is ended."""
    argv = ("-m", "tests.live.fleet_owner", str(folder / "data"))
    desk: FleetDesk | None = None
    try:
        async with open_process(folder, *argv) as process:
            desk = FleetDesk(process, folder, model)
            await process.until_said(f'{{"up":{process.process.pid}}}', BOUND_S)
            yield desk
    finally:
        if desk is not None:
            desk.end_all()
