"""Connect a command to its server, and describe the failure if that is not possible."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from msgspec import MsgspecError

from culm.cli.options import ServerTarget
from culm.client.connection import no_server_error, open_connected
from culm.client.http import Client, RequestRefused, open_client
from culm.client.launch import find_token, is_listening
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, NoServer, NotFound, first_cause
from culm.wire.codec import printable

T = TypeVar("T")


def visit(where: ServerTarget, do: Callable[[RemoteWorkspace], Awaitable[T]]) -> T:
    """Run `do` in the workspace, starting its server if needed. Raises `AppError`."""

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
    """Run `do` in the workspace; return `none` if no server has it open. Raises `AppError`.

    The workspace is not joined and no server is started: without a server nothing is active.
    """

    async def find(client: Client) -> T:
        workspace = await client.find_workspace(where.directory)
        return none if workspace is None else await do(workspace)

    return read_server(where, find, none)


def use_workspace(
    where: ServerTarget, do: Callable[[RemoteWorkspace], Awaitable[T]], wanted: str
) -> T:
    """Run `do` in the workspace; raises `NotFound` if no server has it open."""
    found = read_workspace(where, do, None)
    if found is None:
        hint = "choose another directory with --dir; `culm ps --all` lists all active runs"
        raise NotFound(f"no {wanted} in {printable(str(where.directory))}", hint=hint)
    return found


def read_server(where: ServerTarget, do: Callable[[Client], Awaitable[T]], none: T) -> T:
    """Run `do` with all that a server has; return `none` without a server. Raises `AppError`."""
    if where.server.can_start and not is_listening(where.server.url):
        return none

    async def run() -> T:
        token = find_token(where.server, where.token_file, os.environ)
        async with open_client(where.server.url, token=token) as client:
            return await do(client)

    return run_described(run(), where.server.url)


def run_described(work: Coroutine[None, None, T], url: str) -> T:
    """Run to the end; a refusal by the server or a failed connection becomes an `AppError`."""
    try:
        return asyncio.run(work)
    except (RequestRefused, OSError, MsgspecError, ExceptionGroup) as exc:
        raise describe_error(exc, url) from exc


def describe_error(exc: Exception, url: str) -> Exception:
    """The error to report for a failed request; of a group, the first one counts."""
    exc = first_cause(exc)
    if isinstance(exc, RequestRefused) and exc.status != 401:
        return Failed(exc.message, hint=exc.hint)
    if isinstance(exc, MsgspecError):
        return NoServer(f"{url} is not a culm server: {exc}")
    return no_server_error(url, exc) if isinstance(exc, RequestRefused | OSError) else exc
