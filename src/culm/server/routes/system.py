"""The server itself: health, version, shutdown, its OpenAPI document, and clients that leave."""

import platform
import sys

from aiohttp.web_response import Response

from culm import __version__
from culm.errors import InvalidRequest, ServerInUse
from culm.ids import find_client_id
from culm.server.api import Route
from culm.wire.codec import Json
from culm.wire.workspaces import Control, VersionInfo
from culm.workspace.registry import Registry

SERVER_NAME = "culm"


async def health() -> None:
    """Check that the server is running."""


async def version() -> VersionInfo:
    """Get the version of the server."""
    return VersionInfo(
        version=__version__,
        commit="",
        build_id=f"culm-{__version__}",
        go_version=f"python{platform.python_version()}",
        platform=f"{sys.platform}/{platform.machine()}",
    )


async def config() -> dict[str, str]:
    """Get an empty object. Configuration belongs to a workspace."""
    return {}


async def control(registry: Registry, body: Control) -> None:
    """Shut the server down. This is refused while it hosts a workspace."""
    if body.command not in ("shutdown", "shutdown_if_idle"):
        raise InvalidRequest("unknown command")
    if body.server != SERVER_NAME:
        # A Crush client shuts down any server of another version and takes over its socket.
        raise ServerInUse
    if body.version not in ("", __version__):
        raise ServerInUse
    registry.request_leave()


async def retire_client(registry: Registry, client_id: str) -> None:
    """Release every claim of a client permanently."""
    found = find_client_id(client_id)
    if found is None:
        raise InvalidRequest("invalid client_id")
    registry.retire(found)


# The next two import their modules on use: they are seldom called, and the server starts faster.


async def get_openapi() -> dict[str, Json]:
    """Get this document."""
    from culm.server.openapi import document

    return document()


async def get_page() -> Response:
    """Show this document as a self-contained HTML page."""
    from culm.server.openapi import CONTENT_POLICY, document, render_page

    headers = {"Content-Security-Policy": CONTENT_POLICY}
    return Response(text=render_page(document()), content_type="text/html", headers=headers)


ROUTES = [
    Route("GET", "/v1/health", health),
    Route("GET", "/v1/version", version),
    Route("GET", "/v1/config", config),
    Route("POST", "/v1/control", control),
    Route("DELETE", "/v1/clients/{client_id}", retire_client),
]
DOCUMENT_ROUTES = [
    Route("GET", "/v1/openapi.json", get_openapi),
    Route("GET", "/v1/docs", get_page),
]
