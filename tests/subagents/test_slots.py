"""Agent slots of a tree: limited, first come first served, and never lost."""

import asyncio
from random import Random

import pytest

from culm.subagents.tree import AgentSlots
from tests.support import WAIT_S


async def test_agents_over_the_limit_wait_in_order() -> None:
    slots, order = AgentSlots(2), list[int]()

    async def work(number: int) -> None:
        await slots.acquire()
        order.append(number)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(work(number))
        await asyncio.sleep(0)
        assert (order, slots.is_full) == ([0, 1], True)
        slots.release()
        slots.release()
    assert order == [0, 1, 2, 3]


async def test_reacquire_is_immediate_and_the_next_agent_waits_for_both() -> None:
    slots = AgentSlots(1)
    await slots.acquire()
    slots.release()  # It waits for its sub-agents, one of which takes the slot.
    await slots.acquire()
    slots.reacquire()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(slots.acquire())
        await asyncio.sleep(0)
        slots.release()
        await asyncio.sleep(0)
        assert not waiting.done()
        slots.release()


@pytest.mark.parametrize("seed", range(20))
async def test_slot_is_never_lost_on_cancel(seed: int) -> None:
    dice, slots, working = Random(seed), AgentSlots(3), set[int]()

    async def work(number: int) -> None:
        await slots.acquire()
        working.add(number)
        assert len(working) <= 3
        try:
            await asyncio.sleep(0)
        finally:
            working.discard(number)
            slots.release()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(work(number)) for number in range(20)]
        for _ in range(10):
            dice.choice(started).cancel()
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
    assert not slots.is_full
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await slots.acquire()
    assert slots.is_full
