"""Agents under many seeds: a server, its workers, mailboxes and clients, with all their faults.

No letter is lost or admitted twice, no ask is approved without a person, no budget is exceeded by
more than one call per worker, every cost is counted once, and a cancelled tree is empty.
"""

import asyncio
import contextlib
import gc

import pytest

from culm.ids import Ids
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.sim.tree_actors import Client, answer_all, trouble
from tests.sim.tree_checks import check_always, check_tree
from tests.sim.tree_server import TreeServer
from tests.sim.tree_world import TreeWorld
from tests.support import contract

TREES = max(1, SEEDS_MAX // 4)  # They are large.
BATCH = 5
CLIENTS = 3
OPERATIONS = 10  # Per client.
SESSIONS = 2
SETTLE_S = 5_000.0
LEAVE_S = 100.0
# A killed server still has workers to end when it is disposed of.
NO_WARNING = pytest.mark.filterwarnings(
    "ignore:coroutine 'WorkerRoster._end' was never:RuntimeWarning"
)


async def one_world(loop: SimLoop) -> TreeWorld:
    world = TreeWorld(loop)
    failure: Exception | None = None
    with contextlib.closing(world):
        async with world.tasks:
            try:
                await live_through(world)
            except Exception as exc:  # boundary: first the remaining processes are disposed of
                failure = exc
            await dispose(world)
    if failure is not None:
        raise failure
    return world


async def dispose(world: TreeWorld) -> None:
    """Unwind the remaining tasks of all processes; some need several cancels."""
    for process in world.processes:
        process.end()
    while any(not task.done() for process in world.processes for task in process.tasks):
        for process in world.processes:
            process.dispose()
        await asyncio.sleep(1)


async def live_through(world: TreeWorld) -> None:
    server = TreeServer(world)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(server.run()), tasks.create_task(check_always(world))]
        for _ in range(SESSIONS):
            await begin(server)
        faults = tasks.create_task(trouble(server))
        if not world.faulty:
            faults.cancel()
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(Client(server, OPERATIONS).run())
        faults.cancel()
        background.append(tasks.create_task(answer_all(server)))
        await wait_until_settled(server)
        for task in background:
            task.cancel()
    check_tree(server)
    await leave(server)


async def begin(server: TreeServer) -> None:
    async def serve(workspace: LiveWorkspace) -> None:
        session = await workspace.sessions.create("Untitled")
        workspace.lifetime.open_stream(Ids(server.world.number()).client(), interactive=True)
        server.world.sessions.append(session.id)

    await server.request(serve)


async def wait_until_settled(server: TreeServer) -> None:
    """Stop all faults and wait until every run ends."""
    world, file = server.world, server.world.file
    world.faulty = False
    file.is_full = file.is_busy = False
    file.die = None
    file.bad.clear()
    for process in world.processes:
        process.resume()
    deadline_s = world.loop.time() + SETTLE_S
    while not world.problems:
        live = (await server.until_up()).live_runs()
        if not live:
            await asyncio.sleep(LEAVE_S)
            if not server.life.live_runs():
                return
        if world.loop.time() > deadline_s:
            about = [(run.id, run.session_id, run.state, run.stop) for run in live]
            world.problems.append(f"it does not come to rest: {about}")
        await asyncio.sleep(10)


async def leave(server: TreeServer) -> None:
    """Stop the last server and check that no process is left."""
    server.life.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await server.life.process.gone.wait()
    assert not server.life.process.is_alive, "the server does not leave"
    left = [process.name for process in server.world.processes if process.is_alive]
    assert not left, f"processes are left: {left}"
    assert not server.world.problems, server.world.problems


@contract("FLEET-64", "FLEET-71", "FLEET-76", "FLEET-P8", "EXC-22")
@NO_WARNING
@pytest.mark.parametrize("first", range(0, TREES, BATCH))
def test_agent_tree_loses_nothing_and_is_empty_after_a_cancel(first: int) -> None:
    try:
        for seed in range(first, min(first + BATCH, TREES)):
            simulate(seed, one_world)
    finally:
        gc.collect()  # Collect killed servers now, so that their warnings do not reach other tests.


@NO_WARNING
def test_seed_reproduces_the_same_trace() -> None:
    try:
        worlds = [simulate(0, one_world) for _ in range(2)]
        assert worlds[0].trace == worlds[1].trace
    finally:
        gc.collect()
