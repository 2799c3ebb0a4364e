"""One request and the reply chosen for it, answered over HTTP: streamed, whole, or an error."""

import asyncio
import time
from dataclasses import dataclass

from aiohttp import web

from culm.testing.base import AnswerHeader, Dialect, RequestShape
from culm.testing.request_log import SeenRequest
from culm.testing.script import Reply
from culm.testing.sender import AnswerSender
from culm.testing.steps import content_of, steps, usage_of

JSON = "application/json"
CHARS_PER_TOKEN = 4  # The usual rule of thumb, for a plausible count.


@dataclass(frozen=True, slots=True)
class ModelExchange:
    """What is asked, and what is to be answered."""

    request: web.Request
    transport: asyncio.Transport
    seen: SeenRequest
    asked: RequestShape
    reply: Reply
    kind: type[Dialect]

    async def answer(self) -> web.StreamResponse:
        """Do what the reply says; raises `ConnectionError` when the client has left."""
        reply = self.reply
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.is_plain:
            words = f"the script answers this request with status {reply.status}"
            return self._plain(reply.body.encode() or self.kind.problem(reply.status, words))
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
        """Answer a client that wants no stream, at the time when a stream would have ended."""
        reply, seen = self.reply, self.seen
        content, deltas = content_of(reply, seen.n, time.monotonic_ns)
        if reply.rate:
            await asyncio.sleep(deltas / reply.rate)
        if reply.hold_after is not None:
            await seen.released.wait()
        if reply.error_after is not None:
            return problem(self.kind, 500, "the script says that this answer fails")
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
    """An error as the dialect words it."""
    return web.Response(status=status, body=dialect.problem(status, message), content_type=JSON)
