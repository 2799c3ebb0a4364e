"""Time from the stored messages of a long conversation to the bytes of a request.

By the same functions as in a run: `history_of`, then `Model.stream` up to its caught post.
"""

import io
import json
import time
from contextlib import aclosing, suppress
from typing import NoReturn, cast

import aiohttp
from msgspec import Struct

from bench.models_sides import make, setup_for
from culm.errors import ModelFailed
from culm.ids import MessageId, SessionId
from culm.model.base import ModelRequest, ToolSpec
from culm.run.context import history_of
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Role,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

TURNS = 100  # Of four messages each: 400, and 800 kB of text, which is some 200,000 tokens.
LINE = "    assert lease.token == token, f'“{lease.owner}” holds it until {lease.expires_s}'\n"
TOOLS = tuple(
    ToolSpec(
        name,
        f"What {name} does, in a few sentences that a model reads before every answer. " * 5,
        {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    )
    for name in ("view", "edit", "grep", "glob", "ls", "bash", "fetch", "agent")
)


class Prepared(Struct):
    history_ms: float
    post_ms: float
    megabytes: float


class _Catcher:
    """Replaces the HTTP session, and records when a request would be sent."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.size = 0

    async def post(self, url: str, *, data: io.BytesIO, **rest: object) -> NoReturn:
        self.at_s = time.process_time()
        self.size = len(data.getvalue())
        raise aiohttp.ClientConnectionError("caught")


def conversation() -> list[Message]:
    messages: list[Message] = []

    def add(role: Role, *parts: Part) -> None:
        messages.append(Message(MessageId(f"m{len(messages)}"), role, SessionId("s"), list(parts)))

    for n in range(TURNS):
        call_id = f"call_{n:06d}"
        arguments = json.dumps({"path": f"src/module_{n}.py", "text": LINE * 8})
        call = ToolCall(call_id, "edit", arguments, finished=True)
        add("user", TextPart(Text(f"Please look at number {n}.\n" + LINE * 12)))
        add("assistant", TextPart(Text("I look at it. " * 20)), ToolCallPart(call))
        add("tool", ToolResultPart(ToolResult(call_id, "edit", LINE * 60)))
        finish = Finish("end_turn", 0)
        add("assistant", TextPart(Text("Done, and this is why. " * 20)), FinishPart(finish))
    return messages


async def prepare(name: str, stored: list[Message]) -> Prepared:
    """Measure the CPU time of both steps once."""
    catcher = _Catcher()
    # Only its `post` is called.
    http = cast("aiohttp.ClientSession", catcher)
    model = make(name, setup_for(name, http, "http://127.0.0.1:9/v1"))
    start_s = time.process_time()
    history = history_of(stored, "")
    read_s = time.process_time()
    with suppress(ModelFailed):
        async with aclosing(model.stream(ModelRequest("You are culm.", history, TOOLS))) as events:
            async for _ in events:
                pass
    return Prepared((read_s - start_s) * 1e3, (catcher.at_s - read_s) * 1e3, catcher.size / 1e6)
