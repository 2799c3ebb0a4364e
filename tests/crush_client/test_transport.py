"""The transport sends the bytes that Go sends and distinguishes the endings of a response."""

import asyncio
import gzip
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.crush_client.api import STREAM_HEADERS, Api, NoAnswer, StatusError
from tests.crush_client.servers import open_script, read_request
from tests.crush_client.transport import (
    Request,
    TcpHost,
    Transport,
    TransportError,
    UnexpectedEof,
    UnixHost,
    parse_host,
)
from tests.support import WAIT_S

UNIX, TCP = UnixHost(Path("/s")), TcpHost("127.0.0.1", 7777, "127.0.0.1:7777")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def open_transport(folder: Path, *answers: bytes) -> AsyncGenerator[Transport]:
    """Open a transport to a socket that gives one of these answers per connection."""
    left = list(answers)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0)
        await read_request(reader)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with open_script(folder, script) as url, asyncio.timeout(WAIT_S):
        transport = Transport(parse_host(url))
        try:
            yield transport
        finally:
            await transport.aclose()


# --- requests


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("unix:///run/user/1000/crush.sock", UnixHost(Path("/run/user/1000/crush.sock"))),
        ("tcp://127.0.0.1:7777", TCP),
        ("tcp://127.0.0.1:7777/some/path", TCP),
        ("tcp://[::1]:7777", TcpHost("::1", 7777, "[::1]:7777")),
    ],
)
def test_host_is_parsed_from_its_url(url: str, host: UnixHost | TcpHost) -> None:
    assert parse_host(url) == host


def test_host_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid host format"):
        parse_host("127.0.0.1:7777")


def test_get_over_a_unix_socket_has_two_headers() -> None:
    assert Request("GET", "/v1/health").encode(UNIX) == (
        b"GET /v1/health HTTP/1.1\r\nHost: api.crush.localhost\r\n"
        b"User-Agent: Go-http-client/1.1\r\n\r\n"
    )


def test_post_without_a_body_has_length_0_and_tcp_accepts_gzip() -> None:
    assert Request("POST", "/v1/x").encode(TCP) == (
        b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:7777\r\nUser-Agent: Go-http-client/1.1\r\n"
        b"Content-Length: 0\r\nAccept-Encoding: gzip\r\n\r\n"
    )


def test_stream_request_has_its_three_headers() -> None:
    assert Request("GET", "/v1/e", None, STREAM_HEADERS).encode(UNIX) == (
        b"GET /v1/e HTTP/1.1\r\nHost: api.crush.localhost\r\nUser-Agent: Go-http-client/1.1\r\n"
        b"Accept: text/event-stream\r\nCache-Control: no-cache\r\nConnection: keep-alive\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("number", "kind"), [(4, b"text/plain"), (7, b"application/json"), (36, b"application/json")]
)
async def test_json_body_has_a_content_type_except_for_control(
    tmp_path: Path, number: int, kind: bytes
) -> None:
    requests: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(OK)

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        await api.call(number, {"a": "<"})
        await api.transport.aclose()
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert b"\r\nContent-Type: " + kind in head
    assert body == rb'{"a":"\u003c"}'


# --- responses


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.0 200 OK\r\n\r\n{}",
    ],
)
async def test_every_framing_gives_the_same_body(tmp_path: Path, answer: bytes) -> None:
    async with open_transport(tmp_path, answer) as transport:
        answer_read = await transport.exchange(Request("GET", "/"))
    assert (answer_read.status, answer_read.body) == (200, b"{}")


async def test_compressed_body_is_decompressed(tmp_path: Path) -> None:
    data = gzip.compress(b"{}")
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(data)}\r\n\r\n"
    async with open_transport(tmp_path, head.encode() + data) as transport:
        assert (await transport.exchange(Request("GET", "/"))).body == b"{}"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
    ],
)
async def test_truncated_body_is_an_unexpected_eof(tmp_path: Path, answer: bytes) -> None:
    async with open_transport(tmp_path, answer) as transport:
        with pytest.raises(UnexpectedEof):
            await transport.exchange(Request("GET", "/"))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"what?\r\n\r\n"])
async def test_incomplete_head_is_a_failed_request(tmp_path: Path, answer: bytes) -> None:
    async with open_transport(tmp_path, answer) as transport:
        with pytest.raises(TransportError):
            await transport.exchange(Request("GET", "/"))


# --- connections


async def test_connection_is_reused_and_a_get_is_retried_after_its_end(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await read_request(reader)
            writer.write(OK)
        await read_request(reader)  # The third gets no answer.
        writer.close()

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        transport = Transport(parse_host(url))
        for _ in range(2):
            await transport.exchange(Request("GET", "/"))
        assert transport.dials == 1
        await transport.exchange(Request("GET", "/"))
        assert transport.dials == 2
        await transport.aclose()


async def test_post_on_a_lost_connection_is_not_sent_twice(tmp_path: Path) -> None:
    requests: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        requests.append(await read_request(reader))
        writer.close()

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        transport = Transport(parse_host(url))
        await transport.exchange(Request("GET", "/"))
        with pytest.raises(TransportError):
            await transport.exchange(Request("POST", "/"))
        await transport.aclose()
    assert len(requests) == 1


# --- success and failure (§14.1)


def response(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((n, "status code 500: what") for n in (5, 7, 9, 10, 12, 35, 36, 66)),
        *((n, "status code 500") for n in (6, 11, 14, 16, 20, 30, 37, 40, 44, 63)),
    ],
)
async def test_error_shows_its_message_on_eight_routes_only(
    tmp_path: Path, number: int, text: str
) -> None:
    async with open_transport(tmp_path, response(500, b'{"message": "what"}')) as transport:
        with pytest.raises(StatusError) as caught:
            await Api(transport, "c").call(number, sid="s")
    assert str(caught.value) == text


async def test_error_without_a_readable_message_shows_its_status(tmp_path: Path) -> None:
    async with open_transport(tmp_path, response(404, b"404 page not found\n")) as transport:
        with pytest.raises(StatusError, match=r"^status code 404$"):
            await Api(transport, "c").call(35)


@pytest.mark.parametrize("status", [201, 202, 204, 301])
async def test_only_200_is_success(tmp_path: Path, status: int) -> None:
    body = b"" if status == 204 else b"{}"
    async with open_transport(tmp_path, response(status, body)) as transport:
        with pytest.raises(StatusError):
            await Api(transport, "c").call(15, {})


@pytest.mark.parametrize("status", [200, 202])
async def test_accepted_prompt_may_be_200_or_202(tmp_path: Path, status: int) -> None:
    async with open_transport(tmp_path, response(status, b"")) as transport:
        assert await Api(transport, "c").call(36, {}) is None


async def test_empty_response_is_an_empty_list_for_messages_only(tmp_path: Path) -> None:
    for number in (20, 21, 22):
        async with open_transport(tmp_path, response(200, b"")) as transport:
            assert await Api(transport, "c").call(number, sid="s") == []
    async with open_transport(tmp_path, response(200, b"")) as transport:
        with pytest.raises(NoAnswer, match="EOF"):
            await Api(transport, "c").call(14)
