"""A process that owns a fleet, as a server does: `python -m tests.live.fleet_owner <data dir>`.

It reads instructions as lines of JSON on stdin, prints events as lines of JSON on stdout, and
shuts down when stdin ends or on SIGTERM. Its fleet `own` forks our workers; the others start
hostile ones, and `impatient` has a short first-frame timeout.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop
from msgspec import Raw, Struct

from culm.clock import LoopClock
from culm.fleet.host.caller import DenyAll, RunControl
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.local import open_foreign_launcher, open_local_launcher
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.wire.codec import Json

FIRST_FRAME_S = 0.5  # Of the impatient fleet.
HOSTILE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fleet_hostile.py")))


class Instruction(Struct, frozen=True):
    """A line of stdin: start or cancel a run."""

    run: str
    provision: Provision | None = None  # Given: start the run.
    assignment: str = ""
    fleet: str = "own"
    is_quiet: bool = False  # Count its events, do not print them.
    cancel: bool = False


class Ended(Struct, frozen=True):
    """The end of a run, as printed on stdout."""

    run: str
    status: str
    text: str  # Its result, or its error.
    events: int
    began: bool


def print_line(line: Struct | Mapping[str, Json]) -> None:
    os.write(1, msgspec.json.encode(line) + b"\n")


class EventPrinter(DenyAll):
    """Implements `HostCallbacks`: prints events, and approves nothing."""

    def __init__(self, instruction: Instruction) -> None:
        self._wanted = instruction
        self.events = 0

    async def on_event(self, event: Raw) -> None:
        self.events += 1
        if not self._wanted.is_quiet:
            print_line({"run": self._wanted.run, "event": event})


class FleetOwner:
    def __init__(self, fleets: Mapping[str, Fleet], tasks: asyncio.TaskGroup) -> None:
        self._fleets = fleets
        self._tasks = tasks
        self._controls: dict[str, RunControl] = {}
        self._rest = b""

    def on_stdin(self) -> bool:
        """Follow the instructions that were read; False at the end of stdin."""
        data = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._do(msgspec.json.decode(line, type=Instruction))
        return bool(data)

    def _do(self, instruction: Instruction) -> None:
        if instruction.provision is not None:
            self._controls[instruction.run] = RunControl()
            self._tasks.create_task(
                self._run(instruction, instruction.provision), name=instruction.run
            )
        if instruction.cancel:
            self._controls[instruction.run].cancel()

    async def _run(self, instruction: Instruction, provision: Provision) -> None:
        printer = EventPrinter(instruction)
        driven = await self._fleets[instruction.fleet].run(
            provision, RunSpec(instruction.assignment), printer, self._controls[instruction.run]
        )
        text = driven.outcome.result or driven.outcome.error or ""
        print_line(
            Ended(instruction.run, driven.outcome.status, text, printer.events, driven.began)
        )


async def own(data_dir: Path) -> None:
    clock, stop = LoopClock(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        processes = await enter(open_processes(data_dir, clock, Ids()))
        local = await enter(open_local_launcher(processes, data_dir / "fabric", clock))
        local.warm_nowait()
        foreign = await enter(open_foreign_launcher(HOSTILE, processes, clock))
        fleets = {
            "own": await enter(open_fleet(local, clock)),
            "patient": await enter(open_fleet(foreign, clock)),
            "impatient": await enter(
                open_fleet(foreign, clock, FleetBounds(first_frame_s=FIRST_FRAME_S))
            ),
        }
        async with asyncio.TaskGroup() as tasks:
            owner = FleetOwner(fleets, tasks)

            def on_stdin() -> None:
                if not owner.on_stdin():
                    loop.remove_reader(0)
                    stop.set()

            loop.add_reader(0, on_stdin)
            print_line({"up": os.getpid()})
            await stop.wait()
            for fleet in fleets.values():
                await fleet.close()


if __name__ == "__main__":
    uvloop.run(own(Path(sys.argv[1])))
