"""HTTP/1.1 as far as a client of ours speaks it: over a unix socket, TCP or TLS.

Owns connections: one for each request, which is also how a stream ends. Written by hand because
aiohttp's client takes 200 ms to import, longer than all else a command does (ADR 0022).
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 5.0
HEAD_BYTES_MAX = 64 << 10
PIECE_BYTES = 64 << 10  # Of what is sent or read at once.

NO_HTTP = "what answers does not speak HTTP"
BROKE_OFF = "the answer broke off"
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n", re.DOTALL)
_LENGTH = re.compile(r"[0-9]{1,15}")
_PORTS = {"http": 80, "https": 443}


class Unreachable(ConnectionError):
    """Nobody answers, what answers does not speak HTTP, or it broke off."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is."""

    host: str  # As the head of a request names it.
    socket: str = ""  # The path of a unix socket; else ...
    name: str = ""  # ... a name or number, and a port.
    port: int = 0
    is_secret: bool = False  # By TLS.
    prefix: str = ""  # Of every path, where a server is behind another.


def parse_address(url: str) -> ServerAddress:
    """`unix:///path`, `tcp://host:port`, `http://…` or `https://…`; raises `ValueError`."""
    if url.startswith("unix://"):
        return ServerAddress("culm.localhost", socket=url.removeprefix("unix://"))
    parts = urlsplit(url)  # What is wrong with brackets or a port is a `ValueError`, too.
    scheme = "http" if parts.scheme == "tcp" else parts.scheme
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not an address")
    parts.hostname.encode("idna")  # As whoever looks it up does; of this, too.
    return ServerAddress(
        parts.netloc.rpartition("@")[2],
        name=parts.hostname,
        port=parts.port or _PORTS[scheme],
        is_secret=scheme == "https",
        prefix=parts.path.rstrip("/"),
    )


class ResponseReader(asyncio.StreamReader):
    """Gives all that has arrived before it tells that the connection broke.

    asyncio's own drops it: a server that refuses a body and closes has then not answered.
    """

    is_broken = False

    def set_exception(self, exc: Exception) -> None:
        self.is_broken = True
        self.feed_eof()


class HttpResponse:
    """A response whose head has arrived; its body is read piece by piece, or whole."""

    def __init__(self, head: bytes, reader: ResponseReader) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        code, _, self.reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not (code.isdecimal() and len(code) == 3):
            raise Unreachable(NO_HTTP)
        self.status = int(code)
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._reader = reader
        self._is_in_chunk = False  # Its last bytes were read, and not the line that ends it.
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        # How much is to come of the body, or of a chunk. None: as much as there is.
        self._left = 0 if self._is_chunked else self._length()

    async def read(self) -> bytes:
        """All that is left of the body."""
        pieces: list[bytes] = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def piece(self, timeout_s: float | None = None) -> bytes:
        """More of the body as soon as there is some; nothing at its end, however often it is asked.

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
            raise Unreachable(BROKE_OFF)
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
            raise Unreachable(NO_HTTP)
        return int(length)

    async def _chunk_bytes(self) -> int:
        """How much the next chunk has. Its head is waited for only when it is wanted."""
        try:
            if self._is_in_chunk:
                await self._reader.readline()  # The end of the one before.
                self._is_in_chunk = False
            head = _CHUNK.fullmatch(await self._reader.readline())
        except ValueError:  # A line without an end.
            raise Unreachable(NO_HTTP) from None
        if head is None:
            raise Unreachable(BROKE_OFF)
        return int(head[1], 16)


class HttpTransport:
    """Sends requests to one server."""

    def __init__(self, address: ServerAddress, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = {"Host": address.host, **headers, "Connection": "close"}
        self._context = ssl.create_default_context() if address.is_secret else None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[HttpResponse]:
        """Send a request and wait for the head of its answer; the caller bounds that.

        Raises `OSError` if there is none, of which `Unreachable` and `TimeoutError` are kinds.
        """
        reader, writer = await self._connect()
        try:
            yield HttpResponse(await self._exchange(reader, writer, method, path, body), reader)
        finally:
            writer.transport.abort()  # There is nothing left to send, whoever left first.

    async def _exchange(
        self,
        reader: ResponseReader,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        body: bytes,
    ) -> bytes:
        """Send a request; the head of its answer, which may come before all of it was taken."""
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
        where, loop = self._address, asyncio.get_running_loop()
        reader = ResponseReader(HEAD_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if where.socket:
                    transport, _ = await loop.create_unix_connection(lambda: protocol, where.socket)
                else:
                    transport, _ = await loop.create_connection(
                        lambda: protocol, where.name, where.port, ssl=self._context
                    )
            return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        except TimeoutError as exc:
            raise Unreachable(f"nobody accepts within {CONNECT_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise Unreachable(_reason(exc)) from exc


async def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    # A server that refuses a body may close before it has all of it, and has answered.
    with suppress(ConnectionError):
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            writer.write(view[start : start + PIECE_BYTES])
            await writer.drain()
            await asyncio.sleep(0)  # What has come meanwhile is read before a write can fail.


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as exc:
        raise Unreachable(NO_HTTP if exc.partial else "it hung up") from None
    except asyncio.LimitOverrunError:
        raise Unreachable(NO_HTTP) from None


def _reason(exc: OSError) -> str:
    """In the system's words; TLS and the look-up of names have numbers of their own."""
    if exc.errno is None or isinstance(exc, ssl.SSLError | socket.gaierror):
        return exc.strerror or str(exc)
    return os.strerror(exc.errno)
