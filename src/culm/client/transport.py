"""HTTP/1.1 as far as a client of ours speaks it: over a unix socket, TCP or TLS.

Owns connections: one for each request, which is also how a stream ends. Written by hand because
aiohttp's client takes 200 ms to import, longer than all else a command does (ADR 0022).
"""

import asyncio
import os
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
_PORTS = {"http": 80, "https": 443}


class Unreachable(ConnectionError):
    """Nobody answers, what answers does not speak HTTP, or it broke off."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    host: str  # As the head of a request names it.
    socket: str = ""  # The path of a unix socket; else ...
    name: str = ""  # ... a name or number, and a port.
    port: int = 0
    is_secret: bool = False  # By TLS.
    prefix: str = ""  # Of every path, where a server is behind another.


def parse_address(url: str) -> Address:
    """`unix:///path`, `tcp://host:port`, `http://…` or `https://…`; raises `ValueError`."""
    if url.startswith("unix://"):
        return Address("culm.localhost", socket=url.removeprefix("unix://"))
    parts = urlsplit(url)
    scheme = "http" if parts.scheme == "tcp" else parts.scheme
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not an address")
    return Address(
        parts.netloc.rpartition("@")[2],
        name=parts.hostname,
        port=parts.port or _PORTS[scheme],
        is_secret=scheme == "https",
        prefix=parts.path.rstrip("/"),
    )


class Answer:
    """A response whose head has arrived; its body is read piece by piece, or whole."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader) -> None:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        code, _, self.reason = rest.partition(" ")
        if not version.startswith("HTTP/1.") or not (code.isdecimal() and len(code) == 3):
            raise Unreachable(NO_HTTP)
        self.status = int(code)
        pairs = (line.partition(":") for line in lines if line)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._reader = reader
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
        """More of the body as soon as there is some; nothing at its end."""
        async with asyncio.timeout(timeout_s):
            if self._is_chunked and self._left == 0:
                self._left = await self._chunk_bytes()
            if self._left == 0:
                return b""
            piece = await self._reader.read(min(self._left or PIECE_BYTES, PIECE_BYTES))
        if self._left is None:
            return piece
        if not piece:
            raise Unreachable(BROKE_OFF)
        self._left -= len(piece)
        if self._is_chunked and self._left == 0:
            await self._reader.readline()
        return piece

    def _length(self) -> int | None:
        length = self.headers.get("content-length")
        if length is None:
            return None
        if not length.isdecimal():
            raise Unreachable(NO_HTTP)
        return int(length)

    async def _chunk_bytes(self) -> int:
        line = await self._reader.readline()
        try:
            return int(line.split(b";")[0], 16)
        except ValueError:
            raise Unreachable(BROKE_OFF) from None


class Transport:
    """Sends requests to one server."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = {"Host": address.host, **headers, "Connection": "close"}
        self._context = ssl.create_default_context() if address.is_secret else None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[Answer]:
        """Send a request and wait for the head of its answer; the caller bounds that.

        Raises `OSError` if there is none, of which `Unreachable` and `TimeoutError` are kinds.
        """
        reader, writer = await self._connect()
        try:
            # A server that refuses a body may close before it has all of it, and has answered.
            with suppress(ConnectionError):
                await self._send(writer, method, path, body)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as exc:
                raise Unreachable(NO_HTTP if exc.partial else "it hung up") from None
            except asyncio.LimitOverrunError:
                raise Unreachable(NO_HTTP) from None
            yield Answer(head, reader)
        finally:
            writer.transport.abort()  # There is nothing left to send, whoever left first.

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if where.socket:
                    return await asyncio.open_unix_connection(where.socket, limit=HEAD_BYTES_MAX)
                return await asyncio.open_connection(
                    where.name, where.port, ssl=self._context, limit=HEAD_BYTES_MAX
                )
        except TimeoutError as exc:
            raise Unreachable(f"nobody accepts within {CONNECT_TIMEOUT_S:g} s") from exc
        except OSError as exc:
            known = (
                os.strerror(exc.errno) if exc.errno and not isinstance(exc, ssl.SSLError) else ""
            )
            raise Unreachable(known or str(exc)) from exc

    async def _send(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
    ) -> None:
        lines = [f"{method} {self._address.prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if body or method in ("POST", "PUT"):
            lines.append(f"Content-Length: {len(body)}")
        if body:
            lines.append("Content-Type: application/json")
        writer.write("\r\n".join([*lines, "\r\n"]).encode("latin-1"))
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            writer.write(view[start : start + PIECE_BYTES])
            await writer.drain()
