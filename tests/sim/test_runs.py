"""Runs under many seeds: prompts, cancels, faults and crashes, and one consistent record."""

import asyncio
import contextlib

import pytest

from culm.errors import AppError
from culm.ids import Ids
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.sim.runs_actors import SESSIONS, Client, Observer, trouble
from tests.sim.runs_checks import check_all, log_arrives_in_order
from tests.sim.runs_disk import number_tasks
from tests.sim.runs_outside import World
from tests.sim.runs_world import Gone, RunServer
from tests.store.log_mirror import LogMirror
from tests.support import contract

CLIENTS = 3
OPERATIONS = 10  # Per client.
SETTLE_S = 20_000.0  # Virtual; retries, stalls and slow tools are well inside.
BATCH = 20


async def one_world(loop: SimLoop) -> None:
    world = World(loop, stubborn=loop.random.random() < 0.25)
    loop.set_exception_handler(world.on_problem)
    number_tasks(loop)
    server = RunServer(loop, world)
    with contextlib.closing(server.file):
        await live_through(server)


async def live_through(server: RunServer) -> None:
    loop, world = server.loop, server.world
    ids = Ids(loop.random.randrange(1 << 30))
    observers = [Observer(server, ids)]
    server.observers = list(observers)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(server.run()), tasks.create_task(check_log(server))]
        background += [tasks.create_task(observer.run()) for observer in observers]
        for _ in range(SESSIONS):
            await begin(server)
        while not all(observer.loaded for observer in observers):
            await asyncio.sleep(0.01)
        faults = tasks.create_task(trouble(server, observers))
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(Client(server, OPERATIONS).run())
        faults.cancel()
        await wait_until_settled(server, observers)
        assert not world.problems, world.problems
        check_all(server, observers)
        log_arrives_in_order(observers)
        await start_once_more(server)
        for task in background:
            task.cancel()


async def check_log(server: RunServer) -> None:
    """Check the log after random commits, until cancelled."""
    mirrored = LogMirror()
    while True:
        await server.file.after(server.loop.random.randint(1, 5), timeout_s=60.0)
        server.world.problems += mirrored.check(server.file.connection)


async def begin(server: RunServer) -> None:
    await server.up.wait()

    async def serve(workspace: LiveWorkspace) -> None:
        session = await workspace.sessions.create("Untitled")
        server.world.sessions.append(session.id)

    await server.request(serve)


async def wait_until_settled(server: RunServer, observers: list[Observer]) -> None:
    """Stop all faults, wait until every run ends, and decide about held runs."""
    world, file = server.world, server.file
    world.faulty = world.stubborn = False
    file.is_full = file.is_busy = False
    file.die = None
    file.bad.clear()
    for observer in observers:
        observer.sleepy = observer.away_s = 0.0
    await wait_until_idle(server)
    person = Client(server, 0)
    for _ in range(3):
        await server.up.wait()
        with contextlib.suppress(Gone, AppError):
            await (person.start() if server.loop.random.random() < 0.5 else person.drop())
    await wait_until_idle(server)
    await asyncio.sleep(200)  # Titles, and observers that were cut off.


async def wait_until_idle(server: RunServer) -> None:
    deadline_s = server.loop.time() + SETTLE_S
    while server.loop.time() < deadline_s and not server.world.problems:
        await asyncio.sleep(3)
        await server.up.wait()
        if server.workspace is not None and not server.workspace.runs.live():
            return


async def start_once_more(server: RunServer) -> None:
    """Check that a start on a settled store publishes nothing."""
    before = server.last_seq()
    server.outage_s = 1.0
    server.kill()
    await asyncio.sleep(1)
    await server.up.wait()
    await asyncio.sleep(5)
    assert server.last_seq() == before, "a start on a settled store published something"


@contract("INV-29", "INV-32", "INV-34", "INV-35", "INV-36", "INV-37", "INV-39", "INV-40", "INV-41")
@contract("INV-42", "INV-43", "INV-44", "INV-47", "INV-48", "INV-49", "INV-50", "INV-53", "INV-56")
@contract("INV-57", "INV-58", "INV-82", "EXC-1", "EXC-3", "EXC-8", "EXC-9", "EXC-10", "EXC-11")
@contract("EXC-12", "EXC-16", "EXC-18", "EXC-20", "EXC-25")
@pytest.mark.parametrize("first", range(0, SEEDS_MAX, BATCH))
def test_every_run_ends_once_with_a_consistent_record(first: int) -> None:
    for seed in range(first, min(first + BATCH, SEEDS_MAX)):
        simulate(seed, one_world)
