"""A client for the scripted provider; it uses a real socket and reads the raw bytes."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script
from culm.wire.codec import Json

OPENAI = "/chat/completions"
ANTHROPIC = "/messages"
both = pytest.mark.parametrize("path", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
PROMPT: list[Json] = [{"role": "user", "content": "What is 2 + 2?"}]


@dataclass
class ProviderClient:
    """A scripted provider and an HTTP client for it."""

    server: ModelServer
    session: aiohttp.ClientSession

    def post(
        self, path: str, **fields: Json
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = {"model": "m", "stream": True, "messages": PROMPT} | fields
        return self.session.post(self.server.url + path, json=body)

    async def ask(self, path: str, **fields: Json) -> Json:
        """Return the complete answer to a request without a stream."""
        async with self.post(path, stream=False, **fields) as response:
            assert response.status == 200
            return await response.json()

    async def stream(self, path: str, **fields: Json) -> list[Json]:
        """Return the data of every event of a stream."""
        async with self.post(path, **fields) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            return events_in(await response.read())

    async def refused(self, path: str, **fields: Json) -> tuple[int, Json]:
        async with self.post(path, **fields) as response:
            return response.status, await response.json()

    async def control(self, method: str, path: str, body: bytes = b"") -> tuple[int, Json]:
        """Use the server's control routes, like a test in another process."""
        root = self.server.url.removesuffix("/v1")
        async with self.session.request(method, root + path, data=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def open_provider_client(
    *replies: Reply, script: Script | None = None
) -> AsyncGenerator[ProviderClient]:
    async with (
        open_model_server(script or Script(list(replies))) as server,
        aiohttp.ClientSession() as session,
    ):
        yield ProviderClient(server, session)


def events_in(data: bytes) -> list[Json]:
    """Return the events of a stream: decoded, or as text if they are not JSON."""
    lines = data.decode().split("\n")
    return [value_of(line[6:]) for line in lines if line.startswith("data: ")]


def value_of(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def text_of(events: list[Json]) -> str:
    """Return the text in the events of either dialect."""
    return "".join(text_pieces(events))


def text_pieces(events: list[Json]) -> list[str]:
    pieces: list[str] = []
    for event in events:
        match event:
            case {"choices": [{"delta": {"content": str(text)}}]} if text:
                pieces.append(text)
            case {"delta": {"type": "text_delta", "text": str(text)}}:
                pieces.append(text)
            case _:
                pass
    return pieces


def is_end(event: Json) -> bool:
    return event == "[DONE]" or event == {"type": "message_stop"}
