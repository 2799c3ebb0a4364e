"""Connect to the user's own server, and start it if it is not running."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from culm import __version__
from culm.client.http import Client, RequestRefused, open_client
from culm.client.launch import (
    ServerRequest,
    ServerStarter,
    compare_version,
    find_token,
    is_compatible,
    is_listening,
)
from culm.errors import AppError, NoServer
from culm.settings import default_host

LEAVE_TRIES = 500  # An idle server exits within a second after the request.
LEAVE_AGAIN_S = 0.02


@asynccontextmanager
async def connect(
    host: str = "",
    *,
    token_file: Path | None = None,
    data_dir: Path | None = None,
    config_file: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncGenerator[Client]:
    """Find the user's server or start it, and yield a client of it.

    `host` is `unix:///path`, `tcp://host:port` or `https://host:port`; the default is `CULM_HOST`
    of the environment, or else the user's own socket. Only a server on a unix socket is started,
    with `data_dir` and `config_file`. An older server is replaced if it is idle, and used as it is
    if it is busy. `env` is the environment in which workspaces are opened, by default that of this
    process. Raises `NoServer` with a hint, and `InvalidRequest` if `host` is not an address.
    """
    environ = os.environ if env is None else env
    url = host or environ.get("CULM_HOST") or default_host(environ)
    starter = ServerStarter(ServerRequest(url, data_dir, config_file), environ)
    async with open_connected(starter, token_file) as client:
        yield client


@asynccontextmanager
async def open_connected(
    starter: ServerStarter, token_file: Path | None = None
) -> AsyncGenerator[Client]:
    """Connect as `connect` does, with a starter that may already have started the server."""
    await starter.ensure()
    token = find_token(starter.wanted, token_file, starter.env)
    async with open_client(starter.wanted.url, token=token, starter=starter) as client:
        await _check_version(client, starter)
        yield client


async def _check_version(client: Client, starter: ServerStarter) -> None:
    """Replace an older server if it is idle; raise `NoServer` if it is not compatible."""
    url = starter.wanted.url
    version = await _get_version(client, starter)
    if compare_version(version) == "older" and starter.wanted.can_start:
        with suppress(RequestRefused, OSError):  # It is busy, or another client has replaced it.
            await client.shut_down(version)
            await _wait_until_gone(url)
        await starter.ensure()
        version = await _get_version(client, starter)
    if is_compatible(version):
        return
    message = f"the server at {url} is culm {version}, this is culm {__version__}"
    if compare_version(version) == "older":
        raise NoServer(
            message, hint="it is busy: stop it when its work is done, or choose another with --host"
        )
    raise NoServer(message, hint="upgrade this culm, or choose another server with --host")


async def _get_version(client: Client, starter: ServerStarter) -> str:
    url = starter.wanted.url
    try:
        try:
            return (await client.version()).version
        except OSError:  # The server was just exiting.
            await starter.ensure()
            return (await client.version()).version
    except RequestRefused as exc:
        raise no_server_error(url, exc) from exc
    except OSError as exc:
        raise no_server_error(url, exc) from exc
    except msgspec.MsgspecError as exc:
        raise NoServer(f"{url} is not a culm server") from exc


async def _wait_until_gone(url: str) -> None:
    for _ in range(LEAVE_TRIES):
        if not is_listening(url):
            break
        await asyncio.sleep(LEAVE_AGAIN_S)


def no_server_error(url: str, exc: RequestRefused | OSError) -> AppError:
    """The error to report when a server refuses or cannot be reached."""
    if isinstance(exc, RequestRefused):
        needs_token = exc.status == 401
        hint = "pass the token file of that server with --token-file" if needs_token else exc.hint
        return NoServer(f"the server at {url} refused the request: {exc.message}", hint=hint)
    reason = str(exc) or type(exc).__name__
    serve = "culm serve" if url.startswith("unix://") else f"culm serve --host {url}"
    return NoServer(f"cannot reach the server at {url}: {reason}", hint=f"start one with `{serve}`")
