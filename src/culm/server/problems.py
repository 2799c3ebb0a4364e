"""Errors as JSON responses with their status; also reading of bodies and queries."""

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from culm.errors import AppError, Denied, InvalidRequest, TooLarge, TooSlow, Unauthenticated
from culm.wire.codec import encode
from culm.wire.workspaces import Problem

log = logging.getLogger(__name__)
T = TypeVar("T")

BODY_BYTES_MAX = 1 << 20
BODY_S = 60.0  # The time for a whole body, including attachments over a slow connection.
ATTACHMENT_BYTES_MAX = 64 << 20  # For the two routes that carry attachments and files.


class RouteNotFound(Exception):
    """No route has this path. The response is plain text, as in Crush."""


class MethodNotAllowed(Exception):
    def __init__(self, allowed: list[str]) -> None:
        super().__init__()
        self.allowed = allowed


def answer_to(exc: Exception, request: web.BaseRequest) -> web.StreamResponse:
    """The response to a failed request; raises the exception again if no response is possible."""
    if isinstance(exc, ConnectionError):
        raise exc  # The client has disconnected.
    if request.writer.output_size:
        log.error("%s %s failed while responding", request.method, request.path, exc_info=exc)
        raise exc  # A second response would be read as part of the first. Close the connection.
    match exc:
        case AppError():
            return problem(exc)
        case RouteNotFound():
            return web.Response(status=404, text="404 page not found\n")
        case MethodNotAllowed():
            allow = {"Allow": ", ".join(exc.allowed)}
            return web.Response(status=405, text="Method Not Allowed\n", headers=allow)
        case web.RequestPayloadError():
            return problem(InvalidRequest("the body is not valid HTTP/1.1"))
        case _:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            return answer(Problem("internal server error", "internal"), status=500)


def problem(exc: AppError) -> web.Response:
    if exc.status in (500, 503):  # Not 501, which only means that a feature does not exist.
        log.error("%s: %s", exc.code, exc.message)
    response = answer(Problem(exc.message, exc.code, exc.hint), status=exc.status)
    if isinstance(exc, Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exc, Unauthenticated | Denied):
        response.force_close()  # A client that is not authenticated may not keep a connection.
    return response


def answer(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(value) + b"\n", status=status, content_type="application/json")


def done(*, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An empty success response. The default is 200: Crush clients treat 201 and 204 as errors."""
    return web.Response(status=status, headers=headers)


async def read_body(request: web.BaseRequest, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    if (request.content_length or 0) > bytes_max:
        raise TooLarge(f"the body may have at most {bytes_max} bytes")
    expects = request.headers.get("Expect", "").lower() == "100-continue"
    if expects and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # The response itself has not started.
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > bytes_max:
                    raise TooLarge(f"the body may have at most {bytes_max} bytes")
    except TimeoutError as exc:
        raise TooSlow(BODY_S) from exc
    return bytes(body)


def parse_query(request: web.BaseRequest, kind: type[T]) -> T:
    """Parse the query into its type. The first value of a repeated name counts, as in Go."""
    query = request.query
    try:
        return msgspec.convert({name: query[name] for name in query}, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"query: {exc}") from exc
