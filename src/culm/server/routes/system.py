"""The server itself: is it there, what is it, may it leave; and clients that leave it."""

import platform
import sys

from culm import __version__
from culm.errors import InvalidRequest, ServerInUse
from culm.ids import find_client_id
from culm.server.api import Route
from culm.wire.workspaces import Control, VersionInfo
from culm.workspace.registry import Registry

SERVER_NAME = "culm"


async def health() -> None:
    """Say that the server is there."""


async def version() -> VersionInfo:
    """Say what the server is."""
    return VersionInfo(
        version=__version__,
        commit="",
        build_id=f"culm-{__version__}",
        go_version=f"python{platform.python_version()}",
        platform=f"{sys.platform}/{platform.machine()}",
    )


async def config() -> dict[str, str]:
    """Nothing: configuration belongs to a workspace."""
    return {}


async def control(registry: Registry, body: Control) -> None:
    """Ask the server to leave; refused while it hosts a workspace."""
    if body.command not in ("shutdown", "shutdown_if_idle"):
        raise InvalidRequest("unknown command")
    if body.server != SERVER_NAME:
        # A Crush client asks any server of another version to leave, and takes its socket.
        raise ServerInUse
    if body.version not in ("", __version__):
        raise ServerInUse
    registry.request_leave()


async def retire_client(registry: Registry, client_id: str) -> None:
    """Give up every claim of a client, for good."""
    found = find_client_id(client_id)
    if found is None:
        raise InvalidRequest("invalid client_id")
    registry.retire(found)


ROUTES = [
    Route("GET", "/v1/health", health),
    Route("GET", "/v1/version", version),
    Route("GET", "/v1/config", config),
    Route("POST", "/v1/control", control),
    Route("DELETE", "/v1/clients/{client_id}", retire_client),
]
