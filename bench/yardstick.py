"""A minimal server: the same bytes, joined once, one write per connection, no checks."""

import asyncio
from typing import cast

from bench import frames
from bench.ipc import Ready
from culm.events.views import encode_delta
from culm.ids import MessageId, SessionId

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n"
_ID = "01234567-0123-0123-0123-0123456789ab"


class Connection(asyncio.Protocol):
    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of what they implement.
        stream = cast("asyncio.Transport", transport)
        self._transports.append(stream)
        stream.write(_HEAD)


class Yardstick:
    """One side of the comparison. Made in `publisher.py`."""

    def __init__(self) -> None:
        self._transports: list[asyncio.Transport] = []
        self._offsets = [0] * frames.DRAFTS
        self._frames: list[bytes] = []

    async def listen(self, ack_port: int) -> Ready:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self._transports), "127.0.0.1", 0, backlog=512
        )
        port: int = server.sockets[0].getsockname()[1]
        return Ready(port, ack_port, "/events?client_id={client_id}")

    async def begin(self) -> None:
        self._offsets = [0] * frames.DRAFTS

    def prepare(self, texts: list[str]) -> None:
        self._frames = [self._frame(n, text) for n, text in enumerate(texts)]

    def _frame(self, n: int, text: str) -> bytes:
        draft = n % frames.DRAFTS
        offset = self._offsets[draft]
        self._offsets[draft] += len(text)
        message_id = f"{_ID[:-2]}{draft:02d}"
        delta = frames.delta(MessageId(message_id), SessionId(_ID), offset, text)
        return encode_delta(delta)

    def send(self, first: int, end: int) -> None:
        data = b"".join(self._frames[first:end])
        for transport in self._transports:
            transport.write(data)

    async def settle(self) -> None:
        pass
