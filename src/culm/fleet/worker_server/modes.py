"""How long a worker serves, and how many at once: one, one after the other, many."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import assert_never

from culm.clock import Clock
from culm.fleet.executor import Executor
from culm.fleet.transport.base import Link, LinkListener
from culm.fleet.worker_server.base import (
    ConnectTimeout,
    Mode,
    ServeInTurn,
    ServeMany,
    ServeOnce,
    ServingSettings,
)
from culm.fleet.worker_server.connection import serve_connection

log = logging.getLogger(__name__)


async def serve_on(
    listener: LinkListener, executor: Executor, mode: Mode, terms: ServingSettings
) -> None:
    """Serve whoever connects, until the mode says that it is over; raises `NobodyCame`."""
    match mode:
        case ServeOnce(accept_s=accept_s):
            try:
                link = await _accept(listener, terms.clock, accept_s)
            except TimeoutError as exc:
                raise ConnectTimeout(f"nobody connected within {accept_s:g} s") from exc
            await _serve(link, executor, terms)
        case ServeInTurn(idle_s=idle_s):
            while True:
                try:
                    link = await _accept(listener, terms.clock, idle_s)
                except TimeoutError:
                    return
                await _serve(link, executor, terms)
        case ServeMany(connections_max=connections_max):
            await _serve_many(listener, executor, terms, connections_max)
        case _:
            assert_never(mode)


async def _serve_many(
    listener: LinkListener, executor: Executor, terms: ServingSettings, connections_max: int
) -> None:
    slots = asyncio.Semaphore(connections_max)

    async def serve(link: Link) -> None:
        try:
            await _serve(link, executor, terms)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await slots.acquire()
            group.create_task(serve(await listener.accept()), name="fleet connection")


async def _serve(link: Link, executor: Executor, terms: ServingSettings) -> None:
    try:
        await serve_connection(link, executor, terms)
    except Exception:  # boundary: what goes wrong on one connection ends that one only
        log.exception("a connection failed")


async def _accept(listener: LinkListener, clock: Clock, within_s: float | None) -> Link:
    """Raises TimeoutError."""
    if within_s is None:
        return await listener.accept()
    async with _timeout(clock, within_s):
        return await listener.accept()


@asynccontextmanager
async def _timeout(clock: Clock, delay_s: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, by that clock."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer = clock.call_later(delay_s, lambda: bound.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
