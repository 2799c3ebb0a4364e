"""The HTTP client against servers that truncate, lie, reset and hang, on raw sockets."""

import asyncio
import errno
import os
import socket
import struct
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from culm.client.http import RequestRefused, open_client
from culm.client.transport import (
    HEAD_BYTES_MAX,
    HttpResponse,
    HttpTransport,
    ResponseReader,
    ServerAddress,
    Unreachable,
    parse_address,
)
from culm.client.workspace import RemoteWorkspace
from culm.ids import WorkspaceId
from culm.wire.codec import decode
from culm.wire.config import Config
from culm.wire.runs import Attachment, Prompt
from culm.wire.workspaces import CreateWorkspace, Workspace
from tests.support import WAIT_S

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = (
    b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 36\r\n\r\n"
    b'{"message":"no more","code":"large"}'
)
LARGE = b"x" * (32 << 20)  # More than the kernel buffers for a peer that does not read.
BOTH_TRANSPORTS = pytest.mark.parametrize("transport_kind", ["unix", "tcp"])


@dataclass
class Peer:
    """One connection, seen from the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes  # The head of the request.

    async def send(self, *pieces: bytes) -> None:
        """Send each piece in its own write."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """Reset the connection, with unread data."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Handler = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def open_server(handler: Handler, transport_kind: str = "unix") -> AsyncGenerator[str]:
    """Serve each connection with `handler`, then close it; yields the address."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            await handler(Peer(reader, writer, await reader.readuntil(b"\r\n\r\n")))
        writer.close()

    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        if transport_kind == "unix":
            server = await asyncio.start_unix_server(serve, f"{folder}/s")
            url = f"unix://{folder}/s"
        else:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with server:
                try:
                    async with asyncio.timeout(WAIT_S):
                        yield url
                finally:  # From Python 3.12 on, a server waits for its connections.
                    for writer in writers:
                        writer.transport.abort()
        finally:
            for _ in range(3):  # An abort takes effect in the next turn of the loop.
                await asyncio.sleep(0)


async def fetch(url: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send one request; returns the status and the body."""
    transport = HttpTransport(parse_address(url), {})
    async with transport.open("POST" if body else "GET", "/", body) as response:
        return response.status, await response.read()


def sending(*pieces: bytes) -> Handler:
    async def send(peer: Peer) -> None:
        await peer.send(*pieces)

    return send


# --- responses


@BOTH_TRANSPORTS
@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (HELLO, b"hello"),
        (OK + b"\r\nuntil the end", b"until the end"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"2;name=value\r\nhe\r\n00003 ; x\r\nllo\r\n0\r\nTrailer: x\r\n\r\n", b"hello"),
        (OK + b"content-LENGTH:0\r\n\r\n", b""),
        (CHUNKED + b"0\r\n\r\n", b""),
    ],
)
async def test_response_sent_byte_by_byte_is_read_whole(
    sent: bytes, body: bytes, transport_kind: str
) -> None:
    async with open_server(
        sending(*(sent[n : n + 1] for n in range(len(sent)))), transport_kind
    ) as url:
        assert await fetch(url) == (200, body)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";a=b", b' ; q="x"']),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_chunked_body_is_its_chunks_for_any_split(
    chunks: list[bytes], extension: bytes, cuts: list[int]
) -> None:
    whole = b"".join(b"%x%s\r\n%s\r\n" % (len(one), extension, one) for one in chunks)
    whole += b"0\r\n\r\n"

    async def read() -> bytes:
        reader = ResponseReader()
        response = HttpResponse(CHUNKED, reader)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(response.read())
            at = 0
            while at < len(whole):
                step = cuts[at % len(cuts)]
                reader.feed_data(whole[at : at + step])
                at += step
                await asyncio.sleep(0)
            reader.feed_eof()
        return reading.result()

    assert asyncio.run(read()) == b"".join(chunks)


async def test_body_read_after_its_end_is_empty() -> None:
    reader = ResponseReader()
    reader.feed_data(b"1\r\na\r\n0\r\n\r\n")
    response = HttpResponse(CHUNKED, reader)
    assert [await response.read(), await response.read(), await response.piece()] == [
        b"a",
        b"",
        b"",
    ]


async def test_piece_is_available_before_the_end_of_its_chunk() -> None:
    reader = ResponseReader()
    response = HttpResponse(CHUNKED, reader)
    reader.feed_data(b"5\r\nhello")
    assert await response.piece(WAIT_S) == b"hello"
    reader.feed_data(b"\r\n0\r\n\r\n")
    assert await response.piece(WAIT_S) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"+OK ready\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 0x5\r\n\r\nhello",
        OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nhello",
        OK + b"X: " + b"y" * HEAD_BYTES_MAX + b"\r\n\r\n",
        OK + b"X: " + b"y" * (2 * HEAD_BYTES_MAX),
        OK + b"Content-Length: 6\r\n\r\nhello",
        CHUNKED + b"5\r\nhel",
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"nonsense\r\n",
        CHUNKED + b"5;" + b"y" * (2 * HEAD_BYTES_MAX) + b"\r\nhello\r\n0\r\n\r\n",
    ],
)
async def test_invalid_or_truncated_response_raises_unreachable(sent: bytes) -> None:
    async with open_server(sending(sent)) as url:
        with pytest.raises(Unreachable):
            await fetch(url)


async def test_reset_during_a_body_without_length_raises_os_error() -> None:
    async def handler(peer: Peer) -> None:
        await peer.send(OK + b"\r\nhello")
        peer.reset()

    async with open_server(handler, "tcp") as url:
        with pytest.raises(OSError):  # noqa: PT011
            await fetch(url)


async def test_data_after_the_content_length_is_not_read() -> None:
    async with open_server(sending(HELLO + b" and more")) as url:
        assert await fetch(url) == (200, b"hello")


async def test_reset_in_the_middle_of_a_body_raises_os_error() -> None:
    async def handler(peer: Peer) -> None:
        await peer.send(OK + b"Content-Length: 10\r\n\r\nhello")
        peer.reset()

    async with open_server(handler, "tcp") as url:
        with pytest.raises(OSError):  # noqa: PT011
            await fetch(url)


# --- timeouts


@pytest.mark.parametrize(
    "sent", [b"", OK, OK + b"Content-Length: 9\r\n\r\nhel", CHUNKED + b"5\r\nhello"]
)
async def test_hanging_server_raises_timeout_after_the_given_time(sent: bytes) -> None:
    has_sent, ended = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.send(sent)
        has_sent.set()
        try:
            await peer.reader.read()  # Until the client has left.
        finally:
            ended.set()

    async with open_server(handler) as url, open_client(url) as client:
        # On a busy machine the timeout may pass before the server has sent anything.
        while not has_sent.is_set():
            with pytest.raises(TimeoutError):
                await client.request("GET", "/", timeout_s=0.05)
        await ended.wait()


@pytest.mark.parametrize("sent", [b"", b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r\n3"])
async def test_piece_timeout_covers_all_of_its_reads(sent: bytes) -> None:
    reader = ResponseReader()
    response = HttpResponse(CHUNKED, reader)
    reader.feed_data(sent)
    if b"hel" in sent:
        assert (await response.piece(WAIT_S)).startswith(b"hel")
    with pytest.raises(TimeoutError):
        await response.piece(0.01)


# --- requests


async def test_id_that_is_not_utf_8_can_be_requested() -> None:
    info = Workspace(WorkspaceId("w"), "/", Config())
    async with open_client("unix:///nowhere/s") as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), info)
        with pytest.raises(Unreachable):  # The request was attempted.
            await workspace.run(os.fsdecode(b"\xff"))


@BOTH_TRANSPORTS
@pytest.mark.parametrize("then", ["hangs up", "goes on", "resets"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_refusal_sent_during_a_large_request_is_read(
    transport_kind: str, then: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readexactly(100_000)
        await peer.send(REFUSED)
        match then:
            case "goes on":  # It neither reads nor closes.
                await asyncio.Event().wait()
            case "resets":
                await asyncio.sleep(0.05)
                peer.reset()
            case _:
                pass

    async def ask() -> None:
        async with open_server(handler, transport_kind) as url, open_client(url) as client:
            await client.request("POST", "/", Prompt("s", LARGE.decode()), timeout_s=WAIT_S)

    with (
        asyncio.Runner(loop_factory=loop) as runner,
        pytest.raises(RequestRefused, match="no more") as refused,
    ):
        runner.run(ask())
    assert (refused.value.status, refused.value.code) == (413, "large")


@BOTH_TRANSPORTS
async def test_large_body_arrives_whole(transport_kind: str) -> None:
    received: list[bytes] = []

    async def handler(peer: Peer) -> None:
        received.append(await peer.reader.readexactly(len(LARGE)))
        await peer.send(HELLO)

    async with open_server(handler, transport_kind) as url:
        assert await fetch(url, LARGE) == (200, b"hello")
    assert received == [LARGE]


async def test_server_that_closes_during_a_large_body_raises_os_error() -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.readexactly(100_000)

    async with open_server(handler) as url:
        with pytest.raises(OSError):  # noqa: PT011
            await fetch(url, LARGE)


async def test_request_has_host_length_and_path_prefix() -> None:
    heads: list[bytes] = []

    async def handler(peer: Peer) -> None:
        heads.append(peer.head)
        await peer.send(HELLO)

    async with open_server(handler, "tcp") as url:
        address = parse_address(f"http{url.removeprefix('tcp')}/below/culm/")
        async with HttpTransport(address, {"X-Name": "value"}).open("PUT", "/v1/x?y=1") as response:
            assert await response.read() == b"hello"
    assert heads == [
        f"PUT /below/culm/v1/x?y=1 HTTP/1.1\r\nHost: {address.host}\r\nX-Name: value\r\n"
        "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
    ]


# --- addresses


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/culm.sock", ServerAddress("culm.localhost", socket="/run/culm.sock")),
        ("tcp://127.0.0.1:7777", ServerAddress("127.0.0.1:7777", name="127.0.0.1", port=7777)),
        ("tcp://[::1]:7777", ServerAddress("[::1]:7777", name="::1", port=7777)),
        ("http://h/", ServerAddress("h", name="h", port=80)),
        ("http://h:81/a/b/", ServerAddress("h:81", name="h", port=81, prefix="/a/b")),
        (
            "https://H.example",
            ServerAddress("H.example", name="h.example", port=443, is_tls=True),
        ),
        (
            "https://u:p@h:8443/c",
            ServerAddress("h:8443", "", "h", 8443, is_tls=True, prefix="/c"),
        ),
    ],
)
def test_address_is_parsed_into_socket_host_port_and_prefix(
    url: str, address: ServerAddress
) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h:1", "tcp://:1", "tcp://h:x", "tcp://h:99999", "tcp://[::1:2"]
)
def test_invalid_address_raises_value_error(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_address(url)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_server_is_reached_by_ipv6() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server, asyncio.timeout(WAIT_S):
        port = server.sockets[0].getsockname()[1]
        assert await fetch(f"tcp://[::1]:{port}") == (200, b"hello")


async def test_missing_server_raises_the_system_error_text() -> None:
    for url, reason in [
        ("unix:///nowhere/s", os.strerror(errno.ENOENT)),
        ("tcp://127.0.0.1:1", os.strerror(errno.ECONNREFUSED)),
    ]:
        with pytest.raises(Unreachable, match=reason):
            await fetch(url)


async def test_unresolvable_host_has_a_specific_error() -> None:
    with pytest.raises(Unreachable) as unreachable:
        await fetch("tcp://nobody.invalid:1")
    assert "Unknown error" not in str(unreachable.value)


# --- encoding


async def test_invalid_utf_8_is_replaced_in_requests() -> None:
    bodies: list[bytes] = []

    async def handler(peer: Peer) -> None:
        length = int(peer.head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        bodies.append(await peer.reader.readexactly(length))
        await peer.send(OK + b"Content-Length: 0\r\n\r\n")

    odd = os.fsdecode(b"a\xff")  # Such text comes from arguments and environment variables.
    async with open_server(handler) as url, open_client(url) as client:
        file = Attachment(odd, odd, "text/plain", b"\xff")
        await client.request("POST", "/", Prompt("s", odd, "", [file]))
    assert decode(bodies[0], Prompt) == Prompt(
        "s", "a\ufffd", "", [Attachment("a\ufffd", "a\ufffd", "text/plain", b"\xff")]
    )
