"""A client that takes its time over a request does not take ours."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from culm.ids import Ids
from culm.server import deadlines, problems
from tests.flow.conftest import FlowServer, open_flow
from tests.support import WAIT_S


async def connect(flow: FlowServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, address = flow.url.partition("://")
    if scheme == "unix":
        return await asyncio.open_unix_connection(address)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def head(flow: FlowServer, method: str, path: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {flow.url.partition('://')[2]}"]
    return "\r\n".join(
        [*lines, f"Authorization: Bearer {flow.server.token}", *more, "", ""]
    ).encode()


async def test_a_head_that_never_ends_is_cut_off_and_others_are_served(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "HEAD_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        slow = [await connect(flow) for _ in range(50)]
        for _, writer in slow:
            writer.write(b"GET /v1/health HTTP/1.1\r\nHost:")
        await (await flow.client()).health()
        for reader, writer in slow:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_a_connection_that_spoke_in_time_is_kept_past_the_deadline(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "HEAD_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow)
        for _ in range(3):
            writer.write(head(flow, "GET", "/v1/health"))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.2)
        writer.close()


async def test_a_body_that_never_ends_is_answered_408_and_nothing_is_created(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "BODY_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow)
        writer.write(head(flow, "POST", "/v1/workspaces", "Content-Length: 1000"))
        writer.write(b'{"path": "/x", "client_id": "%b"' % Ids().client().encode())
        assert b"408" in await reader.readuntil(b"\r\n")
        writer.close()
        assert flow.server.registry.list() == []


async def test_one_connection_too_many_is_closed_and_those_there_go_on(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "CONNECTIONS_MAX", 2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        first, second = await connect(flow), await connect(flow)
        for reader, writer in (first, second):
            writer.write(head(flow, "GET", "/v1/health"))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        reader, writer = await connect(flow)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        first[1].write(head(flow, "GET", "/v1/health"))
        assert b"200 OK" in await first[0].readuntil(b"\r\n\r\n")
        for _, writer in (first, second):
            writer.close()
