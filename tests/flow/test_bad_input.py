"""Requests that are unusual, wrong, too large, too slow or not HTTP."""

import asyncio
import gzip
import logging
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids
from culm.server import api
from culm.server import connection as server_connection
from culm.server.connection import HEAD_BYTES_MAX
from culm.server.routes import ROUTES
from culm.settings import Settings
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import UNKNOWN, Answer, open_events, request_bytes, send
from tests.flow.test_bad_bodies import RawConnection, message, open_raw_connection, opened
from tests.flow.test_resume import read_on, three_sessions, titles
from tests.support import WAIT_S, contract

pytestmark = pytest.mark.sockets

HEALTH = "/v1/health"


def assert_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the log has no error and no traceback."""
    errors = [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    assert errors == [], [r.getMessage() for r in errors]


async def assert_serves(connection: RawConnection) -> None:
    answer = await connection.ask("GET", HEALTH)
    assert (answer.status, answer.body) == (200, b"")


# --- too large request heads

TOO_LARGE = HEAD_BYTES_MAX + 4096
LARGE_HEADS: dict[str, tuple[str, dict[str, str]]] = {
    "one field": (HEALTH, {"X": "x" * TOO_LARGE}),
    "a hundred fields": (HEALTH, {f"X-{n}": "x" * (TOO_LARGE // 100) for n in range(100)}),
    "very many fields": (HEALTH, {f"X-{n}": "x" for n in range(TOO_LARGE // 8)}),
    "a long line": (f"{HEALTH}?x={'x' * TOO_LARGE}", {}),
    "line and field together": (
        f"{HEALTH}?x={'x' * (TOO_LARGE // 2)}",
        {"X": "x" * (TOO_LARGE // 2)},
    ),
}


@contract("EXC-24")
@pytest.mark.parametrize("finished", [True, False], ids=["whole", "never finished"])
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", LARGE_HEADS)
async def test_request_head_beyond_32_kib_is_431_in_json(
    flow: FlowServer, case: str, *, later: bool, finished: bool
) -> None:
    target, fields = LARGE_HEADS[case]
    data = request_bytes(flow, "GET", target, fields)
    async with open_raw_connection(flow) as connection:
        if later:
            await assert_serves(connection)
        connection.writer.write(data if finished else data[:-4])
        answer = await connection.answer()
        assert (answer.status, str(HEAD_BYTES_MAX) in message(answer)) == (431, True)
        if not finished:
            assert await connection.end() == b""
    assert (await send(flow, "GET", HEALTH)).status == 200


async def test_request_head_just_within_the_limit_is_served(flow: FlowServer) -> None:
    room = HEAD_BYTES_MAX - len(request_bytes(flow, "GET", HEALTH, {})) - 100
    async with open_raw_connection(flow) as connection:
        for fields in ({"X": "x" * room}, {f"X-{n}": "x" * (room // 120 - 8) for n in range(100)}):
            assert (await connection.ask("GET", HEALTH, headers=fields)).status == 200


# --- slow and unfinished requests


async def test_unfinished_later_request_head_is_closed_after_the_deadline(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "KEEPALIVE_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, open_raw_connection(flow) as connection:
        await assert_serves(connection)
        connection.writer.write(request_bytes(flow, "GET", HEALTH, {})[:-2])
        assert await connection.end() == b""


async def test_unfinished_bodies_are_408_and_closed_while_others_are_served(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "BODY_S", 0.3)
    monkeypatch.setattr(server_connection, "LINGER_S", 0.3)
    async with open_flow(tmp_path, kind) as flow:
        remote = await opened(flow)
        target = remote.path("/sessions")

        async def send_slowly() -> None:
            async with open_raw_connection(flow) as connection:
                head = request_bytes(flow, "POST", target, {"Content-Length": "1000"})
                connection.writer.write(head + b'{"title": "')
                assert (await connection.answer()).status == 408
                assert await connection.end() == b""

        async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(send_slowly(), name=f"slow {number}")
            await remote.create_session("quick")
        assert [s.title for s in await remote.sessions()] == ["quick"]


@contract("EXC-24")
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_body_is_refused_without_decompression(
    flow: FlowServer, encoding: str
) -> None:
    remote = await opened(flow)
    packed = gzip.compress(b'{"title": "' + b"x" * (64 << 20), compresslevel=1)
    body = packed if encoding == "gzip" else b"\x78\x01" + packed[10:-8] + b"\0\0\0\0"
    async with open_raw_connection(flow) as connection:
        headers = {"Content-Encoding": encoding}
        answer = await connection.ask("POST", remote.path("/sessions"), body, headers)
        assert answer.status == 400
    assert await remote.sessions() == []


async def test_expect_100_continue_is_answered_only_if_the_request_is_accepted(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    body = b'{"title": "expected"}'
    asking = {"Expect": "100-continue", "Content-Length": str(len(body))}
    target = remote.path("/sessions")
    async with open_raw_connection(flow) as connection:
        for _ in range(2):
            connection.writer.write(request_bytes(flow, "POST", target, asking))
            async with asyncio.timeout(WAIT_S):
                interim = await connection.reader.readuntil(b"\r\n\r\n")
            assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.writer.write(body)
            assert (await connection.answer()).status == 200
    chunked = {"Expect": "100-Continue", "Transfer-Encoding": "chunked", "Content-Length": None}
    async with open_raw_connection(flow) as connection:
        connection.writer.write(request_bytes(flow, "POST", target, chunked))
        assert (await connection.answer()).status == 100
        connection.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert (await connection.answer()).status == 200
    refusals: list[tuple[str, Mapping[str, str | None], int]] = [
        (target, {"Content-Length": str(2 << 20)}, 413),
        ("/v1/nothing", {}, 404),
        (f"{remote.path('/current-session')}?client_id=me", {}, 400),
    ]
    if flow.server.token:
        refusals += [(target, {"Authorization": None}, 401), (target, {"Host": "evil"}, 403)]
    for where, fields, status in refusals:
        async with open_raw_connection(flow) as connection:
            connection.writer.write(request_bytes(flow, "POST", where, {**asking, **fields}))
            assert (await connection.answer()).status == status, where
    assert len(await remote.sessions()) == 3


# --- unauthorized requests


@pytest.mark.parametrize(
    ("field", "status"),
    [({"Authorization": None}, 401), ({"Authorization": "Bearer no"}, 401),
     ({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403),
     ({"Sec-Fetch-Site": "cross-site"}, 403)],
)  # fmt: skip
async def test_unauthorized_tcp_request_is_refused_first_and_disconnected(
    tmp_path: Path, field: Mapping[str, str | None], status: int
) -> None:
    async with open_flow(tmp_path, "tcp") as flow:
        client_id = Ids().client()
        create = f'{{"path": "{flow.directory()}", "client_id": "{client_id}"}}'.encode()
        for method, target, body in [
            ("POST", "/v1/workspaces", create),
            ("POST", "/v1/control", b'{"command": "shutdown", "server": "culm"}'),
            ("DELETE", f"/v1/clients/{client_id}", b""),
            ("GET", "/v1/nothing", b""),
            ("PATCH", HEALTH, b""),
            ("POST", "/v1/workspaces", b"{"),
        ]:
            async with open_raw_connection(flow) as connection:
                answer = await connection.ask(method, target, body, field)
                assert (answer.status, answer.headers["connection"]) == (status, "close"), target
                assert message(answer)
                assert await connection.end() == b""
        assert (flow.server.registry.list(), flow.left.is_set()) == ([], False)
        # The client was not retired.
        await (await flow.client(client_id)).open_workspace(flow.directory())


@pytest.mark.parametrize(("field", "status"), [("Authorization", 401), ("Host", 403)])
async def test_unauthorized_request_is_refused_without_reading_its_body(
    tmp_path: Path, field: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "LINGER_S", 0.3)
    async with open_flow(tmp_path, "tcp") as flow, open_raw_connection(flow) as connection:
        fields = {field: "x", "Content-Length": "1000000"}
        connection.writer.write(request_bytes(flow, "POST", "/v1/workspaces", fields) + b"{")
        assert (await connection.answer()).status == status
        assert await connection.end() == b""


# --- unusable directories


def bad_paths(folder: Path) -> dict[str, tuple[str, str]]:
    """Unusable paths, each with the expected reason."""
    (folder / "file").write_text("precious")
    (folder / "ring").symlink_to(folder / "back")
    (folder / "back").symlink_to(folder / "ring")
    return {
        "a file": (f"{folder}/file", "ot a directory"),
        "a device": ("/dev/null", "ot a directory"),
        "under a file": ("/etc/passwd/x", "Not a directory"),
        "a long name": (f"{folder}/{'a' * 256}", "File name too long"),
        "a long path": ("/x" * 2100, "File name too long"),
        "a ring of links": (f"{folder}/ring", "symbolic links"),
        "in a ring of links": (f"{folder}/ring/x", "symbolic links"),
        "a NUL byte": (f"{folder}/x\0y", "NUL"),
    }


@contract("EXC-24")
async def test_unusable_path_is_400_with_the_reason_and_opens_nothing(
    flow: FlowServer,
) -> None:
    for case, (path, reason) in bad_paths(flow.folder).items():
        body = {"path": path, "client_id": Ids().client()}
        answer = await send(flow, "POST", "/v1/workspaces", body)
        assert (answer.status, reason in message(answer)) == (400, True), (case, message(answer))
        assert len(answer.body) < 1000, case
    assert flow.server.registry.list() == []
    assert (flow.folder / "file").read_text() == "precious"


@contract("EXC-24")
async def test_unusable_data_dir_is_400_with_the_reason_and_opens_nothing(
    flow: FlowServer,
) -> None:
    for case, (path, _) in bad_paths(flow.folder).items():
        body = {
            "path": str(flow.directory()), "client_id": Ids().client(), "data_dir": path,
        }  # fmt: skip
        answer = await send(flow, "POST", "/v1/workspaces", body)
        assert (answer.status, bool(message(answer))) == (400, True), (case, message(answer))
    assert flow.server.registry.list() == []


# --- parameters


async def test_first_of_two_equal_query_parameters_is_used(flow: FlowServer) -> None:
    remote = await opened(flow)
    mine, other = f"client_id={remote.client.id}", f"client_id={Ids().client()}"
    gone = await send(flow, "DELETE", remote.path("?client_id=me&" + mine))
    assert (gone.status, message(gone)) == (400, "client_id is not a valid UUID")
    for query, status in [("name=x&name=", 200), ("name=&name=x", 400)]:
        assert (await send(flow, "GET", remote.path(f"/mcp/auth-url?{query}"))).status == status
    answer = await send(flow, "HEAD", remote.path(f"/events?{mine}&cursor=a.1&cursor=x"))
    assert answer.status == 200
    assert (await send(flow, "DELETE", remote.path(f"?{other}&{mine}"))).status == 200
    assert len(flow.server.registry.list()) == 1
    assert (await send(flow, "DELETE", remote.path(f"?{mine}&{other}"))).status == 200
    assert flow.server.registry.list() == []


async def test_trimmed_cursor_is_ignored_in_the_crush_view(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, settings=Settings(retention_events=2)) as flow:
        remote, epoch = await three_sessions(flow)
        async with open_events(flow, remote):
            flow.clock.advance(600)
            await flow.workspace(remote.id).store.write(lambda _: None)
            crush = await read_on(flow, remote, view="crush", cursor=f"{epoch}.0")
            assert (crush.status, crush.types(), titles(crush)) == (200, ["session"], ["now"])


# --- methods


def get_target(path: str, remote: RemoteWorkspace, session_id: str, client_id: str) -> str:
    """The path of a GET route with its parameters."""
    path = path.replace("{workspace_id}", remote.id).replace("{session_id}", session_id)
    wants = {"/events": f"?client_id={client_id}", "/auth-url": "?name=x"}
    ends = [query for end, query in wants.items() if path.endswith(end)]
    return path.replace("{lsp}", "x").replace("{run_id}", UNKNOWN) + "".join(ends)


async def test_every_get_route_answers_head_with_equal_headers_and_no_body(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")

    def kept(answer: Answer) -> tuple[int, dict[str, str]]:
        # A HEAD answer may omit the length of an empty body.
        fields = {"content-length": "0", **answer.headers}
        return answer.status, {k: v for k, v in fields.items() if k != "date"}

    for route in ROUTES:
        if route.method != "GET":
            continue
        target = get_target(route.path, remote, session.id, remote.client.id)
        head = await send(flow, "HEAD", target)
        if route.path.endswith("/events"):
            async with open_events(flow, remote, view="crush") as stream:
                got = Answer(stream.status, stream.headers, b"")
        else:
            got = await send(flow, "GET", target)
        assert kept(head) == kept(got), route.path
        assert head.body == b""


METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"}


async def test_other_methods_are_405_with_the_allowed_methods_on_every_path(
    flow: FlowServer,
) -> None:
    allowed: dict[str, set[str]] = {}
    for route in ROUTES:
        allowed.setdefault(route.path, set()).add(route.method)
    async with open_raw_connection(flow) as connection:
        for path, given in allowed.items():
            methods = given | {"HEAD"} if "GET" in given else given
            target = path.replace("{", "").replace("}", "")
            for method in METHODS - methods:
                connection.writer.write(request_bytes(flow, method, target, {}))
                answer = await connection.answer(method)
                allow = ", ".join(sorted(methods))
                assert (answer.status, answer.headers.get("allow")) == (405, allow), (method, path)


# --- rare and invalid HTTP


async def test_http_1_0_request_is_answered_and_its_connection_closed(flow: FlowServer) -> None:
    remote = await opened(flow)
    body = b'{"title": "of old"}'
    data = request_bytes(flow, "POST", remote.path("/sessions"), {}, body)
    async with open_raw_connection(flow) as connection:
        connection.writer.write(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert (await connection.answer()).status == 200
        assert await connection.end() == b""
    assert [s.title for s in await remote.sessions()] == ["of old"]


async def test_pipelined_requests_are_answered_in_order(flow: FlowServer) -> None:
    remote = await opened(flow)
    data = b""
    for number in range(50):
        body = b'{"title": "%d"}' % number
        data += request_bytes(flow, "POST", remote.path("/sessions"), {}, body)
        data += request_bytes(flow, "GET", "http://elsewhere.example/v1/nothing", {})
    async with open_raw_connection(flow) as connection:
        connection.writer.write(data + request_bytes(flow, "GET", HEALTH, {"Connection": "close"}))
        for number in range(50):
            assert b'"title":"%d"' % number in (await connection.answer()).body
            assert (await connection.answer()).status == 404
        assert (await connection.answer()).status == 200
        assert await connection.end() == b""
    assert len(await remote.sessions()) == 50


INVALID_HTTP = {
    "a TLS hello": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + random.Random(1).randbytes(506),
    "random bytes": random.Random(2).randbytes(2000),
    "zeros": b"\0" * 100,
    "words": b"hello\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a strange version": b"GET /v1/health HTTP/9.9\r\nHost: x\r\n\r\n",
    "a strange method": b"GRT /v1/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a field without a colon": b"GET /v1/health HTTP/1.1\r\nHost\r\n\r\n",
    "a length that is none": b"POST /v1/control HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    "a negative length": b"POST /v1/control HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk without size": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}  # fmt: skip


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", INVALID_HTTP)
async def test_invalid_http_is_400_in_json_or_closed_without_a_traceback(
    flow: FlowServer, case: str, caplog: pytest.LogCaptureFixture, *, later: bool
) -> None:
    async with open_raw_connection(flow) as connection:
        if later:
            await assert_serves(connection)
        connection.writer.write(INVALID_HTTP[case])
        received = await connection.end()
        head, _, body = received.partition(b"\r\n\r\n")
        assert not received or (b" 400 " in head and b"application/json" in head), received
        assert not received or body.startswith(b'{"message":'), received
    assert (await send(flow, "GET", HEALTH)).status == 200
    assert_no_errors(caplog)


async def test_connection_without_a_request_logs_no_error(
    flow: FlowServer, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"", b"G", b"GET /v1/health HTTP/1.1\r\nHost:", b"\r\n"):
        for abort in (True, False):
            async with open_raw_connection(flow) as connection:
                connection.writer.write(data)
                if not abort:
                    connection.writer.write_eof()
                    await flow.run_ready()
    await flow.run_ready()
    assert (await send(flow, "GET", HEALTH)).status == 200
    assert_no_errors(caplog)
