"""Bodies that are wrong, on every route that takes one: 400 with the field named, and no change."""

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
from culm.server.api import Route
from culm.server.problems import ATTACHMENT_BYTES_MAX, BODY_BYTES_MAX
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
    """A route's path with everything in it but the body as it should be."""
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


class Line:
    """One connection, kept alive, on which one request follows the other. Made by `open_line`."""

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
        """The next answer, by its length; `send` reads to the close instead."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            pairs = [line.partition(":") for line in lines]
            fields = {name.lower(): value.strip() for name, _, value in pairs}
            length = 0 if method == "HEAD" else int(fields.get("content-length", 0))
            body = await self.reader.readexactly(length)
        return Answer(int(first.split(" ")[1]), fields, body)

    async def end(self) -> bytes:
        """What comes before the server closes the connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def open_line(flow: FlowServer) -> AsyncGenerator[Line]:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
    try:
        yield Line(flow, reader, writer)
    finally:
        writer.transport.abort()


# --- what a field cannot take, whatever its type, and where the answer must say it is

NO_INTEGERS = ["1.0", "1e3", "-0.0", "1E0", str(1 << 63), str(-(1 << 63) - 1), "9" * 400, '"1"']
NO_VALUES: dict[type[inspect.Type], list[str]] = {
    inspect.StrType: ["1", "true", "[]", "{}"],
    inspect.LiteralType: ['"no such word"', "1", "[]"],
    inspect.BoolType: ["1", "0", '"true"', "[]"],
    inspect.IntType: [*NO_INTEGERS, "true", "[]"],
    inspect.FloatType: ['"1"', "true", "1e999"],
    inspect.BytesType: ['"*"', '"aGVsbG8"', '"aGVsbG8=="', "1", "[]"],
    inspect.ListType: ["{}", '"x"', "1"],
    inspect.DictType: ["[]", '"x"', "1"],
    inspect.StructType: ["[]", '"x"', "1", "true"],
}


def wrong(kind: inspect.Type, around: str, where: str) -> Generator[tuple[str, str]]:
    """Bodies with one wrong value in them (`around` has its place as %s), and its field."""
    match kind:
        case inspect.Metadata(type=inner):
            yield from wrong(inner, around, where)
        case inspect.UnionType(types=types):
            no_value = (inspect.NoneType, inspect.CustomType)
            for inner in types:
                if not isinstance(inner, no_value) and type(inner) in NO_VALUES:
                    yield from wrong(inner, around, where)
        case inspect.AnyType():
            yield around % "1e999", where  # No number; all else is taken.
            yield around % '[{"x": -1e999}]', where
        case _:
            for value in NO_VALUES[type(kind)]:
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
    """Every field with its zero value, spelled as the wire spells it."""
    found = cast("dict[str, Json]", msgspec.to_builtins(kind.cls()))
    return {f.encode_name: found.get(f.encode_name) for f in kind.fields}


# --- nothing changed

SHOWN = ("/snapshot?sessions=*", "/config", "/permissions/skip", "")


async def shown(flow: FlowServer, remote: RemoteWorkspace) -> list[bytes]:
    """All that a wrong body could have changed."""
    answers = [await send(flow, "GET", remote.path(rest)) for rest in SHOWN]
    answers.append(await send(flow, "GET", "/v1/workspaces"))
    assert {answer.status for answer in answers} == {200}
    assert not flow.left.is_set()
    return [answer.body for answer in answers]


async def not_refused(
    flow: FlowServer, remote: RemoteWorkspace, route: Route, bodies: list[tuple[bytes, str]]
) -> list[tuple[str, bytes, str, bytes]]:
    """Those bodies that are not 400 with a word where the mistake is."""
    found: list[tuple[str, bytes, str, bytes]] = []
    where = target(route, remote.id, remote.client.id)
    async with open_line(flow) as line:
        for body, word in bodies:
            answer = await line.ask(route.method, where, body)
            if answer.status != 400 or not re.match(f"{DECODE}.*{word}", message(answer)):
                found.append((route.path, body, word, answer.body))
    return found


@contract("EXC-24")
async def test_a_body_that_is_no_json_is_400_with_its_position_and_changes_nothing_on_any_route(
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
async def test_a_value_of_another_type_is_400_naming_its_field_and_changes_nothing_on_any_route(
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


async def test_only_where_it_says_nothing_more_may_a_body_be_left_out(flow: FlowServer) -> None:
    remote = await opened(flow)
    optional = {route.path.rpartition("}/")[2]: route for route in WITH_BODY if is_optional(route)}
    assert sorted(optional) == ["agent/init", "questions/cancel"]
    for name, said in (("agent/init", b""), ("questions/cancel", b'{"resolved":false}\n')):
        for headers in ({}, {"Content-Length": None}):
            answer = await send(flow, "POST", target(optional[name], remote.id), b"", headers)
            assert (answer.status, answer.body) == (200, said)


def lenient(kind: inspect.StructType) -> dict[str, str]:
    """Bodies that say nothing in all the ways that Go accepts."""
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


async def test_what_go_reads_without_complaint_is_read_without_complaint_on_any_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    for route in WITH_BODY:
        where = target(route, remote.id, remote.client.id)
        async with open_line(flow) as line:
            plain = await line.ask(route.method, where, b"{}")
            for case, body in lenient(body_type(route)).items():
                for media_type in ("text/plain", None):
                    headers = {"Content-Type": media_type}
                    answer = await line.ask(route.method, where, body.encode(), headers)
                    assert answer.status == plain.status, (route.path, case, answer.body)
                    assert DECODE.encode() not in answer.body, (route.path, case, answer.body)


async def test_names_in_another_case_and_large_integers_mean_what_they_say(
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


# --- the sentences of the wire

UUID = "5c8f5b0e-0f5d-4b1e-8c0e-6f4f2f1f9a10"
W = "/v1/workspaces/{w}"
KEY = f"{W}/config/provider-key"
SENTENCES: list[tuple[str, str, dict[str, object], str]] = [
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
async def test_each_refusal_of_the_wire_is_400_in_its_exact_words_and_changes_nothing(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    before = await shown(flow, remote)
    for method, path, body, words in SENTENCES:
        answer = await send(flow, method, path.replace("{w}", remote.id), body)
        assert answer.status == 400, (path, body)
        found = message(answer)
        assert found.startswith(words), (path, body, found)
        assert words.endswith(": ") or not words or found == words, (path, body, found)
    assert await shown(flow, remote) == before


@contract("EXC-24")
async def test_of_two_mistakes_the_first_in_order_is_named_client_then_body_then_workspace(
    flow: FlowServer,
) -> None:
    """The operation itself comes last: it is not looked at for a workspace that is not there."""
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
    for method, path, body, status, words in cases:
        answer = await send(flow, method, path.replace("{w}", gone), body)
        assert (answer.status, message(answer)[: len(words)]) == (status, words), path
    present = f"{W}/current-session?client_id={UUID}".replace("{w}", here)
    answer = await send(flow, "POST", present, b"{}")
    assert (answer.status, message(answer)) == (409, "client not attached")
    for body, words in (
        ({"path": "", "client_id": "me"}, "path is required"),
        ({"path": "/t\0", "client_id": "me"}, "invalid client_id"),
    ):
        assert message(await send(flow, "POST", "/v1/workspaces", body)) == words


async def test_a_wrong_body_is_named_before_the_workspace_that_is_not_there_on_any_route(
    flow: FlowServer,
) -> None:
    async with open_line(flow) as line:
        for route in WITH_BODY:
            answer = await line.ask(route.method, target(route, UNKNOWN), b"{")
            assert (answer.status, message(answer)[: len(DECODE)]) == (400, DECODE), route.path


# --- sizes


async def begun(
    flow: FlowServer, route: Route, where: str, headers: Mapping[str, str | None], body: bytes = b""
) -> Answer:
    """The first answer to a request whose body does not come, or not to its end."""
    async with open_line(flow) as line:
        line.writer.write(request_bytes(flow, route.method, where, headers) + body)
        return await line.answer()


@contract("EXC-24")
async def test_a_body_announced_beyond_its_bound_is_413_before_it_comes_on_any_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    for route in WITH_BODY:
        bound = ATTACHMENT_BYTES_MAX if route in ATTACHING else BODY_BYTES_MAX
        headers = {"Content-Length": str(bound + 1), "Expect": "100-continue"}
        for workspace_id in (remote.id, UNKNOWN):
            where = target(route, workspace_id, remote.client.id)
            answer = await begun(flow, route, where, headers)
            assert (answer.status, str(bound) in message(answer)) == (413, True), route.path


IN_CHUNKS = {"Transfer-Encoding": "chunked", "Content-Length": None}


@contract("EXC-24")
async def test_a_body_in_chunks_is_413_once_it_passes_its_bound_and_changes_nothing_on_any_route(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    before = await shown(flow, remote)
    piece = b'{"x": "' + b"x" * (BODY_BYTES_MAX // 4)
    body = (b"%x\r\n%b\r\n" % (len(piece), piece)) * 4  # Its end never comes.
    for route in WITH_BODY:
        if route not in ATTACHING:  # 64 MiB; the next test has one.
            where = target(route, remote.id, remote.client.id)
            assert (await begun(flow, route, where, IN_CHUNKS, body)).status == 413, route.path
    assert await shown(flow, remote) == before


async def test_only_the_attaching_routes_take_more_and_they_are_prompts_and_grants(
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
        answer = await begun(flow, route, target(route, remote.id), IN_CHUNKS, piece * 65)
        assert answer.status == 413, route.path


async def test_a_body_of_exactly_the_bound_is_read(flow: FlowServer) -> None:
    remote = await opened(flow)
    body = b'{"title": "just fits"}'.ljust(BODY_BYTES_MAX)
    assert (await send(flow, "POST", remote.path("/sessions"), body)).status == 200
    assert [s.title for s in await remote.sessions()] == ["just fits"]
    assert (await send(flow, "POST", remote.path("/sessions"), body + b" ")).status == 413
    assert len(await remote.sessions()) == 1


async def test_a_client_id_that_never_created_anything_is_not_registered_by_a_refusal(
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
    assert list(flow.workspace(remote.id).claims.by_client) == [remote.client.id]
