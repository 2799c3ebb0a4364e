"""Limits of one connection; valid requests are not affected by them."""

import asyncio
from pathlib import Path

import pytest

from culm.server import connection
from culm.server.connection import HEAD_BYTES_MAX
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import connect, open_events, request_bytes, send, until
from tests.support import WAIT_S

pytestmark = pytest.mark.sockets

FIELDS = b"".join(b"X-%d: %b\r\n" % (n, b"x" * 30_000) for n in range(4))


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n", b"\r\n" * 100], ids=["no", "two", "many"])
async def test_request_head_after_empty_lines_is_limited_like_any_other(
    flow: FlowServer, before: bytes
) -> None:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
        writer.write(before + b"GET / HTTP/1.1\r\n" + FIELDS)
        assert b" 431 " in await reader.readline()
        writer.close()


async def test_empty_lines_do_not_stop_the_deadline_of_the_first_head(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
        writer.write(b"\r\n\r\nGET / HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_large_body_after_an_early_head_is_not_parsed_as_a_head(
    flow: FlowServer,
) -> None:
    remote = await (await flow.client()).open_workspace(flow.directory())
    body = b'{"title": "' + b"x" * 9_000 + b'"}' + b" " * 100_000
    target = remote.path("/sessions")
    first = request_bytes(flow, "POST", target, {}, b'{"title": "first"}')
    second = request_bytes(flow, "POST", target, {"Content-Length": str(len(body))})
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
        writer.write(first + second[:-1])
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"}\n")
        writer.write(second[-1:] + body)
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_bytes_sent_after_a_stream_request_are_ignored(flow: FlowServer) -> None:
    remote = await (await flow.client()).open_workspace(flow.directory())
    target = remote.path(f"/events?client_id={remote.client.id}&view=delta")
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
        writer.write(request_bytes(flow, "GET", target, {}))
        assert b" 200 " in await reader.readline()
        writer.write(request_bytes(flow, "DELETE", remote.path(), {}) * 50)
        await writer.drain()
        session = await remote.create_session("still streaming")
        await reader.readuntil(session.id.encode())
        writer.close()


async def test_connection_with_an_unread_answer_is_closed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.1)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(2 * WAIT_S):
        remote = await (await flow.client()).open_workspace(flow.directory())
        for number in range(100):
            await remote.create_session(f"{number} " + "x" * 9_900)
        _, writer = await connect(flow.server.addresses[0])
        await remote.sessions()  # The server has accepted the connection by now.
        open_before = descriptors()
        writer.write(request_bytes(flow, "GET", remote.path("/sessions"), {}) * 20)
        await until(lambda: descriptors() < open_before)
        writer.close()


def descriptors() -> int:
    """The number of open descriptors of this process, with both ends of every connection."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_tcp_connection_limit_does_not_affect_the_unix_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(connection, "TURN_AWAY_S", 0.0)
    async with open_flow(tmp_path, "both") as flow, asyncio.timeout(WAIT_S):
        unix, tcp = flow.server.addresses
        strangers = [await connect(tcp) for _ in range(4)]
        assert await strangers[-1][0].read() == b""  # The fourth is refused.
        assert (await send(flow, "GET", "/v1/health", address=unix)).status == 200
        for _, writer in strangers:
            writer.close()


async def test_stream_continues_while_a_request_head_is_refused_elsewhere(flow: FlowServer) -> None:
    remote = await (await flow.client()).open_workspace(flow.directory())
    async with open_events(flow, remote) as stream:
        answer = await send(flow, "GET", "/v1/health", headers={"X": "x" * HEAD_BYTES_MAX})
        assert answer.status == 431
        session = await remote.create_session("s")
        await stream.until(session.id.encode())
