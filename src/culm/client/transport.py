"""The part of HTTP/1.1 that the client needs, over a unix socket, TCP or TLS.

Owns connections: one per request; closing it is also how a stream ends. Written by hand because
aiohttp's client takes 200 ms to import, longer than everything else a command does (ADR 0022).
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from msgspec import Struct

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
HEAD_BYTES_MAX = 64 << 10
PIECE_BYTES = 64 << 10  # Sent or read at once.

NOT_HTTP = "the peer does not speak HTTP"
CUT_OFF = "the response was cut off"
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
_LENGTH = re.compile(r"[0-9]{1,15}")
_PORTS = {"http": 80, "https": 443}


class Unreachable(ConnectionError):
    """No connection, a peer that does not speak HTTP, or a response that was cut off."""


class ServerAddress(Struct, frozen=True):
    """The address of a server."""

    host: str  # The value of the Host header.
    socket: str = ""  # The path of a unix socket, or else ...
    name: str = ""  # ... a host name or IP address, and a port.
    port: int = 0
    is_tls: bool = False
    prefix: str = ""  # Prepended to every path, for a server behind a proxy.


def parse_address(url: str) -> ServerAddress:
    """Parse `unix:///path`, `tcp://host:port`, `http://…` or `https://…`; raises `ValueError`."""
    if url.startswith("unix://"):
        return ServerAddress("culm.localhost", socket=url.removeprefix("unix://"))
    parts = urlsplit(url)  # Raises `ValueError` for wrong brackets or ports.
    scheme = "http" if parts.scheme == "tcp" else parts.scheme
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not an address")
    parts.hostname.encode("idna")  # As a lookup does; raises a `ValueError`, too.
    return ServerAddress(
        parts.netloc.rpartition("@")[2],
        name=parts.hostname,
        port=parts.port or _PORTS[scheme],
        is_tls=scheme == "https",
        prefix=parts.path.rstrip("/"),
    )


class ResponseReader(asyncio.StreamReader):
    """A reader that returns all received data before it reports a broken connection.

    asyncio's reader drops that data: the response of a server that refuses a body and closes the
    connection would be lost.
    """

    is_broken = False

    def set_exception(self, exc: Exception) -> None:
        self.is_broken = True
        self.feed_eof()


class HttpResponse:
    """A response after its head has arrived; the body is read in pieces or as a whole."""

    def __init__(self, head: bytes, reader: ResponseReader) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        code, _, self.reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not (code.isdecimal() and len(code) == 3):
            raise Unreachable(NOT_HTTP)
        self.status = int(code)
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._reader = reader
        self._is_in_chunk = False  # The line that ends the last chunk was not read yet.
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        # Bytes left of the body or of the chunk; None means until the end of the connection.
        self._left = 0 if self._is_chunked else self._length()

    async def read(self) -> bytes:
        """Return the rest of the body."""
        pieces: list[bytes] = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def piece(self, timeout_s: float | None = None) -> bytes:
        """Return more of the body as soon as it arrives, and nothing at its end and after it.

        Raises `TimeoutError` if nothing comes, and `OSError` if the connection broke.
        """
        async with asyncio.timeout(timeout_s):
            if self._is_chunked and self._left == 0:
                self._left = await self._chunk_bytes()
                self._is_chunked = self._left > 0
            if self._left == 0:
                return b""
            piece = await self._reader.read(min(self._left or PIECE_BYTES, PIECE_BYTES))
        if not piece and (self._left is not None or self._reader.is_broken):
            raise Unreachable(CUT_OFF)
        if self._left is None:
            return piece
        self._left -= len(piece)
        self._is_in_chunk = self._is_chunked
        return piece

    def _length(self) -> int | None:
        length = self.headers.get("content-length")
        if length is None:
            return None
        if not _LENGTH.fullmatch(length):
            raise Unreachable(NOT_HTTP)
        return int(length)

    async def _chunk_bytes(self) -> int:
        """The size of the next chunk. Its head is read only when the chunk is needed."""
        try:
            if self._is_in_chunk:
                await self._reader.readline()  # The end of the previous chunk.
                self._is_in_chunk = False
            head = _CHUNK.fullmatch(await self._reader.readline())
        except ValueError:  # A line that is too long.
            raise Unreachable(NOT_HTTP) from None
        if head is None:
            raise Unreachable(CUT_OFF)
        return int(head[1], 16)


class HttpTransport:
    """Sends requests to one server."""

    def __init__(self, address: ServerAddress, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = {"Host": address.host, **headers, "Connection": "close"}
        self._context = ssl.create_default_context() if address.is_tls else None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[HttpResponse]:
        """Send a request and wait for the head of the response; the caller bounds the wait.

        Raises `OSError` without a response; `Unreachable` and `TimeoutError` are subclasses.
        """
        reader, writer = await self._connect()
        try:
            yield HttpResponse(await self._exchange(reader, writer, method, path, body), reader)
        finally:
            writer.transport.abort()  # Nothing is left to send.

    async def _exchange(
        self,
        reader: ResponseReader,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        body: bytes,
    ) -> bytes:
        """Send a request and return the response head, which may arrive before all is sent."""
        writer.write(self._head(method, path, body))
        if len(body) <= PIECE_BYTES:
            writer.write(body)
            return await _read_head(reader)
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(_send(writer, body), name=f"send to {path}")
                head = await _read_head(reader)
                sending.cancel()
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from None
        return head

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        lines = [f"{method} {self._address.prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if body or method in ("POST", "PUT"):
            lines.append(f"Content-Length: {len(body)}")
        if body:
            lines.append("Content-Type: application/json")
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1")

    async def _connect(self) -> tuple[ResponseReader, asyncio.StreamWriter]:
        address, loop = self._address, asyncio.get_running_loop()
        reader = ResponseReader(HEAD_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if address.socket:
                    transport, _ = await loop.create_unix_connection(
                        lambda: protocol, address.socket
                    )
                else:
                    transport, _ = await loop.create_connection(
                        lambda: protocol, address.name, address.port, ssl=self._context
                    )
            return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        except TimeoutError as exc:
            raise Unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise Unreachable(_reason(exc)) from exc


async def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    # A server that refuses a body may respond and close before it has received all of it.
    with suppress(ConnectionError):
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            writer.write(view[start : start + PIECE_BYTES])
            await writer.drain()
            await asyncio.sleep(0)  # Read the received data before a write can fail.


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as exc:
        raise Unreachable(NOT_HTTP if exc.partial else "the connection was closed") from None
    except asyncio.LimitOverrunError:
        raise Unreachable(NOT_HTTP) from None


def _reason(exc: OSError) -> str:
    """The text of the system for an error; TLS and name lookups have their own numbers."""
    if exc.errno is None or isinstance(exc, ssl.SSLError | socket.gaierror):
        return exc.strerror or str(exc)
    return os.strerror(exc.errno)
