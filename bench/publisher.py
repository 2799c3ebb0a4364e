"""The measured process: culm's own server or the yardstick, and a driver that publishes in it.

Usage: publisher.py culm FOLDER | publisher.py yardstick
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import uvloop
from msgspec import Struct

from bench import frames
from bench.ipc import STEP_TIMEOUT_S, Command, Ready, Spent, answer, commands
from bench.yardstick import Yardstick
from culm.assemble import open_server
from culm.clock import LoopClock
from culm.ids import Ids
from culm.run.draft import Draft
from culm.server.listen import TcpAddress
from culm.settings import ServeOptions, Settings
from culm.wire.messages import Finish, Session, Text, TextPart
from culm.wire.workspaces import CreateWorkspace
from culm.workspace.workspace import LiveWorkspace

LISTED_CHARS = 900  # With ids and envelope about 1 KB a message.
LISTED_GROUP = 500  # Writes in flight while filling.


class Filled(Struct):
    path: str


class Acks(asyncio.Protocol):
    """Counts the reader's acknowledgements: one byte when every stream has a burst."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._early = 0

    def data_received(self, data: bytes) -> None:
        self._early += len(data)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._early:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._early -= 1


class Side(Protocol):
    """A publisher: culm or the yardstick."""

    async def begin(self) -> None: ...
    def prepare(self, texts: list[str]) -> None: ...
    def send(self, first: int, end: int) -> None: ...
    async def settle(self) -> None: ...


class Culm:
    """The real server, used as a run uses it. Made by `open_culm`."""

    def __init__(self, workspace: LiveWorkspace, session: Session, ready: Ready) -> None:
        self.ready = ready
        self._messages = workspace.messages
        self._session = session
        self._drafts: list[Draft] = []
        self._texts: list[str] = []

    async def begin(self) -> None:
        """Open new messages for a new round, so that none gets unrealistically long."""
        done = [self._messages.finish(draft, Finish("stop", 0)) for draft in self._drafts]
        opened = [self._messages.open(self._session.id) for _ in range(frames.DRAFTS)]
        self._drafts = [draft for draft, _ in opened]
        for write in (*done, *(write for _, write in opened)):
            await write

    def prepare(self, texts: list[str]) -> None:
        self._texts = texts

    def send(self, first: int, end: int) -> None:
        for n in range(first, end):
            draft = self._drafts[n % frames.DRAFTS]
            self._messages.append(draft, 0, "text", self._texts[n])

    async def settle(self) -> None:
        """Flush all text to disk: pending chunks belong to the round."""
        await self._messages.flush()

    async def fill(self, count: int) -> Filled:
        """Add many messages to the session; return the path that lists them."""
        body = "x" * LISTED_CHARS
        for first in range(0, count, LISTED_GROUP):
            writes = [
                self._messages.add(self._session.id, "user", [TextPart(Text(body))])[1]
                for _ in range(min(LISTED_GROUP, count - first))
            ]
            for write in writes:
                await write
        base = self.ready.path.partition("/events")[0]
        return Filled(f"{base}/sessions/{self._session.id}/messages")


@asynccontextmanager
async def open_culm(folder: Path, ack_port: int) -> AsyncGenerator[Culm]:
    options = ServeOptions(
        data_dir=folder / "data",
        hosts=("tcp://127.0.0.1:0",),
        auth=False,
        # No client keeps the workspace open, and every stream is one.
        settings=Settings(create_grace_s=600.0, clients_max=2000),
    )
    ids = Ids()
    async with open_server(options, LoopClock(), ids, lambda: None) as server:
        client_id = ids.client()
        request = CreateWorkspace(path=str(folder), client_id=client_id)
        workspace = await server.registry.create(request, client_id)
        session = await workspace.sessions.create("fan-out")
        address = server.addresses[0]
        assert isinstance(address, TcpAddress)
        path = (
            f"/v1/workspaces/{workspace.about.id}/events"
            f"?view=delta&sessions={session.id}&client_id={{client_id}}"
        )
        yield Culm(workspace, session, Ready(address.port, ack_port, path))


async def run_round(side: Side, acks: Acks, command: Command) -> Spent:
    await side.begin()
    side.prepare([frames.text(0, frames.TIME if command.pace_s else frames.COUNT)])
    side.send(0, 1)
    await acks.wait()
    if command.pace_s:
        return await _run_paced(side, acks, command)
    side.prepare(frames.texts(command.bursts, command.burst))
    cpu_s, wall_s = time.process_time(), time.monotonic()
    for first in range(0, command.bursts * command.burst, command.burst):
        side.send(first, first + command.burst)
        await acks.wait()
    await side.settle()
    return Spent(time.process_time() - cpu_s, time.monotonic() - wall_s)


async def _run_paced(side: Side, acks: Acks, command: Command) -> Spent:
    loop = asyncio.get_running_loop()
    cpu_s, start_s = time.process_time(), loop.time()
    for n in range(command.bursts):
        flag = frames.LAST if n == command.bursts - 1 else frames.MORE
        side.prepare([frames.text(n, flag, time.monotonic_ns())])
        side.send(0, 1)
        await asyncio.sleep(max(0.0, start_s + (n + 1) * command.pace_s - loop.time()))
    await acks.wait()
    return Spent(time.process_time() - cpu_s, loop.time() - start_s)


async def _serve(kind: str, folder: str) -> None:
    acks = Acks()
    loop = asyncio.get_running_loop()
    ack_server = await loop.create_server(lambda: acks, "127.0.0.1", 0)
    ack_port: int = ack_server.sockets[0].getsockname()[1]
    if kind == "yardstick":
        side = Yardstick()
        answer(await side.listen(ack_port))
        async for command in commands():
            async with asyncio.timeout(STEP_TIMEOUT_S):
                answer(await run_round(side, acks, command))
        return
    async with open_culm(Path(folder), ack_port) as culm:
        answer(culm.ready)
        async for command in commands():
            async with asyncio.timeout(STEP_TIMEOUT_S):
                match command.do:
                    case "round":
                        answer(await run_round(culm, acks, command))
                    case "fill":
                        answer(await culm.fill(command.bursts))
                    case _:
                        answer(Spent(time.process_time(), time.monotonic()))


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
