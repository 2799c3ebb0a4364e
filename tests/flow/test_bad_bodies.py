"""Invalid bodies on every route that accepts one: 400 with the field, and no change."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from msgspec import inspect

from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids
from culm.server.api import ATTACHMENT_BYTES_MAX, BODY_BYTES_MAX, Route
from culm.server.routes import ROUTES
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN, Answer, connect, request_bytes, send
from tests.support import WAIT_S, contract

pytestmark = pytest.mark.sockets

Json = Any  # As on the wire.
DECODE = "failed to decode request"
WITH_BODY = [route for route in ROUTES if "body" in route.hints()]
ATTACHING = [route for route in WITH_BODY if route.body_bytes_max == ATTACHMENT_BYTES_MAX]


async def opened(flow: FlowServer) -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory())


def target(route: Route, workspace_id: str, client_id: str = UNKNOWN) -> str:
    """The path of a route with valid parameters."""
    path = route.path.replace("{workspace_id}", workspace_id).replace("{session_id}", "s")
    path = path.replace("{run_id}", UNKNOWN)
    return f"{path}?client_id={client_id}" if "query" in route.hints() else path


def message(answer: Answer) -> str:
    assert answer.headers["content-type"] == "application/json"
    found = cast("dict[str, str]", answer.json())
    return found["message"]


def body_type(route: Route) -> inspect.StructType:
    kind = inspect.type_info(route.hints()["body"])
    if isinstance(kind, inspect.UnionType):
        (kind,) = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
    assert isinstance(kind, inspect.StructType)
    return kind


def is_optional(route: Route) -> bool:
    return isinstance(inspect.type_info(route.hints()["body"]), inspect.UnionType)


class RawConnection:
    """A kept-alive connection for several requests. Created by `open_raw_connection`."""

    def __init__(
        self, flow: FlowServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._flow = flow

    async def ask(
        self,
        method: str,
        where: str,
        body: bytes = b"",
        headers: Mapping[str, str | None] | None = None,
    ) -> Answer:
        self.writer.write(request_bytes(self._flow, method, where, headers or {}, body))
        return await self.answer(method)

    async def answer(self, method: str = "GET") -> Answer:
        """Read the next answer by its length; `send` reads until the close instead."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            pairs = [line.partition(":") for line in lines]
            fields = {name.lower(): value.strip() for name, _, value in pairs}
            length = 0 if method == "HEAD" else int(fields.get("content-length", 0))
            body = await self.reader.readexactly(length)
        return Answer(int(first.split(" ")[1]), fields, body)

    async def end(self) -> bytes:
        """Read everything until the server closes the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def open_raw_connection(flow: FlowServer) -> AsyncGenerator[RawConnection]:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
    try:
        yield RawConnection(flow, reader, writer)
    finally:
        writer.transport.abort()


# --- invalid values by type, and the field that the answer must name

WRONG_INTEGERS = ["1.0", "1e3", "-0.0", "1E0", str(1 << 63), str(-(1 << 63) - 1), "9" * 400, '"1"']
WRONG_VALUES: dict[type[inspect.Type], list[str]] = {
    inspect.StrType: ["1", "true", "[]", "{}"],
    inspect.LiteralType: ['"no such word"', "1", "[]"],
    inspect.BoolType: ["1", "0", '"true"', "[]"],
    inspect.IntType: [*WRONG_INTEGERS, "true", "[]"],
    inspect.FloatType: ['"1"', "true", "1e999"],
    inspect.BytesType: ['"*"', '"aGVsbG8"', '"aGVsbG8=="', "1", "[]"],
    inspect.ListType: ["{}", '"x"', "1"],
    inspect.DictType: ["[]", '"x"', "1"],
    inspect.StructType: ["[]", '"x"', "1", "true"],
}


def wrong(kind: inspect.Type, around: str, where: str) -> Generator[tuple[str, str]]:
    """Bodies with one wrong value (`around` marks its position with %s), and its field."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from wrong(inner, around, where)
        case inspect.UnionType(types=types):
            no_value = (inspect.NoneType, inspect.CustomType)
            for inner in types:
                if not isinstance(inner, no_value) and type(inner) in WRONG_VALUES:
                    yield from wrong(inner, around, where)
        case inspect.AnyType():
            yield around % "1e999", where  # Out of range; everything else is accepted.
            yield around % '[{"x": -1e999}]', where
        case _:
            for value in WRONG_VALUES[type(kind)]:
                yield around % value, where
    match kind:
        case inspect.StructType(fields=fields):
            for f in fields:
                inside = around % f'{{"{f.encode_name}": %s}}'
                yield from wrong(f.type, inside, f.encode_name)
        case inspect.ListType(item_type=item):
            yield from wrong(item, around % "[%s]", where)
        case inspect.DictType(value_type=value):
            yield from wrong(value, around % '{"x": %s}', where)
        case _:
            pass


def zeros(kind: inspect.StructType) -> dict[str, Json]:
    """Every field with its zero value, by wire name."""
    found = cast("dict[str, Json]", msgspec.to_builtins(kind.cls()))
    return {f.encode_name: found.get(f.encode_name) for f in kind.fields}


# --- state before and after

SHOWN = ("/snapshot?sessions=*", "/config", "/permissions/skip", "")


async def shown(flow: FlowServer, remote: RemoteWorkspace) -> list[bytes]:
    """Everything that an invalid body could have changed."""
    answers = [await send(flow, "GET", remote.path(rest)) for rest in SHOWN]
    answers.append(await send(flow, "GET", "/v1/workspaces"))
    assert {answer.status for answer in answers} == {200}
    assert not flow.left.is_set()
    return [answer.body for answer in answers]


async def not_refused(
    flow: FlowServer, remote: RemoteWorkspace, route: Route, bodies: list[tuple[bytes, str]]
) -> list[tuple[str, bytes, str, bytes]]:
    """The bodies that are not answered by 400 with the position or field of the error."""
    found: list[tuple[str, bytes, str, bytes]] = []
    where = target(route, remote.id, remote.client.id)
    async with open_raw_connection(flow) as connection:
        for body, expected in bodies:
            answer = await connection.ask(route.method, where, body)
            if answer.status != 400 or not re.match(f"{DECODE}.*{expected}", message(answer)):
                found.append((route.path, body, expected, answer.body))
    return found


@contract("EXC-24")
async def test_invalid_json_is_400_with_its_position_on_every_route(
    flow: FlowServer,
) -> None:
    bodies = [
        (b"{", "character"),
        (b'{"a": 1,}', "character"),
        (b"nonsense", "character 0"),
        (b"  \n", "character"),
        (b"{'a': 1}", "character 1"),
        (b"\x00", "character 0"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "byte 7"),
        (b'{"\xc3\x28": 1}', "byte 2"),
        (b"\xff\xfe{\x00}\x00", "byte 0"),
        (b"[" * 100_000, "nested"),
        (b"", "empty"),
    ]
    remote = await opened(flow)
    before = await shown(flow, remote)
    for route in WITH_BODY:
        some = bodies[:-1] if is_optional(route) else bodies
        assert await not_refused(flow, remote, route, some) == []
    assert await shown(flow, remote) == before


@contract("EXC-24")
async def test_wrong_type_is_400_with_its_field_on_every_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    before = await shown(flow, remote)
    for route in WITH_BODY:
        found = wrong(body_type(route), "%s", "object")
        bodies = [(body.encode(), where) for body, where in found]
        assert len(bodies) > 4
        assert await not_refused(flow, remote, route, bodies) == []
    assert await shown(flow, remote) == before


async def test_body_is_optional_on_exactly_two_routes(flow: FlowServer) -> None:
    remote = await opened(flow)
    optional = {route.path.rpartition("}/")[2]: route for route in WITH_BODY if is_optional(route)}
    assert sorted(optional) == ["agent/init", "questions/cancel"]
    for name, expected in (("agent/init", b""), ("questions/cancel", b'{"resolved":false}\n')):
        for headers in ({}, {"Content-Length": None}):
            answer = await send(flow, "POST", target(optional[name], remote.id), b"", headers)
            assert (answer.status, answer.body) == (200, expected)


def lenient(kind: inspect.StructType) -> dict[str, str]:
    """Empty bodies in every form that Go accepts."""
    nothing = json.dumps(zeros(kind))
    return {
        "null": "null",
        "zeros": nothing,
        "trailing bytes": f"{nothing} trailing }}",
        "a second value": f"{nothing}{nothing}",
        "white space": f"\r\n\t {nothing}\n",
        "unknown keys": '{"unknown": [1, {"x": null}], "": 0, "\\u0000": 1e999}',
        "nulls": json.dumps({f.encode_name: None for f in kind.fields}),
        "another case": json.dumps({name.upper(): value for name, value in zeros(kind).items()}),
        "a name twice": nothing[:-1] + ", " + nothing[1:],
        "half a pair of surrogates": '{"unknown": "\\ud800"}',
    }


async def test_lenient_json_that_go_accepts_is_accepted_on_every_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    for route in WITH_BODY:
        where = target(route, remote.id, remote.client.id)
        async with open_raw_connection(flow) as connection:
            plain = await connection.ask(route.method, where, b"{}")
            for case, body in lenient(body_type(route)).items():
                for media_type in ("text/plain", None):
                    headers = {"Content-Type": media_type}
                    answer = await connection.ask(route.method, where, body.encode(), headers)
                    assert answer.status == plain.status, (route.path, case, answer.body)
                    assert DECODE.encode() not in answer.body, (route.path, case, answer.body)


async def test_keys_in_another_case_and_64_bit_integers_are_read_exactly(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    answer = await send(flow, "POST", remote.path("/sessions"), {"TITLE": "by another case"})
    assert cast("dict[str, str]", answer.json())["title"] == "by another case"
    for number in ((1 << 63) - 1, -(1 << 63)):
        model = {"model": "m", "provider": "p", "max_tokens": number}
        body: dict[str, object] = {"scope": 1, "model_type": "large", "model": model}
        assert (await send(flow, "POST", remote.path("/config/model"), body)).status == 200
        config = await remote.client.ask("GET", remote.path("/config"), dict[str, Json])
        assert config["models"]["large"]["max_tokens"] == number


# --- exact error messages

UUID = "5c8f5b0e-0f5d-4b1e-8c0e-6f4f2f1f9a10"
W = "/v1/workspaces/{w}"
KEY = f"{W}/config/provider-key"
REFUSALS: list[tuple[str, str, dict[str, object], str]] = [
    ("POST", "/v1/workspaces", {}, "path is required"),
    ("POST", "/v1/workspaces", {"path": "", "client_id": UUID}, "path is required"),
    ("POST", "/v1/workspaces", {"path": "/tmp"}, "invalid client_id"),
    ("POST", "/v1/workspaces", {"path": "/tmp", "client_id": "me"}, "invalid client_id"),
    ("DELETE", "/v1/clients/me", {}, "invalid client_id"),
    ("DELETE", "/v1/clients/%20", {}, "invalid client_id"),
    ("DELETE", W, {}, "client_id is required"),
    ("DELETE", f"{W}?client_id=", {}, "client_id is required"),
    ("DELETE", f"{W}?client_id=me", {}, "client_id is not a valid UUID"),
    ("GET", f"{W}/events", {}, "client_id is required"),
    ("GET", f"{W}/events?client_id={UUID}x", {}, "client_id is not a valid UUID"),
    ("POST", f"{W}/current-session", {}, "client_id is required"),
    ("POST", f"{W}/current-session?client_id=1", {}, "client_id is not a valid UUID"),
    ("POST", "/v1/control", {}, "unknown command"),
    ("POST", "/v1/control", {"command": "Shutdown", "server": "culm"}, "unknown command"),
    ("POST", f"{W}/permissions/grant", {}, "invalid permission action"),
    ("POST", f"{W}/permissions/grant", {"action": "ALLOW"}, "invalid permission action"),
    ("POST", f"{W}/agent", {"session_id": "", "prompt": "p"}, "session id is missing"),
    ("GET", f"{W}/mcp/auth-url", {}, "name is required"),
    ("GET", f"{W}/mcp/auth-url?name=", {}, "name is required"),
    ("GET", f"{W}/mcp/auth-url?Name=x", {}, "name is required"),
    ("POST", KEY, {"provider_id": "p", "kind": "x"}, 'unsupported api key kind "x"'),
    ("POST", KEY, {"provider_id": "p"}, 'unsupported api key kind ""'),
    ("POST", KEY, {"provider_id": "p", "kind": "string"}, "decode api key string: "),
    ("POST", KEY, {"provider_id": "p", "kind": "string", "api_key": 1}, "decode api key string: "),
    ("POST", KEY, {"provider_id": "p", "kind": "oauth", "api_key": "x"}, ""),
    ("POST", KEY, {"provider_id": "p", "kind": "oauth", "api_key": {"expires_at": 1.5}}, ""),
]  # fmt: skip


@contract("EXC-24")
async def test_wire_refusals_are_400_with_exact_messages_and_change_nothing(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    before = await shown(flow, remote)
    for method, path, body, expected in REFUSALS:
        answer = await send(flow, method, path.replace("{w}", remote.id), body)
        assert answer.status == 400, (path, body)
        found = message(answer)
        assert found.startswith(expected), (path, body, found)
        assert expected.endswith(": ") or not expected or found == expected, (path, body, found)
    assert await shown(flow, remote) == before


@contract("EXC-24")
async def test_errors_are_reported_in_order_client_then_body_then_workspace(
    flow: FlowServer,
) -> None:
    """The operation itself comes last; it is not checked for an unknown workspace."""
    remote = await opened(flow)
    here, gone = remote.id, UNKNOWN
    cases: list[tuple[str, str, bytes, int, str]] = [
        ("POST", f"{W}/current-session", b"{", 400, "client_id is required"),
        ("POST", f"{W}/current-session?client_id=me", b"{", 400, "client_id is not a valid UUID"),
        ("POST", f"{W}/current-session?client_id={UUID}", b"{", 400, DECODE),
        ("DELETE", W, b"", 400, "client_id is required"),
        ("GET", f"{W}/events?client_id=me&cursor=x", b"", 400, "client_id is not a valid UUID"),
        ("GET", f"{W}/mcp/auth-url", b"", 400, "name is required"),
        ("POST", f"{W}/permissions/grant", b'{"action": 1}', 400, DECODE),
        ("POST", f"{W}/permissions/grant", b'{"action": "x"}', 404, "workspace not found"),
        ("POST", f"{W}/config/provider-key", b'{"kind": "x"}', 404, "workspace not found"),
        ("POST", f"{W}/config/set", b'{"scope": 7}', 404, "workspace not found"),
        ("POST", f"{W}/agent", b"{}", 404, "workspace not found"),
        ("PUT", f"{W}/sessions/unknown", b"{}", 404, "workspace not found"),
        ("GET", f"{W}/lsps/x/diagnostics", b"", 404, "workspace not found"),
        ("GET", f"{W}/events?client_id={UUID}&cursor=x", b"", 404, "workspace not found"),
    ]
    for method, path, body, status, expected in cases:
        answer = await send(flow, method, path.replace("{w}", gone), body)
        assert (answer.status, message(answer)[: len(expected)]) == (status, expected), path
    present = f"{W}/current-session?client_id={UUID}".replace("{w}", here)
    answer = await send(flow, "POST", present, b"{}")
    assert (answer.status, message(answer)) == (409, "client not attached")
    for body, expected in (
        ({"path": "", "client_id": "me"}, "path is required"),
        ({"path": "/t\0", "client_id": "me"}, "invalid client_id"),
    ):
        assert message(await send(flow, "POST", "/v1/workspaces", body)) == expected


async def test_wrong_body_is_reported_before_an_unknown_workspace(
    flow: FlowServer,
) -> None:
    async with open_raw_connection(flow) as connection:
        for route in WITH_BODY:
            answer = await connection.ask(route.method, target(route, UNKNOWN), b"{")
            assert (answer.status, message(answer)[: len(DECODE)]) == (400, DECODE), route.path


# --- sizes


async def first_answer(
    flow: FlowServer, route: Route, where: str, headers: Mapping[str, str | None], body: bytes = b""
) -> Answer:
    """The first answer to a request with a missing or incomplete body."""
    async with open_raw_connection(flow) as connection:
        connection.writer.write(request_bytes(flow, route.method, where, headers) + body)
        return await connection.answer()


@contract("EXC-24")
async def test_content_length_beyond_the_limit_is_413_before_the_body_arrives(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    for route in WITH_BODY:
        bound = ATTACHMENT_BYTES_MAX if route in ATTACHING else BODY_BYTES_MAX
        headers = {"Content-Length": str(bound + 1), "Expect": "100-continue"}
        for workspace_id in (remote.id, UNKNOWN):
            where = target(route, workspace_id, remote.client.id)
            answer = await first_answer(flow, route, where, headers)
            assert (answer.status, str(bound) in message(answer)) == (413, True), route.path


IN_CHUNKS = {"Transfer-Encoding": "chunked", "Content-Length": None}


@contract("EXC-24")
async def test_chunked_body_beyond_the_limit_is_413_on_every_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    before = await shown(flow, remote)
    piece = b'{"x": "' + b"x" * (BODY_BYTES_MAX // 4)
    body = (b"%x\r\n%b\r\n" % (len(piece), piece)) * 4  # The last chunk is never sent.
    for route in WITH_BODY:
        if route not in ATTACHING:  # 64 MiB; see the next test.
            where = target(route, remote.id, remote.client.id)
            assert (await first_answer(flow, route, where, IN_CHUNKS, body)).status == 413, (
                route.path
            )
    assert await shown(flow, remote) == before


async def test_only_prompts_and_grants_accept_large_bodies(
    flow: FlowServer,
) -> None:
    ends = {route.path.partition("{workspace_id}")[2] for route in ATTACHING}
    assert ends == {"/agent", "/permissions/grant"}
    remote = await opened(flow)
    large = {"action": "deny", "prompt": "p", "x": "x" * (3 * BODY_BYTES_MAX)}
    answer = await send(flow, "POST", remote.path("/permissions/grant"), large)
    assert (answer.status, answer.json()) == (200, {"resolved": False})
    answer = await send(flow, "POST", remote.path("/agent"), large)
    assert (answer.status, message(answer)) == (400, "session id is missing")
    piece = b"%x\r\n%b\r\n" % (BODY_BYTES_MAX, b" " * BODY_BYTES_MAX)
    for route in ATTACHING:
        answer = await first_answer(flow, route, target(route, remote.id), IN_CHUNKS, piece * 65)
        assert answer.status == 413, route.path


async def test_body_of_exactly_the_limit_is_accepted(flow: FlowServer) -> None:
    remote = await opened(flow)
    body = b'{"title": "just fits"}'.ljust(BODY_BYTES_MAX)
    assert (await send(flow, "POST", remote.path("/sessions"), body)).status == 200
    assert [s.title for s in await remote.sessions()] == ["just fits"]
    assert (await send(flow, "POST", remote.path("/sessions"), body + b" ")).status == 413
    assert len(await remote.sessions()) == 1


async def test_refused_request_does_not_register_its_client_id(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    stranger = Ids().client()
    for path in (
        f"/events?client_id={stranger}&cursor=x",
        f"/current-session?client_id={stranger}",
    ):
        answer = await send(flow, "POST" if "current" in path else "GET", remote.path(path), {})
        assert answer.status in (400, 409)
    assert list(flow.workspace(remote.id).lifetime.claims.by_client) == [remote.client.id]
