"""The interface about itself: its OpenAPI document, and a page that shows it."""

from aiohttp import web

from culm.server.api import Route
from culm.wire.codec import Json

# What makes them is imported when they are asked for: seldom, and not by a server that starts.


async def get_openapi() -> dict[str, Json]:
    """Give this document."""
    from culm.server.openapi import document

    return document()


async def get_page() -> web.Response:
    """Show this document as a page that needs nothing from anywhere else."""
    from culm.server.openapi import document
    from culm.server.page import CONTENT_POLICY, render

    headers = {"Content-Security-Policy": CONTENT_POLICY}
    return web.Response(text=render(document()), content_type="text/html", headers=headers)


ROUTES = [
    Route("GET", "/v1/openapi.json", get_openapi),
    Route("GET", "/v1/docs", get_page),
]
