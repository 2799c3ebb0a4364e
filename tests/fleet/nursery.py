"""What the tests of launching share: a launcher on real custody, a provision, one assignment."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from culm.clock import LoopClock
from culm.fleet.host.base import Worker
from culm.fleet.host.local import LaunchSettings, LocalLauncher, open_local_launcher
from culm.fleet.protocol.frames import (
    EventFrame,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_child_frame,
)
from culm.fleet.provision import EchoKind, Identity, Provision
from culm.ids import Ids
from culm.processes.client import open_processes
from tests.support import WAIT_S

STAND_IN = LaunchSettings(
    zygote="from tests.fleet.stand_in import main; main()",
    worker="from tests.fleet.stand_in import run; sys.exit(run())",
    path=Path(__file__).parents[2],
)
NO_ZYGOTE = replace(STAND_IN, zygote="sys.exit('no zygote today')")
THREADED = replace(STAND_IN, zygote="from tests.fleet.stand_in import main_threaded as m; m()")
BOUND_S = 4 * WAIT_S  # Interpreters are started, and the machine may be busy.


def make_provision(folder: Path, child_id: str, role: str = "") -> Provision:
    return Provision(
        2,
        Identity(child_id, role=role, depth=1),
        EchoKind(),
        str(folder / "fabric"),
        storage_dir=str(folder),
        reusable=True,
    )


@asynccontextmanager
async def open_launcher(
    folder: Path, terms: LaunchSettings | None = None
) -> AsyncGenerator[LocalLauncher]:
    clock = LoopClock()
    async with (
        asyncio.timeout(BOUND_S),
        open_processes(folder, clock, Ids()) as processes,
        open_local_launcher(processes, folder / "fabric", clock, terms) as launcher,
    ):
        yield launcher


async def carry_out(worker: Worker, assignment: str) -> tuple[list[str], TerminalFrame]:
    """The events of one run, as they were written, and its end."""
    link = await worker.connect()
    try:
        await link.send(encode_frame(RunSpec(assignment)))
        events: list[str] = []
        while (data := await link.receive()) is not None:
            match parse_child_frame(data):
                case EventFrame(event):
                    events.append(bytes(event).decode())
                case TerminalFrame() as end:
                    return events, end
                case other:
                    raise AssertionError(f"an echo does not say {other}")
    finally:
        await link.close()
    raise AssertionError("the link ended before the run")
