"""Responses in JSON, and errors as such responses with their status."""

import errno
import logging

from aiohttp.web_protocol import RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse

from culm.errors import (
    AppError,
    Denied,
    InvalidRequest,
    NoDescriptors,
    Unauthenticated,
    first_cause,
)
from culm.wire.codec import encode
from culm.wire.workspaces import Problem

log = logging.getLogger(__name__)


class RouteNotFound(Exception):
    """No route has this path. The response is plain text, as in Crush."""


class MethodNotAllowed(Exception):
    def __init__(self, allowed: list[str]) -> None:
        super().__init__()
        self.allowed = allowed


def answer_to(exc: Exception, request: BaseRequest) -> StreamResponse:
    """The response to a failed request; raises the exception again if no response is possible."""
    if isinstance(exc, ConnectionError):
        raise exc  # The client has disconnected.
    if request.writer.output_size:
        log.error("%s %s failed while responding", request.method, request.path, exc_info=exc)
        raise exc  # A second response would be read as part of the first. Close the connection.
    exc = first_cause(exc)
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
        exc = NoDescriptors()
    match exc:
        case AppError():
            return problem(exc)
        case RouteNotFound():
            return Response(status=404, text="404 page not found\n")
        case MethodNotAllowed():
            allow = {"Allow": ", ".join(exc.allowed)}
            return Response(status=405, text="Method Not Allowed\n", headers=allow)
        case RequestPayloadError():
            return problem(InvalidRequest("the body is not valid HTTP/1.1"))
        case _:
            log.error("%s %s failed", request.method, request.path, exc_info=exc)
            return answer(Problem("internal server error", "internal"), status=500)


def problem(exc: AppError) -> Response:
    if exc.status in (500, 503):  # Not 501, which only means that a feature does not exist.
        log.error("%s: %s", exc.code, exc.message)
    response = answer(Problem(exc.message, exc.code, exc.hint), status=exc.status)
    if isinstance(exc, Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(exc, Unauthenticated | Denied):
        response.force_close()  # A client that is not authenticated may not keep a connection.
    return response


def answer(value: object, *, status: int = 200) -> Response:
    return Response(body=encode(value) + b"\n", status=status, content_type="application/json")
