"""Every error becomes one JSON sentence with the right status; nothing else leaves the server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from culm.errors import AppError, InvalidRequest, TooLarge, TooSlow, Unauthenticated
from culm.ids import ClientId, find_client_id
from culm.wire.codec import encode, parse_body
from culm.wire.requests import Problem

log = logging.getLogger(__name__)
T = TypeVar("T")

BODY_BYTES_MAX = 1 << 20
BODY_S = 60.0  # A body is complete in this time, attachments over a slow line included.
NAMES_MAX = 256  # In one parameter of a query.
ATTACHMENT_BYTES_MAX = 64 << 20  # For the two routes that carry attachments and files.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as exc:  # boundary: one request's bug is a 500, never the server's end
        if request.writer.output_size:
            log.exception("%s %s failed in its answer", request.method, request.path)
            raise  # A second answer would be read as part of the first; the connection closes.
        return _answer_to(exc, request)


def _answer_to(exc: Exception, request: web.Request) -> web.Response:
    match exc:
        case AppError():
            return problem(exc)
        case web.HTTPNotFound():
            return web.Response(status=404, text="404 page not found\n")
        case web.HTTPMethodNotAllowed():
            allow = {"Allow": ", ".join(sorted(exc.allowed_methods))}
            return web.Response(status=405, text="Method Not Allowed\n", headers=allow)
        case web.HTTPException():
            return answer(Problem(exc.reason), status=exc.status)
        case ConnectionError():
            raise exc  # The client went away; there is nobody to answer.
        case _:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            return answer(Problem("internal server error", "internal"), status=500)


def problem(exc: AppError) -> web.Response:
    if exc.status >= 500:
        log.error("%s: %s", exc.code, exc.message)
    response = answer(Problem(exc.message, exc.code, exc.hint), status=exc.status)
    if isinstance(exc, Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def answer(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(value) + b"\n", status=status, content_type="application/json")


def done() -> web.Response:
    """Success with nothing to say: 200, as 201 and 204 are errors to a Crush client."""
    return web.Response()


async def read_body(request: web.Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    if (request.content_length or 0) > bytes_max:
        raise TooLarge(f"the body may have at most {bytes_max} bytes")
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


async def parse_request(request: web.Request, kind: type[T]) -> T:
    return parse_body(await read_body(request), kind)


def query_names(request: web.Request, parameter: str) -> frozenset[str]:
    """A comma-separated parameter; empty if it is not there."""
    names = frozenset(name for name in request.query.get(parameter, "").split(",") if name)
    if len(names) > NAMES_MAX:
        raise InvalidRequest(f"{parameter} may name at most {NAMES_MAX}")
    return names


def query_client_id(request: web.Request) -> ClientId:
    text = request.query.get("client_id", "")
    if not text:
        raise InvalidRequest("client_id is required")
    client_id = find_client_id(text)
    if client_id is None:
        raise InvalidRequest("client_id is not a valid UUID")
    return client_id
