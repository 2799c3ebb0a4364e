"""Worker test support: a worker in this process, and a client for it."""

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


class RunningWorker:
    """A worker in a task; created by `open_running_worker`."""

    def __init__(self, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.task = task
        self.stop = stop
        self.endpoint = ""

    async def ended(self) -> None:
        """Wait for its end; re-raise its error."""
        async with asyncio.timeout(WAIT_S):
            await self.task


@asynccontextmanager
async def open_running_worker(provision: Provision) -> AsyncGenerator[RunningWorker]:
    """Start a worker, wait until it is ready, and stop it at the end."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work(provision, stop, WorkerEndpoint(on_ready=ready.set_result)))
        worker = RunningWorker(task, stop)
        async with asyncio.timeout(WAIT_S):
            worker.endpoint = await ready
        try:
            yield worker
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
    """Run an assignment; return its events and its terminal."""
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
    """The frames of an echo of these words."""
    tokens: list[Json] = [{"type": "token", "content": f"{word} "} for word in words]
    result = f"echo: {' '.join(words)}"
    terminal = {"kind": "terminal", "status": "completed", "result": result}
    return [*tokens, {"type": "complete"}, terminal]


def open_descriptors() -> int:
    with os.scandir("/proc/self/fd") as entries:
        return len([*entries])
