"""A provider that sends exactly the given bytes over a real socket."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import pytest

from culm.errors import ModelFailed
from culm.model.base import LanguageModel, ModelEvent, ModelRequest, ModelSetup, ProviderAccess
from culm.model.http import LineSplitter
from culm.model.openai.model import OpenAiModel
from culm.model.streaming import AnswerParser
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from tests.support import WAIT_S

KEY = "sk-very-secret-0123456789"
REQUEST = ModelRequest("", [], settings=SelectedModel(provider="acme"))

# The state after an answer: ready for a request, closed, reset, or open and silent.
Then = Literal["keep", "close", "reset", "hold"]


@dataclass(frozen=True)
class Reply:
    """A reply whose pieces are written separately."""

    pieces: Sequence[bytes]
    then: Then = "keep"


@dataclass(frozen=True)
class ReceivedRequest:
    path: str
    headers: dict[str, str]  # Names are in lower case.
    body: dict[str, Json]


@dataclass
class Provider:
    """Sends one reply for each request, in order, on any connection."""

    replies: list[Reply]
    url: str = ""
    requests: list[ReceivedRequest] = field(default_factory=list[ReceivedRequest])
    connections: int = 0
    trickle_s: float = 0.0  # The pause after each piece.
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # A request was read.
    left: asyncio.Event = field(default_factory=asyncio.Event)  # A client has disconnected.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.requests.append(await _read_request(reader))
        self.arrived.set()
        reply = self.replies.pop(0)
        for piece in reply.pieces:
            if writer.is_closing():  # uvloop does not allow a write then.
                raise ConnectionResetError
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(self.trickle_s)
        if reply.then == "hold":
            await reader.readexactly(1)  # Waits until the client leaves.
        if reply.then == "reset":
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return reply.then == "keep"


async def _read_request(reader: asyncio.StreamReader) -> ReceivedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (f.partition(": ") for f in fields)}
    body = await reader.readexactly(int(headers["content-length"]))
    return ReceivedRequest(first.split(" ")[1], headers, json.loads(body))


@asynccontextmanager
async def open_provider(*replies: Reply) -> AsyncGenerator[Provider]:
    provider = Provider(list(replies))
    async with asyncio.timeout(WAIT_S):
        server = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        provider.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield provider
        finally:
            server.close()


@asynccontextmanager
async def open_model(
    base_url: str, *, access: ProviderAccess | None = None, stall_s: float = WAIT_S
) -> AsyncGenerator[OpenAiModel]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        access = access or ProviderAccess(base_url=base_url, api_key=KEY)
        info = ModelInfo(id="model-1", supports_attachments=False)
        yield OpenAiModel(ModelSetup(http, access, info, stall_s, stall_s))


# Opens the adapter under test for a base URL; accepts `stall_s`.
Through = Callable[..., AbstractAsyncContextManager[LanguageModel]]


async def ask(model: LanguageModel, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    return [event async for event in model.stream(request)]


async def answer_to(*replies: Reply, through: Through = open_model) -> list[ModelEvent]:
    """Return the events of one request to a provider with `replies`."""
    async with open_provider(*replies) as provider, through(provider.url) as model:
        return await ask(model)


async def failure_of(
    *replies: Reply, stall_s: float = WAIT_S, through: Through = open_model
) -> ModelFailed:
    async with (
        open_provider(*replies) as provider,
        through(provider.url, stall_s=stall_s) as model,
    ):
        with pytest.raises(ModelFailed) as caught:
            await ask(model)
        return caught.value


def read(parser: AnswerParser, chunks: Iterable[bytes]) -> list[ModelEvent | str]:
    """Return the events of an answer in these chunks, and the title of its failure."""
    lines, events = LineSplitter(), list[ModelEvent | str]()
    try:
        for chunk in chunks:
            events.extend(parser.on_lines(lines.feed(chunk)))
        events.extend(parser.on_end(lines.rest()))
    except ModelFailed as exc:
        events.append(exc.title)
    return events


# --- bytes


def head(status: str, **fields: str | int) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


STREAM_HEAD = head("200 OK", Content_Type="text/event-stream", Transfer_Encoding="chunked")
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(data: bytes, *, end: bytes = END, then: Then = "keep") -> Reply:
    """Return a 200 reply with `data` as its body."""
    return Reply([STREAM_HEAD + chunk(data) + end], then)


def refusal(status: str, body: bytes = b"", **fields: str | int) -> Reply:
    return Reply([head(status, Content_Length=len(body), **fields) + body])


def data(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Json) -> bytes:
    return data({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


STOP = delta("stop") + b"data: [DONE]\n\n"
