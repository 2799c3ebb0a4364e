"""The blocking client: a wait on its event loop ends when the loop does."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from culm.client.blocking import Portal, PortalClosed, open_portal
from tests.support import WAIT_S


async def _wait_forever() -> None:
    await asyncio.Event().wait()


def test_wait_in_another_thread_raises_when_the_portal_closes() -> None:
    @asynccontextmanager
    async def opening() -> AsyncGenerator[None]:
        yield

    error: Future[BaseException | None] = Future()
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await _wait_forever()

    def ask(portal: Portal) -> None:
        try:
            portal.wait(wait())
        except BaseException as exc:
            error.set_result(exc)

    with open_portal(opening()) as (portal, _):
        threading.Thread(target=ask, args=(portal,), daemon=True).start()
        assert begun.wait(WAIT_S)
    assert isinstance(error.result(WAIT_S), PortalClosed)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_wait_on_a_stopped_loop_raises_portal_closed() -> None:
    loop = asyncio.new_event_loop()
    portal = Portal(loop)
    try:
        before = portal.start(_wait_forever())
        portal.end()
        with pytest.raises(PortalClosed):
            portal.result(before)
        with pytest.raises(PortalClosed):
            portal.wait(_wait_forever())
    finally:
        loop.close()
