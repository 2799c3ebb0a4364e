"""One request to a provider and its streamed answer, in lines.

Owns the bounds of that exchange (connecting, silence, sizes) and turns every way it can fail into
`ModelFailed`. What a line means is the adapter's business.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from msgspec import UNSET
from multidict import CIMultiDict

from culm.model import failures
from culm.model.base import ModelRequest, ModelSetup, ProviderAccess
from culm.model.failures import ProviderPeer
from culm.model.lines import LineSplitter
from culm.wire.codec import Json, encodable, encode

CONNECT_TIMEOUT_S = 10.0  # Name, TCP and TLS; three lost packets fit in.
ERROR_BYTES_MAX = 64 << 10  # Of an error's body. Real ones have hundreds.
READ_BYTES_MAX = 64 << 10  # aiohttp buffers twice this for a reader that is behind.
DULL = 5  # So many silences may pass with nothing but signs of life.
# After the last event the end of the body is usually in the same packet. With it the connection
# can serve again; without it another one costs less than waiting.
SETTLE_S = 0.05

_JSON, _HTML = "application/json", "text/html"
_LOST = (aiohttp.ClientError, OSError)


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """What is sent. The body is complete JSON."""

    url: str
    headers: CIMultiDict[str]
    body: bytes
    takes_document: bool = False  # JSON is an answer, too.


def spell_body(ours: dict[str, Json], request: ModelRequest, access: ProviderAccess) -> bytes:
    """The JSON to post. What the settings and then the access add goes over what is ours."""
    options = request.settings.provider_options
    body = ours | ({} if options is UNSET else options) | access.body
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
    """A request below the base URL; a header of the access takes the place of ours."""
    merged = CIMultiDict(
        {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",  # Compressed streams arrive in lumps, and cost more.
            "Content-Type": "application/json",
        }
    )
    merged.update(headers)
    merged.update(access.headers)
    base, mark, query = access.base_url.partition("?")
    return ProviderRequest(base.rstrip("/") + path + mark + query, merged, body, takes_document)


class ProviderResponse:
    """The body of a 200 as it arrives. Made by `open_answer`."""

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
        self._told_s = self._loop.time()
        self._dull_s = max(setup.first_byte_s, DULL * setup.stall_s)

    async def lines(self) -> list[bytes] | None:
        """The next complete lines, possibly none; None at the end. Raises `ModelFailed`."""
        if self._lines.overflowed:
            raise failures.on_unreadable(self._peer, "a line too long to be part of an answer")
        if self._loop.time() - self._told_s > self._dull_s:
            raise failures.on_stall(self._peer, self._dull_s)
        silence = self._silence
        silence.begin()
        try:
            chunk = await self._content.readany()
        except _LOST as exc:
            if silence.too_long:
                raise failures.on_stall(self._peer, silence.bound_s) from exc
            raise failures.on_exception(self._peer, exc) from exc
        except RuntimeError as exc:  # aiohttp's word for chunks that broke before this read.
            raise failures.on_cut(self._peer) from exc
        finally:
            silence.end(self._stall_s)
        return self._lines.feed(chunk) if chunk else None

    def mark_progress(self) -> None:
        """Something was in it that is part of an answer; a sign of life alone is not."""
        self._told_s = self._loop.time()

    def rest(self) -> bytes:
        """The last line, if the stream ended within it."""
        return self._lines.rest()

    async def drain(self) -> None:
        """Wait a moment for the end of the body, so that the connection can serve again."""
        with suppress(*_LOST):  # A time-out is an OSError.
            async with asyncio.timeout(SETTLE_S):
                await self._content.wait_eof()

    def close(self) -> None:
        """Drop the connection, unless the body has ended."""
        self._silence.close()
        self._response.close()


class _Silence:
    """Ends a response when a read has waited for too long.

    One timer for the whole answer that looks at when the current wait began: arming a time-out
    for each read would cost as much as decoding what was read.
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
    """Ask, and read the answer while in the block; raises `ModelFailed`.

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
    """The response once its head has come, which includes what the request took to leave."""
    bound = asyncio.timeout(first_byte_s)
    try:
        async with bound:
            return await http.post(
                post.url,
                data=io.BytesIO(post.body),  # In pieces: one large write would hold up the loop.
                headers=post.headers,
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,  # The key must not travel to another host.
                raise_for_status=False,
                read_bufsize=READ_BYTES_MAX,
            )
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as exc:
        # They hold the request or the address, and those a key: it must not travel on.
        raise failures.on_exception(peer, exc) from None
    except (*_LOST, ValueError) as exc:
        if bound.expired():
            raise failures.on_stall(peer, first_byte_s) from exc
        raise failures.on_exception(peer, exc) from exc


async def _check(
    response: aiohttp.ClientResponse, post: ProviderRequest, peer: ProviderPeer, stall_s: float
) -> None:
    """Raise `ModelFailed` unless an answer follows."""
    if response.status != 200:
        body = await _read_error(response, stall_s)
        raise failures.on_status(peer, response.status, response.headers, body)
    kind = response.content_type
    if kind == _HTML or (kind == _JSON and not post.takes_document):
        body = await _read_error(response, stall_s)
        raise failures.on_no_stream(peer, kind, body)


async def _read_error(response: aiohttp.ClientResponse, stall_s: float) -> bytes:
    """As much of the body as comes: the status alone is an answer, too."""
    body = b""
    with suppress(*_LOST, RuntimeError):
        async with asyncio.timeout(min(stall_s, CONNECT_TIMEOUT_S)):
            while len(body) < ERROR_BYTES_MAX and (chunk := await response.content.readany()):
                body += chunk
    return body[:ERROR_BYTES_MAX]
