"""The way of a request to its response: authentication, the table of routes, the handler.

A handler is a function with any of the parameters `request`, `registry`, `workspace`, `query`,
`body`, and the names in its path. Its annotations are the contract: query and body are parsed into
their types before it runs, its result is encoded (None is an empty response), and the OpenAPI
document is generated from them.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any, TypeVar, get_type_hints
from urllib.parse import unquote

import msgspec
from aiohttp import HttpVersion11
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from msgspec import Struct, field

from culm.errors import InvalidRequest, TooLarge, TooSlow
from culm.server.auth import RequestAuth
from culm.server.connection import HttpConnection
from culm.server.problems import MethodNotAllowed, RouteNotFound, answer, answer_to
from culm.wire.codec import parse_body
from culm.workspace.registry import Registry

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]

WORKSPACE = "/v1/workspaces/{workspace_id}"  # The path of a workspace; most paths start with it.
BODY_BYTES_MAX = 1 << 20
BODY_S = 60.0  # The time for a whole body, including attachments over a slow connection.
ATTACHMENT_BYTES_MAX = 64 << 20  # For the two routes that carry attachments and files.


class Route(Struct, frozen=True):
    method: str
    path: str
    handler: Handler
    status: int = 200  # Crush clients treat 201 and 204 as errors.
    body_bytes_max: int = BODY_BYTES_MAX

    def hints(self) -> dict[str, Any]:
        """The annotations of the handler by parameter name, and its `return` type."""
        return _hints_of(self.handler)


@cache  # Resolving is slow, and all servers of a process have the same handlers.
def _hints_of(handler: Callable[..., Awaitable[object]]) -> dict[str, Any]:
    return get_type_hints(handler)


class HeadersOnly(dict[str, str]):
    """A response without a body, with these headers."""


def is_response(kind: object) -> bool:
    """Return True if a handler with this return type builds the whole response itself."""
    return isinstance(kind, type) and issubclass(kind, StreamResponse)


Endpoint = Callable[[BaseRequest, dict[str, str]], Awaitable[StreamResponse]]


def bind(route: Route, registry: Registry) -> Endpoint:
    """Wrap a handler in the parsing of its parameters and the encoding of its result."""
    hints = route.hints()
    query, body = hints.get("query"), hints.get("body")
    # A body that may be None is optional.
    optional = body is not None and type(None) in getattr(body, "__args__", ())
    by_path = hints.keys() & set(re.findall(r"{(\w+)}", route.path))
    responds = is_response(hints["return"])

    async def endpoint(request: BaseRequest, path: dict[str, str]) -> StreamResponse:
        # Clients rely on the order in which errors are found: query, body, workspace, operation.
        arguments: dict[str, object] = {}
        for name in by_path:
            arguments[name] = path[name]
        if query is not None:
            arguments["query"] = parse_query(request, query)
        if body is not None:
            data = await read_body(request, route.body_bytes_max)
            arguments["body"] = None if optional and not data else parse_body(data, body)
        if "workspace" in hints:
            arguments["workspace"] = registry.get(path["workspace_id"])
        if "registry" in hints:
            arguments["registry"] = registry
        if "request" in hints:
            arguments["request"] = request
        value = await route.handler(**arguments)
        if responds:
            return value
        if value is None or isinstance(value, HeadersOnly):
            return Response(status=route.status, headers=value)
        return answer(value, status=route.status)

    return endpoint


async def read_body(request: BaseRequest, bytes_max: int) -> bytes:
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


def parse_query(request: BaseRequest, kind: type[T]) -> T:
    """Parse the query into its type. The first value of a repeated name counts, as in Go."""
    query = request.query
    try:
        return msgspec.convert({name: query[name] for name in query}, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"query: {exc}") from exc


class _Node(Struct):
    """One step of a path, with the next steps: literal ones, or else a parameter."""

    literals: dict[str, "_Node"] = field(default_factory=dict[str, "_Node"])
    parameter: "_Node | None" = None
    names: tuple[str, ...] = ()
    methods: dict[str, Endpoint] = field(default_factory=dict[str, Endpoint])


class Api:
    """The handler of every request to a server.

    It finds a route by walking the path; aiohttp's own table tries pattern after pattern.
    """

    def __init__(self, registry: Registry, auth: RequestAuth, routes: Iterable[Route]) -> None:
        self._auth = auth
        self._root = _Node()
        for route in routes:
            self._add(route, bind(route, registry))

    def _add(self, route: Route, endpoint: Endpoint) -> None:
        node = self._root
        names: list[str] = []
        for step in route.path.split("/"):
            if step.startswith("{"):
                names.append(step.strip("{}"))
                node.parameter = node.parameter or _Node()
                node = node.parameter
            else:
                node = node.literals.setdefault(step, _Node())
        assert route.method not in node.methods, f"two handlers for {route.method} {route.path}"
        node.names = tuple(names)
        node.methods[route.method] = endpoint
        if route.method == "GET":
            node.methods["HEAD"] = endpoint

    async def handle(self, request: BaseRequest) -> StreamResponse:
        try:
            connection = request.protocol
            assert isinstance(connection, HttpConnection), "created by Connections"
            connection.check_head(request)
            if connection.is_unix:
                self._auth.check_unix(connection.peer_uid)
            else:
                self._auth.check_tcp(request.headers)
            endpoint, path = self._find(request.method, request.rel_url.raw_path)
            return await endpoint(request, path)
        except Exception as exc:  # boundary: a bug in one request is a 500 and not a crash
            return answer_to(exc, request)

    def _find(self, method: str, raw_path: str) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint and its path parameters; raises `RouteNotFound`, `MethodNotAllowed`."""
        node: _Node | None = self._root
        values: list[str] = []
        for step in raw_path.split("/"):
            if (literal := node.literals.get(step)) is not None:
                node = literal
            elif step and node.parameter is not None:
                node = node.parameter
                values.append(unquote(step) if "%" in step else step)
            else:
                raise RouteNotFound
        if not node.methods:
            raise RouteNotFound
        endpoint = node.methods.get(method)
        if endpoint is None:
            raise MethodNotAllowed(sorted(node.methods))
        return endpoint, dict(zip(node.names, values, strict=True))
