"""Overdue asks are expired."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from culm.clock import LoopClock
from culm.ids import Ids, MessageId, RunId
from culm.permission.asks import PERMISSION_EVENTS, Asks
from culm.store.asks import list_asks, open_ask
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.wire.asks import Ask, PermissionRequest
from tests.support import WAIT_S, FakeClock

REQUEST = PermissionRequest("ask-1", "s", "call-1", "write", "", "write")


@asynccontextmanager
async def open_asks(clock: FakeClock) -> AsyncGenerator[Asks[PermissionRequest]]:
    file = MemoryFile()
    async with asyncio.timeout(WAIT_S), open_memory_store(file, LoopClock(), Ids()) as store:
        yield Asks(store, clock, PERMISSION_EVENTS, lambda _: None)
    file.close()


def make_ask(clock: FakeClock) -> Ask[PermissionRequest]:
    return Ask(REQUEST, RunId("r"), MessageId("m"), deadline=int(clock.now_s()) + 10)


async def state_of(asks: Asks[PermissionRequest]) -> str:
    (ask,) = await asks.store.read(list_asks(PermissionRequest, "", "", 2))
    return ask.state


@pytest.mark.parametrize("gives_up", [False, True])
async def test_overdue_ask_is_expired_even_if_the_asker_just_gave_up(*, gives_up: bool) -> None:
    clock = FakeClock()
    async with open_asks(clock) as asks, asyncio.TaskGroup() as tasks:
        putting = tasks.create_task(asks.put(make_ask(clock)))
        while not asks.all():
            await asyncio.sleep(0)
        if gives_up:
            putting.cancel()
            await asyncio.wait({putting})
        clock.advance(10)
        while await state_of(asks) == "open":
            await asyncio.sleep(0)
        assert await state_of(asks) == "expired"
        if not gives_up:
            assert (await putting)[1].state == "expired"


async def test_restored_ask_unanswered_in_time_is_expired_not_denied() -> None:
    clock = FakeClock()
    async with open_asks(clock) as asks:
        ask = make_ask(clock)
        await asks.store.write(open_ask(ask))
        asks.restore(ask)
        assert asks.find_refusal("m", "call-1") is None
        clock.advance(10)
        while asks.all():
            await asyncio.sleep(0)
        assert asks.find_refusal("m", "call-1") == "expired"
