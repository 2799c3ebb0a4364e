"""The openai package reading the same stream, as a yardstick of `models.py`.

Usage: python -m bench.models_sdk URL     (a child: commands on stdin, as in `ipc.py`)

It imports nothing of ours, so that any interpreter with the package can run it.
"""

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Protocol

# The used part of the package, which may not be installed when this is type-checked.


class Delta(Protocol):
    content: str | None


class Choice(Protocol):
    delta: Delta


class Chunk(Protocol):
    choices: list[Choice]


class Completions(Protocol):
    async def create(
        self, *, model: str, messages: list[dict[str, str]], stream: bool
    ) -> AsyncIterator[Chunk]: ...


class Chat(Protocol):
    completions: Completions


class Client(Protocol):
    chat: Chat


async def read_all(client: Client, streams: int) -> dict[str, float]:
    count = {"chars": 0, "wakes": 0}
    cpu_s, start_s = time.process_time(), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for n in range(streams):
            tasks.create_task(_read(client, count), name=f"stream {n}")
    wall_s = time.monotonic() - start_s
    return {"cpu_s": time.process_time() - cpu_s, "wall_s": wall_s, **count}


async def _read(client: Client, count: dict[str, int]) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    stream = await client.chat.completions.create(model="demo-1", messages=messages, stream=True)
    async for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            count["chars"] += len(text)
            count["wakes"] += 1


async def serve(url: str) -> None:
    openai = importlib.import_module("openai")
    client: Client = openai.AsyncOpenAI(base_url=url, api_key="k")
    print(json.dumps({"do": str(os.getpid())}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await read_all(client, json.loads(line)["streams"])), flush=True)


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(sys.argv[1]))
    else:
        uvloop.run(serve(sys.argv[1]))
