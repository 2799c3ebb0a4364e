"""Launch test support: a launcher on real processes, a provision, one assignment."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

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

FAKE_WORKER = LaunchSettings(
    zygote="from tests.fleet.fake_worker import main; main()",
    worker="from tests.fleet.fake_worker import run; sys.exit(run())",
    path=Path(__file__).parents[2],
)
NO_ZYGOTE = replace(FAKE_WORKER, zygote="sys.exit('no zygote today')")
THREADED = replace(
    FAKE_WORKER, zygote="from tests.fleet.fake_worker import main_threaded as m; m()"
)
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
    folder: Path, settings: LaunchSettings | None = None
) -> AsyncGenerator[LocalLauncher]:
    clock = LoopClock()
    async with (
        asyncio.timeout(BOUND_S),
        open_processes(folder, clock, Ids()) as processes,
        open_local_launcher(processes, folder / "fabric", clock, settings) as launcher,
    ):
        yield launcher


async def run_assignment(worker: Worker, assignment: str) -> tuple[list[str], TerminalFrame]:
    """Run an assignment; return its raw events and its terminal."""
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
                    raise AssertionError(f"unexpected frame from an echo worker: {other}")
    finally:
        await link.close()
    raise AssertionError("the link ended before the run")
