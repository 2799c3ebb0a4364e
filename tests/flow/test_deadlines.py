"""Deadlines for slow requests."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from culm.ids import Ids
from culm.server import api, connection
from culm.server.listen import Address
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import connect, request_bytes
from tests.support import WAIT_S

pytestmark = pytest.mark.sockets


def address_of(flow: FlowServer) -> Address:
    return flow.server.addresses[0]


async def test_unfinished_request_head_is_closed_and_others_are_served(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        slow = [await connect(address_of(flow)) for _ in range(50)]
        for _, writer in slow:
            writer.write(b"GET /v1/health HTTP/1.1\r\nHost:")
        await (await flow.client()).health()
        for reader, writer in slow:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_connection_with_a_timely_request_outlives_the_head_deadline(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 1.0)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        reader, writer = await connect(address_of(flow))
        for _ in range(3):
            writer.write(request_bytes(flow, "GET", "/v1/health", {}))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.4)
        writer.close()


async def test_unfinished_body_is_408_and_creates_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "BODY_S", 0.2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        reader, writer = await connect(address_of(flow))
        writer.write(request_bytes(flow, "POST", "/v1/workspaces", {"Content-Length": "1000"}))
        writer.write(b'{"path": "/x", "client_id": "%b"' % Ids().client().encode())
        assert b"408" in await reader.readuntil(b"\r\n")
        writer.close()
        assert flow.server.registry.list() == []


async def test_connection_beyond_the_limit_is_closed_and_the_others_continue(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 2)
    async with open_flow(tmp_path, kind) as flow, asyncio.timeout(WAIT_S):
        first, second = await connect(address_of(flow)), await connect(address_of(flow))
        for reader, writer in (first, second):
            writer.write(request_bytes(flow, "GET", "/v1/health", {}))
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        reader, writer = await connect(address_of(flow))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        first[1].write(request_bytes(flow, "GET", "/v1/health", {}))
        assert b"200 OK" in await first[0].readuntil(b"\r\n\r\n")
        for _, writer in (first, second):
            writer.close()
