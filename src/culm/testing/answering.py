"""The requests to a `ModelServer`, and the reply to each: a stream, a document or an error.

Owns the bounded log of requests, the pace of sending, back-pressure and faults of the connection.
`steps.py` decides the bytes and their order.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec
from aiohttp import web
from msgspec import Struct, field

from culm.errors import Conflict, NotFound
from culm.testing.dialects import AnswerHeader, Dialect, RequestShape
from culm.testing.script import Reply
from culm.testing.steps import FaultStep, RawStep, Step, content_of, steps, usage_of
from culm.wire.codec import Json, encode

JSON = "application/json"
CHARS_PER_TOKEN = 4  # The usual rule of thumb, for plausible counts.
# At full speed this many deltas share a write, and then other answers have their turn. A write
# costs as much as ten deltas; but a provider sends single deltas, so the batch is small.
BATCH = 8
# uvloop's timers count whole milliseconds, so a delta that is due in half of one is sent now. Its
# clock stands still during an iteration of the loop, so the schedule uses another clock.
EARLY_S = 0.0005
REQUESTS_MAX = 10_000  # Older ones are dropped.
LOG_BYTES_MAX = 256 << 20  # Of all bodies together; older ones are dropped.
# Exceptions of decoding a body that is not JSON, or too deeply nested.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class SeenRequest(Struct, eq=False):
    """One request for an answer."""

    n: int  # The first is 1.
    path: str
    headers: Mapping[str, str]  # Names are case-insensitive.
    at: float  # The time when all of it had arrived, in seconds since 1970.
    raw: bytes  # The body; empty once dropped.
    left: bool = False  # The client left before the end.
    ended: bool = False  # The answer was sent to its end, or to the fault in the script.
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> Json:
        """The decoded body; None if it is not JSON, or has been dropped."""
        try:
            return msgspec.json.decode(self.raw)
        except UNREADABLE:
            return None


class RequestLog:
    """The requests in order of arrival."""

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []  # The newest `REQUESTS_MAX`.
        self.count = 0  # Including dropped ones.
        self._with_body: deque[SeenRequest] = deque()
        self._body_bytes = 0
        self._changed = asyncio.Event()

    def record(self, path: str, headers: Mapping[str, str], raw: bytes, at: float) -> SeenRequest:
        self.count += 1
        seen = SeenRequest(self.count, path, headers, at, raw)
        self.requests.append(seen)
        self._with_body.append(seen)
        self._body_bytes += len(raw)
        if len(self.requests) > REQUESTS_MAX:
            self._drop_body(self.requests.pop(0))
        while self._body_bytes > LOG_BYTES_MAX and len(self._with_body) > 1:
            self._drop_body(self._with_body[0])
        self.notify()
        return seen

    def get(self, n: int) -> SeenRequest:
        """Request `n`; raises `NotFound` if it has not arrived or was dropped."""
        if self.requests and 0 <= (at := n - self.requests[0].n) < len(self.requests):
            return self.requests[at]
        raise NotFound(f"request not found: {n}")

    def notify(self) -> None:
        """Wake all waiters after a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def until_left(self, n: int) -> None:
        """Wait until the client of request `n` leaves; raises `Conflict` if it does not."""
        await self.until(lambda: self.count >= n)
        seen = self.get(n)
        await self.until(lambda: seen.left or seen.ended)
        if not seen.left:
            raise Conflict(f"the client of request {n} stayed to the end of the answer")

    def as_json(self) -> bytes:
        return encode(
            [
                {"n": s.n, "path": s.path, "body": s.body, "left": s.left, "ended": s.ended}
                for s in self.requests
            ]
        )

    def _drop_body(self, seen: SeenRequest) -> None:
        # Bodies are dropped in order of arrival.
        if self._with_body and self._with_body[0] is seen:
            self._with_body.popleft()
            self._body_bytes -= len(seen.raw)
            seen.raw = b""


# --- replies


class ModelExchange(Struct, frozen=True):
    """A request and the reply to give."""

    request: web.Request
    transport: asyncio.Transport
    seen: SeenRequest
    asked: RequestShape
    reply: Reply
    kind: type[Dialect]

    async def answer(self) -> web.StreamResponse:
        """Give the reply; raises `ConnectionError` if the client has left."""
        reply = self.reply
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.is_plain:
            message = f"the script answers this request with status {reply.status}"
            return self._plain(reply.body.encode() or self.kind.problem(reply.status, message))
        options = self.asked.stream_options
        dialect = self.kind(
            AnswerHeader(
                n=self.seen.n,
                model=self.asked.model,
                created_s=int(self.seen.at),
                include_usage=options is not None and options.include_usage,
            )
        )
        return await (self._stream(dialect) if self.asked.stream else self._whole(dialect))

    async def _stream(self, dialect: Dialect) -> web.StreamResponse:
        reply, seen = self.reply, self.seen
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        response.headers.update(reply.headers)
        await response.prepare(self.request)
        sending = AnswerSender(response, self.transport, seen.released)
        try:
            pieces = steps(reply, seen.n, self._input_tokens, dialect, time.monotonic_ns)
            await sending.send(pieces, reply.rate)
        except asyncio.CancelledError:
            seen.ended = sending.complete
            raise
        return response

    async def _whole(self, dialect: Dialect) -> web.StreamResponse:
        """Answer a request without streaming, at the time when a stream would have ended."""
        reply, seen = self.reply, self.seen
        content, deltas = content_of(reply, seen.n, time.monotonic_ns)
        if reply.rate:
            await asyncio.sleep(deltas / reply.rate)
        if reply.hold_after is not None:
            await seen.released.wait()
        if reply.error_after is not None:
            return problem(self.kind, 500, "the script makes this answer fail")
        if reply.stall_after is not None:
            await asyncio.Event().wait()
        usage = usage_of(reply, self._input_tokens, deltas)
        body = dialect.whole(content, reply.finish_reason, usage)
        if reply.malformed_after is not None:
            body = body[: len(body) // 2]
        if reply.cut_after is None:
            return self._plain(body)
        response = web.StreamResponse(headers=reply.headers)
        response.content_type = JSON
        response.content_length = len(body)
        await response.prepare(self.request)
        await response.write(body[: len(body) // 2])
        self.transport.close()
        return response

    def _plain(self, body: bytes) -> web.Response:
        response = web.Response(status=self.reply.status, body=body, content_type=JSON)
        response.headers.update(self.reply.headers)
        return response

    @property
    def _input_tokens(self) -> int:
        return max(1, len(self.seen.raw) // CHARS_PER_TOKEN)


def problem(dialect: type[Dialect], status: int, message: str) -> web.Response:
    """An error response in the format of the dialect."""
    return web.Response(status=status, body=dialect.problem(status, message), content_type=JSON)


class AnswerSender:
    """One streamed answer. `complete` once all of the script's bytes are sent."""

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport, released: asyncio.Event
    ) -> None:
        self.complete = False
        self._response = response
        self._transport = transport
        self._released = released
        self._batch: list[bytes] = []

    async def send(self, steps: Iterator[Step], rate: float) -> None:
        """Send all steps; raises `ConnectionError` if the client has left."""
        sent = 0
        begun_ns = time.monotonic_ns()
        for step in steps:
            if isinstance(step, bytes):
                self._batch.append(step)
                sent += 1
                # Relative to the start, not to the last delta: a late one delays no others.
                wait_s = sent / rate - (time.monotonic_ns() - begun_ns) / 1e9 if rate else 0.0
                if wait_s > EARLY_S:
                    await self._flush()
                    await asyncio.sleep(wait_s)
                elif len(self._batch) >= BATCH:
                    await self._flush()
                    await asyncio.sleep(0)
            elif isinstance(step, RawStep):
                self._batch.append(step.data)
            elif step is FaultStep.END:
                break
            elif step is FaultStep.CUT:
                await self._flush()
                self.complete = True
                # Not aborted, so that the bytes sent before still arrive.
                self._transport.close()
                return
            else:
                stopped_ns = time.monotonic_ns()
                await self._stop(step)
                begun_ns += time.monotonic_ns() - stopped_ns
        # A client that has read the end may leave before the write returns.
        self.complete = True
        await self._response.write_eof(b"".join(self._batch))

    async def _stop(self, stop: FaultStep) -> None:
        await self._flush()
        if stop is FaultStep.HOLD:
            await self._released.wait()
        else:
            await asyncio.Event().wait()

    async def _flush(self) -> None:
        await self._response.write(b"".join(self._batch))
        self._batch.clear()
