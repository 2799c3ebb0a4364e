"""Link test support: both ends in one process, and a scripted parent."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from culm.clock import Clock, LoopClock
from culm.fleet.executor import Executor
from culm.fleet.protocol.frames import (
    ApprovalRequest,
    Cancel,
    ChildFrame,
    EventBatch,
    EventFrame,
    ParentFrame,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_child_frame,
)
from culm.fleet.provision import WorkerLimits
from culm.fleet.transport.base import Link, LinkListener, LinkLost
from culm.fleet.transport.memory import MemoryListener
from culm.fleet.transport.websocket import connect_websocket, listen_websocket
from culm.fleet.worker_server.connection import Mode, ServeMany, serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from culm.wire.codec import Json, decode
from tests.support import WAIT_S

Kind = Literal["memory", "websocket"]
KINDS: tuple[Kind, ...] = ("memory", "websocket")


@dataclass
class LinkEndpoint:
    """A worker's listener, and a function to connect to it."""

    listener: LinkListener
    connect: Callable[[], Awaitable[Link]]


@asynccontextmanager
async def open_endpoint(kind: Kind) -> AsyncGenerator[LinkEndpoint]:
    if kind == "memory":
        memory = MemoryListener()

        async def connect() -> Link:
            return memory.connect()

        yield LinkEndpoint(memory, connect)
        memory.close()
    else:
        async with listen_websocket(token="secret") as listener:
            yield LinkEndpoint(listener, lambda: connect_websocket(listener.endpoint, "secret"))


@asynccontextmanager
async def open_pair(kind: Kind) -> AsyncGenerator[tuple[Link, Link]]:
    """The parent's end and the worker's end of a link."""
    async with open_endpoint(kind) as endpoint, asyncio.timeout(WAIT_S):
        parent = await endpoint.connect()
        worker = await endpoint.listener.accept()
        yield parent, worker
        await close_all(parent, worker)


async def close_all(*links: Link) -> None:
    """Close concurrently: a close waits for that of the other side."""
    async with asyncio.TaskGroup() as group:
        for link in links:
            group.create_task(link.close())


@dataclass
class FakeParent:
    """A parent that sends frames and records what it receives."""

    link: Link
    received: list[ChildFrame] = field(default_factory=list[ChildFrame])

    async def send(self, *frames: ParentFrame) -> None:
        for frame in frames:
            await self.link.send(encode_frame(frame))

    async def run(self, assignment: str, *, epoch: int = 0) -> list[ChildFrame]:
        """Run an assignment; return its frames, the terminal last."""
        await self.send(RunSpec(assignment, execution_epoch=epoch))
        return await self.until_ended()

    async def receive(self) -> ChildFrame | None:
        data = await self.link.receive()
        if data is None:
            return None
        frame = parse_child_frame(data)
        self.received.append(frame)
        return frame

    async def until_ended(self) -> list[ChildFrame]:
        frames: list[ChildFrame] = []
        while frame := await self.receive():
            frames.append(frame)
            if isinstance(frame, TerminalFrame):
                return frames
        raise AssertionError(f"the link was closed after {frames}")

    async def until_asked(self) -> ApprovalRequest:
        while frame := await self.receive():
            if isinstance(frame, ApprovalRequest):
                return frame
        raise AssertionError("the link was closed")

    async def until_closed(self) -> list[ChildFrame]:
        """The remaining frames of a link that ends, cleanly or not."""
        frames: list[ChildFrame] = []
        with suppress(LinkLost):
            while frame := await self.receive():
                frames.append(frame)
        return frames


CANCEL = Cancel()
CANCELLED = TerminalFrame("cancelled")
PANICKED = TerminalFrame("error", error="actor executor panicked")


def done(result: str) -> TerminalFrame:
    return TerminalFrame("completed", result=result)


def events_of(frames: Sequence[ChildFrame]) -> list[Json]:
    """The events in single and batch frames, in order."""
    found: list[Json] = []
    for frame in frames:
        match frame:
            case EventFrame(event=event):
                found.append(decode(bytes(event), dict))
            case EventBatch(batch=batch):
                found += [decode(bytes(event), dict) for event in batch.events]
            case _:
                pass
    return found


def tokens_of(frames: Sequence[ChildFrame]) -> list[str]:
    return [event["content"] for event in events_of(frames) if event["type"] == "token"]


@asynccontextmanager
async def serving(
    kind: Kind,
    executor: Executor,
    mode: Mode | None = None,
    clock: Clock | None = None,
    *,
    run_s: float | None = None,
    host_calls: bool = False,
    depth: int = 1,
) -> AsyncGenerator[Callable[[], Awaitable[FakeParent]]]:
    """Serve a worker in this process; yield a function that connects a parent."""
    limits = WorkerLimits(host_calls, depth, run_s=run_s)
    settings = ServingSettings(clock or LoopClock(), Ids(7), limits)

    async with (
        open_endpoint(kind) as endpoint,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as group,
    ):
        work = group.create_task(
            serve_on(endpoint.listener, executor, mode or ServeMany(), settings)
        )
        parents: list[FakeParent] = []

        async def connect() -> FakeParent:
            parents.append(FakeParent(await endpoint.connect()))
            return parents[-1]

        try:
            yield connect
        finally:
            await close_all(*(parent.link for parent in parents))
            if mode is None or isinstance(mode, ServeMany):
                work.cancel()
