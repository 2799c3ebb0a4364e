"""Asks under many seeds with answers, cancels, faults and crashes: none is lost, answered twice or
approved without a person."""

import asyncio
import contextlib

import pytest

from culm.ids import Ids
from tests.sim.asks_actors import (
    AskClient,
    AskObserver,
    AskServer,
    answer_open_asks,
    trouble_while_asked,
)
from tests.sim.asks_checks import check_asks
from tests.sim.asks_outside import AskWorld
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.sim.runs_actors import SESSIONS, trouble
from tests.sim.runs_checks import check_all, log_arrives_in_order
from tests.sim.runs_disk import number_tasks
from tests.sim.test_runs import begin, start_once_more, wait_until_settled
from tests.support import contract

CLIENTS = 3
OPERATIONS = 8  # Per client.
BATCH = 20
REST = 4.0  # People need time to answer, between two crashes.


async def one_world(loop: SimLoop) -> None:
    world = AskWorld(loop)
    loop.set_exception_handler(world.on_problem)
    number_tasks(loop)
    server = AskServer(loop, world)
    with contextlib.closing(server.file):
        await live_through(server)


async def live_through(server: AskServer) -> None:
    loop, world = server.loop, server.world
    observer = AskObserver(server, Ids(loop.random.randrange(1 << 30)))
    observer.interactive = loop.random.random() < 0.8
    server.observers = [observer]
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(server.run()), tasks.create_task(observer.run())]
        for _ in range(SESSIONS):
            await begin(server)
        while not observer.loaded:
            await asyncio.sleep(0.01)
        faults = [
            tasks.create_task(trouble(server, [observer], rest=REST)),
            tasks.create_task(trouble_while_asked(server)),
        ]
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(AskClient(server, OPERATIONS).run())
        for fault in faults:
            fault.cancel()
        background.append(tasks.create_task(answer_open_asks(server)))
        await wait_until_settled(server, [observer])
        assert not world.problems, world.problems
        check_all(server, [observer])
        check_asks(server, [observer])
        log_arrives_in_order([observer])
        await start_once_more(server)
        for task in background:
            task.cancel()


@contract("INV-77", "EXC-5", "EXC-8", "EXC-9")
@pytest.mark.parametrize("first", range(0, SEEDS_MAX, BATCH))
def test_every_ask_is_answered_once_and_none_is_lost(first: int) -> None:
    for seed in range(first, min(first + BATCH, SEEDS_MAX)):
        simulate(seed, one_world)
