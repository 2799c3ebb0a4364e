"""Links over a real socket: authorization, hostile peers and error messages."""

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, WSMsgType

from culm.errors import InvalidRequest, ListenFailed
from culm.fleet.transport import websocket
from culm.fleet.transport.base import ConnectFailed, LinkLost
from culm.fleet.transport.tls import is_authorized
from culm.fleet.transport.websocket import connect_websocket, listen_websocket
from tests.fleet.link_harness import close_all
from tests.support import WAIT_S, contract

UPGRADE = (
    b"GET /any/path HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@asynccontextmanager
async def open_raw(
    endpoint: str,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection that ends with a reset."""
    host, _, port = endpoint.removeprefix("ws://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("shown", "authorized"),
    [
        (["Bearer secret"], True),
        ([], False),
        (["Bearer secre"], False),
        (["Bearer secrets"], False),
        (["bearer secret"], False),
        (["Bearer  secret"], False),
        (["Bearersecret"], False),
        (["Basic secret"], False),
        (["secret"], False),
        (["Bearer secret", "Bearer secret"], False),
        (["Bearer secr\udcffet"], False),
    ],
)
@contract("FLEET-14")
def test_only_the_exact_bearer_token_is_authorized(shown: list[str], *, authorized: bool) -> None:
    assert is_authorized(shown, "secret") is authorized
    assert is_authorized(shown, None) is True


@contract("FLEET-14")
async def test_wrong_or_missing_token_is_refused_at_the_upgrade() -> None:
    async with asyncio.timeout(WAIT_S), listen_websocket(token="secret") as listener:
        assert listener.endpoint.startswith("ws://127.0.0.1:")
        for token in ("wrong", None):
            with pytest.raises(ConnectFailed, match=r"ws://127.0.0.1:\d+: the token was refused"):
                await connect_websocket(listener.endpoint, token)
        async with open_raw(listener.endpoint) as (reader, writer):
            writer.write(UPGRADE + b"Authorization: Basic secret\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        link = await connect_websocket(listener.endpoint + "/any/path?x=1", "secret")
        await close_all(link, await listener.accept())
    async with asyncio.timeout(WAIT_S), listen_websocket() as listener:
        link = await connect_websocket(listener.endpoint, "whatever")
        await close_all(link, await listener.accept())
        # But not for a web page: a browser would connect for any site.
        async with open_raw(listener.endpoint) as (reader, writer):
            writer.write(UPGRADE + b"Origin: http://127.0.0.1\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 403 ")


async def test_non_upgrade_requests_and_excess_waiting_links_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "WAITING_MAX", 3)
    async with asyncio.timeout(WAIT_S), listen_websocket() as listener:
        async with open_raw(listener.endpoint) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        links = [await connect_websocket(listener.endpoint) for _ in range(3)]
        with pytest.raises(ConnectFailed, match="it answered 503"):
            await connect_websocket(listener.endpoint)
        await listener.accept()
        links.append(await connect_websocket(listener.endpoint))
        for link in links:
            link.abort()


async def test_silent_client_does_not_block_others_and_is_not_accepted() -> None:
    async with (
        asyncio.timeout(WAIT_S),
        listen_websocket() as listener,
        open_raw(listener.endpoint),
        open_raw(listener.endpoint) as (_, writer),
    ):
        writer.write(UPGRADE)  # The head does not end.
        link = await connect_websocket(listener.endpoint)
        await close_all(link, await listener.accept())


async def test_slow_handshake_and_excess_connections_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(websocket, "CONNECTIONS_MAX", 2)
    async with asyncio.timeout(WAIT_S), listen_websocket() as listener:
        async with open_raw(listener.endpoint) as (slow, writer):
            writer.write(UPGRADE)
            assert await slow.read() == b""
        monkeypatch.setattr(websocket, "HANDSHAKE_S", WAIT_S)  # A busy machine is slow.
        link = await connect_websocket(listener.endpoint)
        other = await connect_websocket(listener.endpoint)
        async with open_raw(listener.endpoint) as (reader, _):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        await close_all(link, other, await listener.accept(), await listener.accept())


async def test_only_text_is_a_frame_and_pings_are_answered() -> None:
    async with (
        asyncio.timeout(WAIT_S),
        listen_websocket() as listener,
        ClientSession() as session,
        session.ws_connect(listener.endpoint, autoping=False) as ws,
    ):
        link = await listener.accept()
        await ws.send_bytes(b'{"kind":"cancel"}')
        await ws.pong(b"unasked")
        await ws.ping(b"there?")
        await ws.send_str("text")
        assert await link.receive() == b"text"
        answer = await ws.receive()
        assert (answer.type, answer.data) == (WSMsgType.PONG, b"there?")
        async with asyncio.TaskGroup() as group:
            group.create_task(link.close())
            assert (await ws.receive()).type is WSMsgType.CLOSE


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xff" + struct.pack(">Q", 100 << 20) + b"mask" + b"x" * 1000,
        b"\x81\xff" + b"\xff" * 8 + b"mask",
        b"\x83\x80mask",
        b"\xf1\x80mask",
        b"\x80\x80mask",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["100 MB", "2^64", "opcode", "reserved bits", "continuation", "HTTP", "reset"],
)
async def test_protocol_violation_loses_the_link_and_prints_nothing(
    data: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    async with asyncio.timeout(WAIT_S), listen_websocket() as listener:
        async with open_raw(listener.endpoint) as (reader, writer):
            writer.write(UPGRADE + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            link = await listener.accept()
            writer.write(data)
            if data:
                with pytest.raises(LinkLost):
                    await link.receive()
        try:
            assert await link.receive() is None
        except LinkLost:
            assert not data
        with pytest.raises(LinkLost):
            await link.send(b"more")
        await link.close()
    gc.collect()
    assert (caplog.records, capfd.readouterr()) == ([], ("", ""))


@asynccontextmanager
async def open_other(answer: bytes) -> AsyncGenerator[str]:
    """A server that is not a worker: sends `answer` to each client and stays connected."""

    async def on_connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(on_connected, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: ws://127.0.0.1:1/\r\n\r\n", "redirected elsewhere"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "it answered 200"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "it answered 101"),
        (b"SSH-2.0-x\r\n\r\n", "it (is not a WebSocket server|closed the connection, .*)"),
        (b"", "no answer within 0.05 s"),
    ],
    ids=["redirect", "page", "no key", "no HTTP", "silence"],
)
async def test_connecting_to_another_server_fails_in_bounded_time(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not answer:
        monkeypatch.setattr(websocket, "CONNECT_S", 0.05)
    async with asyncio.timeout(WAIT_S), open_other(answer) as endpoint:
        with pytest.raises(ConnectFailed, match=f"^{endpoint}: {reason}$"):
            await connect_websocket(endpoint, "secret")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.invalid"])
async def test_public_address_requires_token_and_tls(host: str) -> None:
    for token, message in ((None, "needs a token"), ("t", "needs TLS")):
        with pytest.raises(InvalidRequest, match=message):
            async with listen_websocket(host, token=token):
                pass


async def test_failed_connection_reports_its_reason() -> None:
    for endpoint in ("http://x", "ws://127.0.0.1:99999999", "ws://", "ws://[::1", ""):
        with pytest.raises(ConnectFailed) as no_address:
            await connect_websocket(endpoint, "secret")
        assert str(no_address.value) == f"{endpoint}: not a ws:// or wss:// address"
    with pytest.raises(ConnectFailed) as refused:
        await connect_websocket("ws://user:password@127.0.0.1:1", "secret")
    assert "password@" not in str(refused.value)
    with pytest.raises(ConnectFailed, match="a token is sent only over wss:// or to this machine"):
        await connect_websocket("ws://192.0.2.1:1", "secret")
    async with listen_websocket() as listener:
        port = int(listener.endpoint.rpartition(":")[2])
        with pytest.raises(ListenFailed, match=f"tcp://127.0.0.1:{port}"):
            async with listen_websocket(port=port):
                pass
        with pytest.raises(ConnectFailed, match="the TLS handshake failed: "):
            await connect_websocket(f"wss://127.0.0.1:{port}", "secret")
    with pytest.raises(ConnectFailed, match="no connection: "):
        await connect_websocket(listener.endpoint, "secret")


async def test_links_and_descriptors_end_with_their_listener() -> None:
    folder = Path("/proc/self/fd")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        async with listen_websocket() as listener:  # The loop opens some for itself.
            await close_all(await connect_websocket(listener.endpoint), await listener.accept())
        before = len([*folder.iterdir()]) if folder.exists() else 0
        async with listen_websocket() as listener:
            links = [await connect_websocket(listener.endpoint) for _ in range(3)]
            accepted = await listener.accept()
            endings = [group.create_task(link.receive()) for link in links]
            async with open_raw(listener.endpoint):
                await asyncio.sleep(0)
        with pytest.raises(LinkLost):
            await accepted.send(b"more")
        assert [await ending for ending in endings] == [None, None, None]  # Closed cleanly.
        await close_all(*links)
        while folder.exists() and len([*folder.iterdir()]) > before:
            await asyncio.sleep(0)
