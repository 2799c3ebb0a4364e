"""A client of the user's own server, which is started if it is not there."""

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
    age_of,
    find_token,
    is_answered,
    is_understood,
)
from culm.errors import AppError, NoServer
from culm.settings import default_host

LEAVE_TRIES = 500  # A server that hosts nothing is gone within a second of being asked to.
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
    """Find the user's server or start it, and be its client while in the block.

    `host` is `unix:///path`, `tcp://host:port` or `https://host:port`; without one it is that of
    the environment, or the user's own socket. Only a server on a unix socket is started, with
    `data_dir` and `config_file`. An older one that hosts nothing is replaced; one that is busy is
    used as it is. `env`, which is that of this process unless given, is what workspaces are opened
    with. Raises `NoServer`, which says what to do, and `InvalidRequest` for what is no address.
    """
    around = os.environ if env is None else env
    url = host or around.get("CULM_HOST") or default_host(around)
    starter = ServerStarter(ServerRequest(url, data_dir, config_file), around)
    async with open_connected(starter, token_file) as client:
        yield client


@asynccontextmanager
async def open_connected(
    starter: ServerStarter, token_file: Path | None = None
) -> AsyncGenerator[Client]:
    """As `connect`, with a start that may have begun."""
    await starter.ensure()
    token = find_token(starter.wanted, token_file, starter.env)
    async with open_client(starter.wanted.url, token=token, starter=starter) as client:
        await _agree(client, starter)
        yield client


async def _agree(client: Client, starter: ServerStarter) -> None:
    """Make sure that the server speaks as we do."""
    url = starter.wanted.url
    version = await _version(client, starter)
    if age_of(version) == "older" and starter.wanted.can_start:
        with suppress(RequestRefused, OSError):  # It is busy; or somebody has replaced it already.
            await client.shut_down(version)
            await _until_gone(url)
        await starter.ensure()
        version = await _version(client, starter)
    if is_understood(version):
        return
    said = f"the server at {url} is culm {version}, this is culm {__version__}"
    if age_of(version) == "older":
        raise NoServer(said, hint="it is busy: stop it when its work is done, or give --host")
    raise NoServer(said, hint="upgrade this culm, or choose another server with --host")


async def _version(client: Client, starter: ServerStarter) -> str:
    url = starter.wanted.url
    try:
        try:
            return (await client.version()).version
        except OSError:  # It was just leaving.
            await starter.ensure()
            return (await client.version()).version
    except RequestRefused as exc:
        raise no_server(url, exc) from exc
    except OSError as exc:
        raise no_server(url, exc) from exc
    except msgspec.MsgspecError as exc:
        raise NoServer(f"what answers at {url} is no culm server") from exc


async def _until_gone(url: str) -> None:
    for _ in range(LEAVE_TRIES):
        if not is_answered(url):
            break
        await asyncio.sleep(LEAVE_AGAIN_S)


def no_server(url: str, exc: RequestRefused | OSError) -> AppError:
    """What to say when there is no server to talk to."""
    if isinstance(exc, RequestRefused):
        needs_token = exc.status == 401
        hint = "--token-file must name the token file of that server" if needs_token else exc.hint
        return NoServer(f"the server at {url} refuses: {exc.message}", hint=hint)
    reason = str(exc) or type(exc).__name__
    serve = "culm serve" if url.startswith("unix://") else f"culm serve --host {url}"
    return NoServer(f"cannot reach the server at {url}: {reason}", hint=f"`{serve}` starts one")
