"""HTTP/1.1 as Go's net/http Transport speaks it: the same request bytes, the same response parsing.

Owns connections: the pool of idle ones, the framing of bodies and their endings. The meaning of
the requests is in `api.py`.
"""

import asyncio
import gzip
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

DIAL_S = 30.0
IDLE_S = 90.0  # An idle connection older than this is not used again.
READ_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 20
UNIX_HOST = "api.crush.localhost"


class TransportError(Exception):
    """No response, or an incomplete one. Includes a connection reset while reading a body."""


class UnexpectedEof(TransportError):
    """The connection ended inside a body whose framing promised more."""


@dataclass(frozen=True, slots=True)
class UnixHost:
    path: Path

    @property
    def header(self) -> str:
        return UNIX_HOST


@dataclass(frozen=True, slots=True)
class TcpHost:
    host: str
    port: int
    header: str


Host = UnixHost | TcpHost


def parse_host(text: str) -> Host:
    """`unix://<path>` or `tcp://host:port[/path]`, whose path is never used (§2.2)."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix":
        return UnixHost(Path(rest))
    if separator and scheme == "tcp":
        address = rest.partition("/")[0]
        host, _, port = address.rpartition(":")
        return TcpHost(host.strip("[]"), int(port), address)
    raise ValueError(f"invalid host format: {text}")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def encode(self, host: Host) -> bytes:
        """Encode in Go's order: Host, agent, length, own headers sorted, transport headers."""
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {host.header}"]
        lines.append("User-Agent: Go-http-client/1.1")
        if self.body is not None or self.method in ("POST", "PUT", "PATCH"):
            lines.append(f"Content-Length: {len(self.body or b'')}")
        lines += [f"{name}: {self.headers[name]}" for name in sorted(self.headers)]
        if isinstance(host, TcpHost):
            lines.append("Accept-Encoding: gzip")
        return "\r\n".join([*lines, "", ""]).encode() + (self.body or b"")

    @property
    def is_replayable(self) -> bool:
        return self.method in ("GET", "HEAD") and self.body is None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # Names in lower case.
    body: bytes


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.is_reused = False
        self.idle_since_s = 0.0

    async def ask(self, data: bytes, method: str) -> "Body":
        """Send a request and read the head of its answer."""
        try:
            self.writer.write(data)
            await self.writer.drain()
            head = await self.reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 1"):  # 100 Continue and other 1xx.
                head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as exc:
            raise TransportError("unexpected EOF" if exc.partial else "EOF") from exc
        except OSError as exc:
            raise TransportError(str(exc)) from exc
        return Body(self, head, method)

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):  # The peer closed first.
            await self.writer.wait_closed()


class Body:
    """The head of a response, and its body as it arrives."""

    def __init__(self, connection: _Connection, head: bytes, method: str) -> None:
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise TransportError(f"malformed HTTP response {first!r}")
        pairs = [line.partition(":") for line in lines]
        self.status = int(rest[:3])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.connection = connection
        self.is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._left = int(length) if length is not None and not self.is_chunked else None
        if method == "HEAD" or self.status in (204, 304):
            self.is_chunked, self._left = False, 0
        self._closes = version == "HTTP/1.0" or "close" in self.headers.get("connection", "")
        self._ended = False

    @property
    def is_close_delimited(self) -> bool:
        return not self.is_chunked and self._left is None

    @property
    def is_reusable(self) -> bool:
        return self._ended and not self._closes and not self.is_close_delimited

    async def read(self) -> bytes:
        """Read some bytes, none at a clean end; raises `UnexpectedEof`, `TransportError`."""
        if self._ended or self._left == 0:
            self._ended = True
            return b""
        try:
            data = await (self._read_chunk() if self.is_chunked else self._read_plain())
        except (OSError, ValueError) as exc:
            raise TransportError(str(exc)) from exc
        self._ended = not data
        return data

    async def _read_plain(self) -> bytes:
        data = await self.connection.reader.read(min(READ_BYTES, self._left or READ_BYTES))
        if self._left is not None:
            if not data:
                raise UnexpectedEof("unexpected EOF")
            self._left -= len(data)
        return data

    async def _read_chunk(self) -> bytes:
        reader = self.connection.reader
        try:
            size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
            if size == 0:
                while (await reader.readuntil(b"\r\n")) != b"\r\n":
                    pass  # A trailer.
                return b""
            data = await reader.readexactly(size)
            await reader.readexactly(2)
        except asyncio.IncompleteReadError as exc:
            raise UnexpectedEof("unexpected EOF") from exc
        return data

    async def read_all(self) -> bytes:
        data = bytearray()
        while some := await self.read():
            data += some
        if self.headers.get("content-encoding") == "gzip":
            return gzip.decompress(bytes(data))
        return bytes(data)


class Transport:
    """The connections of one host. `log` has every request in order."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.log: list[str] = []
        self.dials = 0
        self._idle: list[_Connection] = []
        self._live: set[_Connection] = set()

    async def exchange(self, request: Request) -> Answer:
        """Send a request and read the whole response; raises `TransportError`."""
        body = await self.open(request)
        try:
            data = await body.read_all()
        except BaseException:
            await self.drop(body)
            raise
        self._put_back(body)
        return Answer(body.status, body.headers, data)

    async def open(self, request: Request) -> Body:
        """Send a request and return when the head has arrived; the caller ends with `drop`."""
        self.log.append(f"{request.method} {request.target}")
        while True:
            connection = self._take_idle() or await self._dial()
            try:
                return await connection.ask(request.encode(self.host), request.method)
            except TransportError:
                await self._close(connection)
                # The server may have closed an idle connection during the write. Go resends
                # idempotent requests; the caller handles a lost POST.
                if not connection.is_reused or not request.is_replayable:
                    raise
            except BaseException:
                await self._close(connection)
                raise

    async def drop(self, body: Body) -> None:
        """Close the connection of a response that is not read to its end."""
        await self._close(body.connection)

    async def aclose(self) -> None:
        for connection in list(self._live):
            await self._close(connection)

    def _take_idle(self) -> _Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            is_fresh = now_s - connection.idle_since_s < IDLE_S
            if is_fresh and not connection.reader.at_eof():
                connection.is_reused = True
                return connection
            connection.writer.close()
            self._live.discard(connection)
        return None

    async def _dial(self) -> _Connection:
        self.dials += 1
        try:
            async with asyncio.timeout(DIAL_S):
                if isinstance(self.host, UnixHost):
                    ends = await asyncio.open_unix_connection(
                        str(self.host.path), limit=HEAD_BYTES_MAX
                    )
                else:
                    ends = await asyncio.open_connection(
                        self.host.host, self.host.port, limit=HEAD_BYTES_MAX
                    )
        except OSError as exc:  # Includes a timeout.
            raise TransportError(f"dial: {exc}") from exc
        connection = _Connection(*ends)
        self._live.add(connection)
        return connection

    def _put_back(self, body: Body) -> None:
        if body.is_reusable:
            body.connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(body.connection)
        else:
            body.connection.writer.close()
            self._live.discard(body.connection)

    async def _close(self, connection: _Connection) -> None:
        self._live.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        await connection.close()
