"""Serving loops of a worker: one connection, one after the other, or many at once."""

import asyncio
import logging
from typing import assert_never

from culm.clock import Clock, time_limit
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
    listener: LinkListener, executor: Executor, mode: Mode, settings: ServingSettings
) -> None:
    """Serve connections until the mode ends; raises `ConnectTimeout`."""
    match mode:
        case ServeOnce(accept_s=accept_s):
            try:
                link = await _accept(listener, settings.clock, accept_s)
            except TimeoutError as exc:
                raise ConnectTimeout(f"no host connected within {accept_s:g} s") from exc
            await _serve(link, executor, settings)
        case ServeInTurn(idle_s=idle_s):
            while True:
                try:
                    link = await _accept(listener, settings.clock, idle_s)
                except TimeoutError:
                    return
                await _serve(link, executor, settings)
        case ServeMany(connections_max=connections_max):
            await _serve_many(listener, executor, settings, connections_max)
        case _:
            assert_never(mode)


async def _serve_many(
    listener: LinkListener, executor: Executor, settings: ServingSettings, connections_max: int
) -> None:
    slots = asyncio.Semaphore(connections_max)

    async def serve(link: Link) -> None:
        try:
            await _serve(link, executor, settings)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        while True:
            await slots.acquire()
            group.create_task(serve(await listener.accept()), name="fleet connection")


async def _serve(link: Link, executor: Executor, settings: ServingSettings) -> None:
    try:
        await serve_connection(link, executor, settings)
    except Exception:  # boundary: a failure ends only this connection
        log.exception("a connection failed")


async def _accept(listener: LinkListener, clock: Clock, within_s: float | None) -> Link:
    """Raises TimeoutError."""
    if within_s is None:
        return await listener.accept()
    async with time_limit(clock, within_s):
        return await listener.accept()
