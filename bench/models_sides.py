"""The readers that `models.py` compares: our adapters, and minimal readers.

Usage: python -m bench.models_sides SIDE URL     (a child: commands on stdin, see `ipc.py`)

Each command reads `streams` answers at once and returns the CPU time of this process.
"""

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing

import aiohttp
import msgspec
import uvloop
from msgspec import Struct

from bench.ipc import STEP_TIMEOUT_S, Command, answer, commands
from culm.ids import MessageId, SessionId
from culm.model.base import LanguageModel, ModelRequest, ModelSetup, ProviderAccess, TextDelta
from culm.wire.config import Model as ModelInfo
from culm.wire.messages import Message, Text, TextPart

ADAPTERS = {"openai": "OpenAiModel", "anthropic": "AnthropicModel"}  # In `culm.model.<name>.model`.
BARE = "bare-"  # Prefix of an adapter's name: a minimal reader of the same stream.
SILENCE_S = 30.0

ASKED = Message(MessageId("m"), "user", SessionId("s"), [TextPart(Text("Say something."))])


class Read(Struct):
    """The result of one command. `wakes` counts the arrivals of text over all streams."""

    cpu_s: float
    wall_s: float
    chars: int
    wakes: int


class Count:
    def __init__(self) -> None:
        self.chars = 0
        self.wakes = 0


ReadOne = Callable[[Count], Coroutine[None, None, None]]


def why_not(name: str) -> str:
    """Return the reason why an adapter cannot be measured here; empty if it can."""
    try:
        importlib.import_module(f"culm.model.{name}.model")
    except ImportError as exc:
        return str(exc)
    return ""


def make(name: str, setup: ModelSetup) -> LanguageModel:
    module = importlib.import_module(f"culm.model.{name}.model")
    made: LanguageModel = getattr(module, ADAPTERS[name])(setup)
    return made


def setup_for(name: str, http: aiohttp.ClientSession, url: str) -> ModelSetup:
    info = ModelInfo(id="demo-1", context_window=1_000_000, default_max_tokens=32_000)
    return ModelSetup(
        http, ProviderAccess(name, base_url=url, api_key="k"), info, SILENCE_S, SILENCE_S
    )


def through_adapter(name: str, http: aiohttp.ClientSession, url: str) -> ReadOne:
    model = make(name, setup_for(name, http, url))

    async def read(count: Count) -> None:
        async with aclosing(model.stream(ModelRequest("", [ASKED]))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    count.wakes += 1
                    count.chars += len(event.text)

    return read


# --- a minimal reader: aiohttp's bytes, cut at line ends, decoded into the one needed field


class _Content(Struct, gc=False):
    content: str = ""
    text: str = ""


class _Choice(Struct, gc=False):
    delta: _Content


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []  # OpenAI's.
    delta: _Content | None = None  # Anthropic's.


_decode = msgspec.json.Decoder(_Chunk).decode
_PATHS = {"openai": "/chat/completions", "anthropic": "/messages"}


def through_bare_reader(name: str, http: aiohttp.ClientSession, url: str) -> ReadOne:
    body = msgspec.json.encode(
        {
            "model": "demo-1",
            "messages": [{"role": "user", "content": "Say something."}],
            "stream": True,
            "max_tokens": 32_000,
        }
    )

    async def read(count: Count) -> None:
        rest = b""
        async with http.post(url + _PATHS[name], data=body) as response:
            while chunk := await response.content.readany():
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                count.wakes += 1
                for line in lines:
                    if line.startswith(b"data: {"):
                        count.chars += _chars(_decode(line[6:]))

    return read


def _chars(chunk: _Chunk) -> int:
    if chunk.choices:
        return len(chunk.choices[0].delta.content)
    return len(chunk.delta.text) if chunk.delta is not None else 0


# --- the child


async def read_all(read: ReadOne, streams: int) -> Read:
    count = Count()
    loop = asyncio.get_running_loop()
    cpu_s, start_s = time.process_time(), loop.time()
    async with asyncio.TaskGroup() as tasks:
        for n in range(streams):
            tasks.create_task(read(count), name=f"stream {n}")
    return Read(time.process_time() - cpu_s, loop.time() - start_s, count.chars, count.wakes)


async def serve(side: str, url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)  # Like the server.
    async with aiohttp.ClientSession(connector=connector) as http:
        name = side.removeprefix(BARE)
        read = (
            through_bare_reader(name, http, url)
            if side != name
            else through_adapter(name, http, url)
        )
        answer(Command(str(os.getpid())))
        async for command in commands():
            async with asyncio.timeout(STEP_TIMEOUT_S):
                answer(await read_all(read, command.streams))


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2]))
