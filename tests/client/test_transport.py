"""Our HTTP against servers that cut, lie, break off and hang: raw sockets, byte by byte."""

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
from culm.wire.agent import Attachment, Prompt
from culm.wire.codec import decode
from culm.wire.config import Config
from culm.wire.workspaces import CreateWorkspace, Workspace
from tests.support import WAIT_S

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = (
    b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 36\r\n\r\n"
    b'{"message":"no more","code":"large"}'
)
LARGE = b"x" * (32 << 20)  # More than the kernel holds for one who does not read.
BOTH = pytest.mark.parametrize("way", ["unix", "tcp"])


@dataclass
class Peer:
    """One connection as the other side sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: bytes  # The head of the request.

    async def say(self, *pieces: bytes) -> None:
        """Each of them a write of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    def reset(self) -> None:
        """Break off without a goodbye, with what is unread."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Answering = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def open_hostile(answering: Answering, way: str = "unix") -> AsyncGenerator[str]:
    """The address of a server that does this with each connection, and hangs up."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            await answering(Peer(reader, writer, await reader.readuntil(b"\r\n\r\n")))
        writer.close()

    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        if way == "unix":
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


async def answered(url: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one answer."""
    transport = HttpTransport(parse_address(url), {})
    async with transport.open("POST" if body else "GET", "/", body) as answer:
        return answer.status, await answer.read()


def saying(*pieces: bytes) -> Answering:
    async def say(peer: Peer) -> None:
        await peer.say(*pieces)

    return say


# --- what is read


@BOTH
@pytest.mark.parametrize(
    ("said", "body"),
    [
        (HELLO, b"hello"),
        (OK + b"\r\nuntil the end", b"until the end"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"2;name=value\r\nhe\r\n00003 ; x\r\nllo\r\n0\r\nTrailer: x\r\n\r\n", b"hello"),
        (OK + b"content-LENGTH:0\r\n\r\n", b""),
        (CHUNKED + b"0\r\n\r\n", b""),
    ],
)
async def test_an_answer_that_comes_byte_by_byte_is_the_same_answer(
    said: bytes, body: bytes, way: str
) -> None:
    async with open_hostile(saying(*(said[n : n + 1] for n in range(len(said)))), way) as url:
        assert await answered(url) == (200, body)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    extension=st.sampled_from([b"", b";a=b", b' ; q="x"']),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_a_chunked_body_is_its_chunks_however_it_is_cut(
    chunks: list[bytes], extension: bytes, cuts: list[int]
) -> None:
    whole = b"".join(b"%x%s\r\n%s\r\n" % (len(one), extension, one) for one in chunks)
    whole += b"0\r\n\r\n"

    async def read() -> bytes:
        reader = ResponseReader()
        answer = HttpResponse(CHUNKED, reader)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(answer.read())
            at = 0
            while at < len(whole):
                step = cuts[at % len(cuts)]
                reader.feed_data(whole[at : at + step])
                at += step
                await asyncio.sleep(0)
            reader.feed_eof()
        return reading.result()

    assert asyncio.run(read()) == b"".join(chunks)


async def test_a_body_at_its_end_has_no_more_however_often_it_is_asked() -> None:
    reader = ResponseReader()
    reader.feed_data(b"1\r\na\r\n0\r\n\r\n")
    answer = HttpResponse(CHUNKED, reader)
    assert [await answer.read(), await answer.read(), await answer.piece()] == [b"a", b"", b""]


async def test_a_piece_is_there_before_the_line_that_ends_its_chunk() -> None:
    reader = ResponseReader()
    answer = HttpResponse(CHUNKED, reader)
    reader.feed_data(b"5\r\nhello")
    assert await answer.piece(WAIT_S) == b"hello"
    reader.feed_data(b"\r\n0\r\n\r\n")
    assert await answer.piece(WAIT_S) == b""


@pytest.mark.parametrize(
    "said",
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
async def test_what_is_no_whole_answer_is_unreachable(said: bytes) -> None:
    async with open_hostile(saying(said)) as url:
        with pytest.raises(Unreachable):
            await answered(url)


async def test_a_body_without_a_length_that_is_reset_has_not_come_to_its_end() -> None:
    async def answering(peer: Peer) -> None:
        await peer.say(OK + b"\r\nhello")
        peer.reset()

    async with open_hostile(answering, "tcp") as url:
        with pytest.raises(OSError):  # noqa: PT011
            await answered(url)


async def test_more_than_was_announced_is_not_read() -> None:
    async with open_hostile(saying(HELLO + b" and more")) as url:
        assert await answered(url) == (200, b"hello")


async def test_a_connection_that_is_reset_in_the_middle_of_a_body_is_an_error_of_the_system() -> (
    None
):
    async def answering(peer: Peer) -> None:
        await peer.say(OK + b"Content-Length: 10\r\n\r\nhello")
        peer.reset()

    async with open_hostile(answering, "tcp") as url:
        with pytest.raises(OSError):  # noqa: PT011
            await answered(url)


# --- what hangs


@pytest.mark.parametrize(
    "said", [b"", OK, OK + b"Content-Length: 9\r\n\r\nhel", CHUNKED + b"5\r\nhello"]
)
async def test_a_server_that_hangs_is_waited_for_as_long_as_its_caller_says(said: bytes) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def answering(peer: Peer) -> None:
        began.set()
        await peer.say(said)
        await peer.reader.read()  # Until the client has left.
        ended.set()

    async with open_hostile(answering) as url, open_client(url) as client:
        while not began.is_set():  # On a busy machine the time may pass before it is asked.
            with pytest.raises(TimeoutError):
                await client.request("GET", "/", timeout_s=0.05)
        await ended.wait()


@pytest.mark.parametrize("said", [b"", b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r\n3"])
async def test_the_bound_for_a_piece_is_for_all_that_it_waits_for(said: bytes) -> None:
    reader = ResponseReader()
    answer = HttpResponse(CHUNKED, reader)
    reader.feed_data(said)
    if b"hel" in said:
        assert (await answer.piece(WAIT_S)).startswith(b"hel")
    with pytest.raises(TimeoutError):
        await answer.piece(0.01)


# --- what is sent


async def test_a_name_that_is_not_utf_8_is_the_name_of_nothing() -> None:
    info = Workspace(WorkspaceId("w"), "/", Config())
    async with open_client("unix:///nowhere/s") as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), info)
        with pytest.raises(Unreachable):  # It was asked for.
            await workspace.run(os.fsdecode(b"\xff"))


@BOTH
@pytest.mark.parametrize("then", ["hangs up", "goes on", "resets"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_refusal_that_comes_while_a_large_body_is_sent_is_read(
    way: str, then: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def answering(peer: Peer) -> None:
        await peer.reader.readexactly(100_000)
        await peer.say(REFUSED)
        match then:
            case "goes on":  # It neither reads nor closes.
                await asyncio.Event().wait()
            case "resets":
                await asyncio.sleep(0.05)
                peer.reset()
            case _:
                pass

    async def ask() -> None:
        async with open_hostile(answering, way) as url, open_client(url) as client:
            await client.request("POST", "/", Prompt("s", LARGE.decode()), timeout_s=WAIT_S)

    with (
        asyncio.Runner(loop_factory=loop) as runner,
        pytest.raises(RequestRefused, match="no more") as refused,
    ):
        runner.run(ask())
    assert (refused.value.status, refused.value.code) == (413, "large")


@BOTH
async def test_a_large_body_arrives_whole(way: str) -> None:
    got: list[bytes] = []

    async def answering(peer: Peer) -> None:
        got.append(await peer.reader.readexactly(len(LARGE)))
        await peer.say(HELLO)

    async with open_hostile(answering, way) as url:
        assert await answered(url, LARGE) == (200, b"hello")
    assert got == [LARGE]


async def test_a_server_that_takes_a_large_body_and_hangs_up_is_unreachable() -> None:
    async def answering(peer: Peer) -> None:
        await peer.reader.readexactly(100_000)

    async with open_hostile(answering) as url:
        with pytest.raises(OSError):  # noqa: PT011
            await answered(url, LARGE)


async def test_a_request_names_its_host_its_length_and_what_goes_before_its_path() -> None:
    asked: list[bytes] = []

    async def answering(peer: Peer) -> None:
        asked.append(peer.asked)
        await peer.say(HELLO)

    async with open_hostile(answering, "tcp") as url:
        address = parse_address(f"http{url.removeprefix('tcp')}/below/culm/")
        async with HttpTransport(address, {"X-Name": "value"}).open("PUT", "/v1/x?y=1") as answer:
            assert await answer.read() == b"hello"
    assert asked == [
        f"PUT /below/culm/v1/x?y=1 HTTP/1.1\r\nHost: {address.host}\r\nX-Name: value\r\n"
        "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
    ]


# --- where it is


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
            ServerAddress("H.example", name="h.example", port=443, is_secret=True),
        ),
        (
            "https://u:p@h:8443/c",
            ServerAddress("h:8443", "", "h", 8443, is_secret=True, prefix="/c"),
        ),
    ],
)
def test_an_address_says_whom_to_connect_to_and_how_to_name_it(
    url: str, address: ServerAddress
) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h:1", "tcp://:1", "tcp://h:x", "tcp://h:99999", "tcp://[::1:2"]
)
def test_what_is_no_address_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_address(url)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_a_server_is_reached_by_ipv6() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server, asyncio.timeout(WAIT_S):
        port = server.sockets[0].getsockname()[1]
        assert await answered(f"tcp://[::1]:{port}") == (200, b"hello")


async def test_who_is_not_there_is_told_in_the_words_of_the_system() -> None:
    for url, reason in [
        ("unix:///nowhere/s", os.strerror(errno.ENOENT)),
        ("tcp://127.0.0.1:1", os.strerror(errno.ECONNREFUSED)),
    ]:
        with pytest.raises(Unreachable, match=reason):
            await answered(url)


async def test_a_name_that_nobody_knows_is_told_as_such() -> None:
    with pytest.raises(Unreachable) as unreachable:
        await answered("tcp://nobody.invalid:1")
    assert "Unknown error" not in str(unreachable.value)


# --- what is sent


async def test_what_is_not_utf_8_is_sent_as_far_as_it_can_be() -> None:
    bodies: list[bytes] = []

    async def take(peer: Peer) -> None:
        length = int(peer.asked.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        bodies.append(await peer.reader.readexactly(length))
        await peer.say(OK + b"Content-Length: 0\r\n\r\n")

    odd = os.fsdecode(b"a\xff")  # As an argument, or a variable of the environment, has it.
    async with open_hostile(take) as url, open_client(url) as client:
        file = Attachment(odd, odd, "text/plain", b"\xff")
        await client.request("POST", "/", Prompt("s", odd, "", [file]))
    assert decode(bodies[0], Prompt) == Prompt(
        "s", "a\ufffd", "", [Attachment("a\ufffd", "a\ufffd", "text/plain", b"\xff")]
    )
