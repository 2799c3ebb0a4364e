"""A loop in another thread: whoever waits for it hears of its end."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from culm.client.blocking import Portal, PortalClosed, open_portal
from tests.support import WAIT_S


async def _for_ever() -> None:
    await asyncio.Event().wait()


def test_who_waits_in_another_thread_when_the_block_ends_is_told() -> None:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[None]:
        yield

    said: Future[BaseException | None] = Future()
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await _for_ever()

    def ask(portal: Portal) -> None:
        try:
            portal.wait(wait())
        except BaseException as exc:
            said.set_result(exc)

    with open_portal(opening()) as (portal, _):
        threading.Thread(target=ask, args=(portal,), daemon=True).start()
        assert begun.wait(WAIT_S)
    assert isinstance(said.result(WAIT_S), PortalClosed)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_is_asked_of_a_loop_that_has_stopped_and_is_not_closed_yet_is_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    portal = Portal(loop)
    try:
        before = portal.start(_for_ever())
        portal.end()
        with pytest.raises(PortalClosed):
            portal.result(before)
        with pytest.raises(PortalClosed):
            portal.wait(_for_ever())
    finally:
        loop.close()
