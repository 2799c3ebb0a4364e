"""What the tests of workers share: a worker in this process, and a parent that talks to it."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from culm.clock import LoopClock
from culm.fleet.discovery.base import AgentRecord
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import AnyKind, EchoKind, Identity, Provision, Secrets
from culm.fleet.transport.base import Link
from culm.fleet.transport.websocket import connect_websocket
from culm.fleet.worker.lifecycle import WorkerEndpoint, work
from culm.wire.codec import Json
from tests.support import WAIT_S

TOKEN = "worker-token"


def make_provision(folder: Path, kind: AnyKind | None = None) -> Provision:
    return Provision(
        version=2,
        identity=Identity("w1", role="tester"),
        executor=kind or EchoKind(),
        fabric_dir=str(folder / "fabric"),
        secrets=Secrets(worker_auth_token=TOKEN),
        reusable=True,
    )


def discovery_in(folder: Path) -> FileDiscovery:
    return FileDiscovery(folder / "fabric", LoopClock())


class Working:
    """A worker in a task. Made by `open_working`."""

    def __init__(self, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.task = task
        self.stop = stop
        self.endpoint = ""

    async def ended(self) -> None:
        """Wait for its end; raises what it raised."""
        async with asyncio.timeout(WAIT_S):
            await self.task


@asynccontextmanager
async def open_working(provision: Provision) -> AsyncGenerator[Working]:
    """Start it, wait until it can be reached, and stop it at the end."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work(provision, stop, WorkerEndpoint(on_ready=ready.set_result)))
        working = Working(task, stop)
        async with asyncio.timeout(WAIT_S):
            working.endpoint = await ready
        try:
            yield working
        finally:
            stop.set()


async def wait_for_record(folder: Path) -> AgentRecord:
    async with asyncio.timeout(2 * WAIT_S):
        while (found := discovery_in(folder).resolve("w1")) is None:
            await asyncio.sleep(0.01)
    return found


async def assign(link: Link, assignment: str) -> None:
    await link.send(json.dumps({"kind": "run", "assignment": assignment}).encode())


async def receive(link: Link) -> dict[str, Json]:
    async with asyncio.timeout(WAIT_S):
        frame = await link.receive()
    assert frame is not None, "the worker closed the link"
    return json.loads(frame)


async def run(endpoint: str, assignment: str, token: str | None = TOKEN) -> Sequence[Json]:
    """The events of a run, and its terminal."""
    async with asyncio.timeout(WAIT_S):
        link = await connect_websocket(endpoint, token)
    try:
        await assign(link, assignment)
        frames = [await receive(link)]
        while frames[-1]["kind"] != "terminal":
            frames.append(await receive(link))
        return [frame.get("event", frame) for frame in frames]
    finally:
        await link.close()


def echoed(*words: str) -> list[Json]:
    """What an echo of these words is."""
    tokens: list[Json] = [{"type": "token", "content": f"{word} "} for word in words]
    result = f"echo: {' '.join(words)}"
    terminal = {"kind": "terminal", "status": "completed", "result": result}
    return [*tokens, {"type": "complete"}, terminal]


def open_descriptors() -> int:
    with os.scandir("/proc/self/fd") as entries:
        return len([*entries])
