"""Which server a command talks to, and what it says if it cannot."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar, cast

from msgspec import MsgspecError

from culm.cli.server_target import ServerTarget
from culm.client.connection import no_server, open_connected
from culm.client.http import Client, RequestRefused, open_client
from culm.client.launch import find_token, is_answered
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, NoServer

T = TypeVar("T")


def visit(where: ServerTarget, do: Callable[[RemoteWorkspace], Awaitable[T]]) -> T:
    """Do something in the workspace; its server is started if need be. Raises `AppError`."""

    async def run() -> T:
        async with open_connected(where.starter(), where.token_file) as client:
            workspace = await client.open_workspace(where.directory)
            try:
                return await do(workspace)
            finally:
                await client.leave()

    return run_described(run(), where.server.url)


def read_workspace(
    where: ServerTarget, do: Callable[[RemoteWorkspace], Awaitable[T]], none: T
) -> T:
    """Look into the workspace; `none` if no server has it open. Raises `AppError`.

    It is not joined, and no server is started: where there is none, nothing is going on.
    """

    async def find(client: Client) -> T:
        workspace = await client.find_workspace(where.directory)
        return none if workspace is None else await do(workspace)

    return read_server(where, find, none)


def read_server(where: ServerTarget, do: Callable[[Client], Awaitable[T]], none: T) -> T:
    """As `look`, at all that a server has; `none` if there is no server. Raises `AppError`."""
    if where.server.can_start and not is_answered(where.server.url):
        return none

    async def run() -> T:
        token = find_token(where.server, where.token_file, os.environ)
        async with open_client(where.server.url, token=token) as client:
            return await do(client)

    return run_described(run(), where.server.url)


def run_described(doing: Coroutine[None, None, T], url: str) -> T:
    """Run to the end; what a server or a connection says against it becomes an `AppError`."""
    try:
        return asyncio.run(doing)
    except (RequestRefused, OSError, MsgspecError, ExceptionGroup) as exc:
        raise describe_error(exc, url) from exc


def first_of(exc: Exception) -> Exception:
    """What went wrong first, of several things."""
    while isinstance(exc, ExceptionGroup):
        exc = cast("ExceptionGroup[Exception]", exc).exceptions[0]  # Python does not say of what.
    return exc


def describe_error(exc: Exception, url: str) -> Exception:
    """What to say of what went wrong."""
    exc = first_of(exc)
    if isinstance(exc, RequestRefused) and exc.status != 401:
        return Failed(exc.message, hint=exc.hint)
    if isinstance(exc, MsgspecError):
        return NoServer(f"what answers at {url} does not speak as culm does: {exc}")
    return no_server(url, exc) if isinstance(exc, RequestRefused | OSError) else exc
