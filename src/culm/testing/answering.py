"""One request and the reply to it, over HTTP: a stream, a document or an error.

Owns the pace of sending, back-pressure and faults of the connection. `steps.py` decides the bytes
and their order.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web

from culm.testing.base import AnswerHeader, Dialect, RequestShape
from culm.testing.request_log import SeenRequest
from culm.testing.script import Reply
from culm.testing.steps import FaultStep, RawStep, Step, content_of, steps, usage_of

JSON = "application/json"
CHARS_PER_TOKEN = 4  # The usual rule of thumb, for plausible counts.
# At full speed this many deltas share a write, and then other answers have their turn. A write
# costs as much as ten deltas; but a provider sends single deltas, so the batch is small.
BATCH = 8
# uvloop's timers count whole milliseconds, so a delta that is due in half of one is sent now. Its
# clock stands still during an iteration of the loop, so the schedule uses another clock.
EARLY_S = 0.0005


@dataclass(frozen=True, slots=True)
class ModelExchange:
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
