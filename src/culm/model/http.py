"""One request to a provider and its streamed answer, as lines.

Owns the limits of that exchange (connecting, silence, sizes) and converts every failure into
`ModelFailed`. The adapters parse the lines.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
from msgspec import UNSET, Struct
from multidict import CIMultiDict

from culm.model import failures
from culm.model.base import ModelRequest, ModelSetup, ProviderAccess
from culm.model.failures import ProviderPeer
from culm.wire.codec import Json, encodable, encode

CONNECT_TIMEOUT_S = 10.0  # DNS, TCP and TLS, with up to three lost packets.
ERROR_BYTES_MAX = 64 << 10  # Of an error's body. Real ones have some hundred bytes.
READ_BYTES_MAX = 64 << 10  # aiohttp buffers twice this for a slow reader.
KEEPALIVE_STALLS = 5  # An answer may consist of keep-alives for this many stall times.
# The end of the body usually arrives in the same packet as the last event. Then the connection can
# be reused; otherwise, opening another one costs less than waiting.
SETTLE_S = 0.05
# Exceptions of parsing a line: invalid JSON, JSON of another shape, bytes that are not UTF-8, too
# deep nesting, too large numbers.
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError, OverflowError)
# A line is one delta. Even a whole file in the arguments of one call stays far below this.
LINE_BYTES_MAX = 1 << 20

_JSON, _HTML = "application/json", "text/html"
_LOST = (aiohttp.ClientError, OSError)


class ProviderRequest(Struct, frozen=True):
    """A POST request. The body is complete JSON."""

    url: str
    headers: CIMultiDict[str]
    body: bytes
    takes_document: bool = False  # A JSON document is an answer as well.


def merge_body(own: dict[str, Json], request: ModelRequest, access: ProviderAccess) -> bytes:
    """The JSON to post. The settings and then the access override our own fields."""
    options = request.settings.provider_options
    body = own | ({} if options is UNSET else options) | access.body
    try:
        return encode(body)
    except UnicodeEncodeError:
        return encode(encodable(body))


def post_to(
    access: ProviderAccess,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    takes_document: bool = False,
) -> ProviderRequest:
    """A request below the base URL; headers of the access replace our own."""
    merged = CIMultiDict(
        {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",  # Compressed streams arrive in bursts and cost more CPU.
            "Content-Type": "application/json",
        }
    )
    merged.update(headers)
    merged.update(access.headers)
    base, mark, query = access.base_url.partition("?")
    return ProviderRequest(base.rstrip("/") + path + mark + query, merged, body, takes_document)


class ProviderResponse:
    """The body of a 200 response as it arrives. Made by `open_answer`."""

    def __init__(
        self, response: aiohttp.ClientResponse, peer: ProviderPeer, setup: ModelSetup
    ) -> None:
        self._response = response
        self._content = response.content
        self._peer = peer
        self._lines = LineSplitter()
        self._silence = _Silence(response, setup.first_byte_s)
        self._stall_s = setup.stall_s
        self._loop = asyncio.get_running_loop()
        self._progress_s = self._loop.time()
        self._keepalive_s = max(setup.first_byte_s, KEEPALIVE_STALLS * setup.stall_s)

    async def lines(self) -> list[bytes] | None:
        """The next complete lines, possibly none; None at the end. Raises `ModelFailed`."""
        if self._lines.overflowed:
            raise failures.on_unreadable(self._peer, "a line too long to be part of an answer")
        if self._loop.time() - self._progress_s > self._keepalive_s:
            raise failures.on_stall(self._peer, self._keepalive_s)
        silence = self._silence
        silence.begin()
        try:
            chunk = await self._content.readany()
        except _LOST as exc:
            if silence.too_long:
                raise failures.on_stall(self._peer, silence.bound_s) from exc
            raise failures.on_exception(self._peer, exc) from exc
        except RuntimeError as exc:  # From aiohttp, if the chunked encoding broke before this read.
            raise failures.on_cut(self._peer) from exc
        finally:
            silence.end(self._stall_s)
        return self._lines.feed(chunk) if chunk else None

    def mark_progress(self) -> None:
        """Note that a part of the answer has arrived; keep-alives do not count."""
        self._progress_s = self._loop.time()

    def rest(self) -> bytes:
        """The last line, if the stream ended in the middle of it."""
        return self._lines.rest()

    async def drain(self) -> None:
        """Wait a moment for the end of the body, so that the connection can be reused."""
        with suppress(*_LOST):  # A timeout is an OSError.
            async with asyncio.timeout(SETTLE_S):
                await self._content.wait_eof()

    def close(self) -> None:
        """Drop the connection, unless the body has ended."""
        self._silence.close()
        self._response.close()


class _Silence:
    """Closes a response when a read has waited for too long.

    One timer serves the whole answer and checks when the current wait began: a timeout for each
    read would cost as much as decoding the data.
    """

    def __init__(self, response: aiohttp.ClientResponse, bound_s: float) -> None:
        self.bound_s = bound_s  # Of the current wait.
        self.too_long = False
        self._response = response
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None  # When the current wait began.
        self._timer = self._loop.call_later(bound_s, self._look)

    def begin(self) -> None:
        self._since_s = self._loop.time()

    def end(self, next_bound_s: float) -> None:
        self._since_s = None
        if next_bound_s < self.bound_s:  # The first wait may be longer than those that follow.
            self._timer.cancel()
            self._timer = self._loop.call_later(next_bound_s, self._look)
        self.bound_s = next_bound_s

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._since_s is None else self._since_s) + self.bound_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self.too_long = True
            self._response.close()  # Wakes the reader with an error.


@asynccontextmanager
async def open_answer(
    setup: ModelSetup, post: ProviderRequest, peer: ProviderPeer
) -> AsyncGenerator[ProviderResponse]:
    """Send the request and read the answer in the block; raises `ModelFailed`.

    Leaving the block before the end of the answer drops the connection.
    """
    response = await _send(setup.http, post, peer, setup.first_byte_s)
    try:
        await _check(response, post, peer, setup.stall_s)
        answer = ProviderResponse(response, peer, setup)
        try:
            yield answer
        finally:
            answer.close()
    finally:
        response.close()


async def _send(
    http: aiohttp.ClientSession, post: ProviderRequest, peer: ProviderPeer, first_byte_s: float
) -> aiohttp.ClientResponse:
    """The response once its head has arrived. The time limit includes sending the request."""
    bound = asyncio.timeout(first_byte_s)
    try:
        async with bound:
            return await http.post(
                post.url,
                data=io.BytesIO(post.body),  # In pieces: one large write would block the loop.
                headers=post.headers,
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,  # The key must not travel to another host.
                raise_for_status=False,
                read_bufsize=READ_BYTES_MAX,
            )
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as exc:
        # These exceptions contain the request or the address, and thus maybe a key: do not chain.
        raise failures.on_exception(peer, exc) from None
    except (*_LOST, ValueError) as exc:
        if bound.expired():
            raise failures.on_stall(peer, first_byte_s) from exc
        raise failures.on_exception(peer, exc) from exc


async def _check(
    response: aiohttp.ClientResponse, post: ProviderRequest, peer: ProviderPeer, stall_s: float
) -> None:
    """Raise `ModelFailed` unless the body is an answer."""
    if response.status != 200:
        body = await _read_error(response, stall_s)
        raise failures.on_status(peer, response.status, response.headers, body)
    kind = response.content_type
    if kind == _HTML or (kind == _JSON and not post.takes_document):
        body = await _read_error(response, stall_s)
        raise failures.on_no_stream(peer, kind, body)


async def _read_error(response: aiohttp.ClientResponse, stall_s: float) -> bytes:
    """As much of the body as arrives; the status alone is informative, too."""
    body = b""
    with suppress(*_LOST, RuntimeError):
        async with asyncio.timeout(min(stall_s, CONNECT_TIMEOUT_S)):
            while len(body) < ERROR_BYTES_MAX and (chunk := await response.content.readany()):
                body += chunk
    return body[:ERROR_BYTES_MAX]


# --- lines. The `\r` of a `\r\n` is kept, as JSON ignores it.


class LineSplitter:
    """Splits chunks into lines. Buffers one unfinished line of limited length."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.overflowed = False  # A line was too long; it and everything after it is dropped.
        self._line_bytes_max = line_bytes_max
        self._held: list[bytes] = []  # Joined once, in linear time.
        self._held_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their `\\n`."""
        if self.overflowed:
            return []
        if b"\n" not in chunk:
            self._hold(chunk)
            return []
        if self._held:
            chunk = b"".join((*self._held, chunk))
            self._held.clear()
            self._held_bytes = 0
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if len(chunk) > self._line_bytes_max:
            lines = self._until_too_long(lines)
        if rest and not self.overflowed:
            self._hold(rest)
        return lines

    def rest(self) -> bytes:
        """The unfinished line at the end."""
        return b"".join(self._held)

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._line_bytes_max:
            self._overflow()

    def _until_too_long(self, lines: list[bytes]) -> list[bytes]:
        for n, line in enumerate(lines):
            if len(line) > self._line_bytes_max:
                self._overflow()
                return lines[:n]
        return lines

    def _overflow(self) -> None:
        self.overflowed = True
        self._held.clear()


def is_whole(line: bytes) -> bool:
    """True if a line that lacks its line end is otherwise complete."""
    payload = line.partition(b":")[2].strip()
    try:
        msgspec.json.decode(payload, type=msgspec.Raw)
    except UNREADABLE:
        return payload == b"[DONE]"
    return True
