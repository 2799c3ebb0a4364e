"""A server whose workspaces are written to: the real one, with a driver beside it.

Run as a program. It prints `listening URL` as `culm serve` does. Each line on stdin is an `Order`
(JSON), carried out in every workspace that is open or gets opened; `rest` stops the dripping,
and the end of stdin ends the process, so that none outlives its test. It prints
`did <workspace> <session> <n>` once the first n steps of a session's plan are done and durable
(text that only grew becomes so with the next step that is not growth), and `end <workspace>
<seed>` when an order is done.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from culm.assemble import Server, open_server
from culm.clock import LoopClock
from culm.ids import Ids, MessageId, SessionId
from culm.run.draft import Draft
from culm.settings import ServeOptions
from culm.wire.messages import Text, TextPart
from culm.workspace.workspace import LiveWorkspace
from tests.live.plan import (
    DRIP_WORD,
    FINISH,
    Add,
    Clear,
    Delete,
    DeleteSession,
    Drip,
    End,
    Flush,
    Grow,
    Op,
    Open,
    Put,
    make_drip,
    make_plan,
)

LOOK_S = 0.02  # Poll interval for newly opened workspaces.
DRIP_S = 0.005


class Order(msgspec.Struct, frozen=True):
    """The amount to write; `seed` determines the content."""

    seed: int
    sessions: int = 4
    messages: int = 20
    deletes: bool = True
    drip: bool = False

    def line(self) -> str:
        return msgspec.json.encode(self).decode()

    def plans(self) -> dict[str, list[Op]]:
        """The plan of each session, by its title."""
        plans = {
            f"{self.seed}/{n}": make_plan(
                self.seed, n, messages=self.messages, deletes=self.deletes
            )
            for n in range(self.sessions)
        }
        return {**plans, f"{self.seed}/drip": make_drip()} if self.drip else plans


def print_line(*values: object) -> None:
    # One write at any buffering: a kill must not leave half of a line.
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


class Driver:
    """Carries one plan out in one session."""

    def __init__(self, workspace: LiveWorkspace, rest: asyncio.Event) -> None:
        self._workspace = workspace
        self._messages = workspace.messages
        self._rest = rest
        self._drafts: dict[str, Draft] = {}
        self._ids: dict[str, MessageId] = {}

    async def run(self, title: str, plan: list[Op]) -> None:
        session = await self._workspace.sessions.create(title)
        print_line("did", self._workspace.about.id, title, 0)
        for number, op in enumerate(plan, start=1):
            await self._do(session.id, op)
            print_line("did", self._workspace.about.id, title, number)

    async def _do(self, session_id: SessionId, op: Op) -> None:
        messages, drafts = self._messages, self._drafts
        match op:
            case Add(name, text):
                message, write = messages.add(session_id, "user", [TextPart(Text(text))])
                self._ids[name] = message.id
                await write
            case Open(name):
                # The first text follows at once; it must not overtake the message itself.
                drafts[name], write = messages.open(session_id, model=name, provider="plan")
                self._ids[name] = drafts[name].message.id
                await write
            case Grow(name, part, pieces):
                for piece in pieces:
                    messages.append(drafts[name], part, "text", piece)
                    await asyncio.sleep(0)
            case Drip(name, part):
                while not self._rest.is_set():
                    messages.append(drafts[name], part, "text", DRIP_WORD)
                    await asyncio.sleep(DRIP_S)
            case Flush():
                await messages.flush()
            case Put(name, part, call):
                await messages.put(drafts[name], part, call)
            case Clear(name):
                await messages.clear(drafts[name])
            case End(name):
                await messages.finish(drafts[name], FINISH)
            case Delete(name):
                await messages.delete(self._ids[name])
            case DeleteSession():
                await self._workspace.sessions.delete(session_id)


async def carry_out(order: Order, workspace: LiveWorkspace, rest: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as sessions:
        for title, plan in order.plans().items():
            sessions.create_task(Driver(workspace, rest).run(title, plan), name=title)
    print_line("end", workspace.about.id, order.seed)


async def watch(server: Server, orders: list[Order], rest: asyncio.Event) -> None:
    """Give every order to every workspace, once."""
    given: set[tuple[str, int]] = set()
    async with asyncio.TaskGroup() as drivers:
        while True:
            for workspace in server.registry.list():
                for order in orders:
                    key = (workspace.about.id, order.seed)
                    if key not in given:
                        given.add(key)
                        drivers.create_task(carry_out(order, workspace, rest), name=str(key))
            await asyncio.sleep(LOOK_S)


async def read_orders(orders: list[Order], rest: asyncio.Event, stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while line := (await reader.readline()).strip():
            if line == b"rest":
                rest.set()
            else:
                orders.append(msgspec.json.decode(line, type=Order))
    finally:
        pipe.close()
    stop.set()


async def publish(options: ServeOptions) -> None:
    stop, rest = asyncio.Event(), asyncio.Event()
    orders: list[Order] = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with open_server(options, LoopClock(), Ids(), stop.set) as server:
        for address in server.addresses:
            print_line("listening", address)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(watch(server, orders, rest), name="watch"),
                tasks.create_task(read_orders(orders, rest, stop), name="stdin"),
            ]
            await stop.wait()
            for task in running:
                task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    given = parser.parse_args()
    data_dir: Path = given.data_dir
    hosts: list[str] = given.host
    options = ServeOptions(data_dir=data_dir, hosts=tuple(hosts))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(publish(options))


if __name__ == "__main__":
    main()
