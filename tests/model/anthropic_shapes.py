"""Anthropic's stream events as bytes, and its adapter over a real socket."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp

from culm.model.anthropic.model import AnthropicModel
from culm.model.base import ModelSetup, ProviderAccess
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from tests.model import provider
from tests.model.provider import KEY
from tests.support import WAIT_S

MODEL = "claude-sonnet-4-5"
INFO = ModelInfo(id=MODEL, supports_attachments=True, can_reason=True)


def event(kind: str, **fields: Json) -> bytes:
    """Encode one event, with its type in both lines like Anthropic."""
    body = json.dumps({"type": kind, **fields}, ensure_ascii=False)
    return f"event: {kind}\ndata: {body}\n\n".encode()


def start(**usage: int) -> bytes:
    message: Json = {"id": "msg_1", "role": "assistant", "content": [], "usage": usage}
    return event("message_start", message=message)


def begin(index: int, kind: str, **fields: Json) -> bytes:
    return event("content_block_start", index=index, content_block={"type": kind, **fields})


def delta(index: int, kind: str, **fields: Json) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, **fields})


def end(index: int) -> bytes:
    return event("content_block_stop", index=index)


def text(index: int, *pieces: str) -> bytes:
    deltas = (delta(index, "text_delta", text=piece) for piece in pieces)
    return begin(index, "text", text="") + b"".join(deltas) + end(index)


def thinking(index: int, *pieces: str, signature: str) -> bytes:
    deltas = (delta(index, "thinking_delta", thinking=piece) for piece in pieces)
    return (
        begin(index, "thinking", thinking="", signature="")
        + b"".join(deltas)
        + delta(index, "signature_delta", signature=signature)
        + end(index)
    )


def redacted(index: int, data: str) -> bytes:
    return begin(index, "redacted_thinking", data=data) + end(index)


def call(index: int, call_id: str, name: str, *pieces: str) -> bytes:
    deltas = (delta(index, "input_json_delta", partial_json=piece) for piece in pieces)
    begun = begin(index, "tool_use", id=call_id, name=name, input={})
    return begun + b"".join(deltas) + end(index)


def finish(reason: str | None = "end_turn", **usage: int) -> bytes:
    return event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=usage)


STOP = event("message_stop")
END = finish() + STOP


@asynccontextmanager
async def open_model(
    base_url: str,
    *,
    access: ProviderAccess | None = None,
    info: ModelInfo = INFO,
    stall_s: float = WAIT_S,
) -> AsyncGenerator[AnthropicModel]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        access = access or ProviderAccess(base_url=base_url, api_key=KEY)
        yield AnthropicModel(ModelSetup(http, access, info, stall_s, stall_s))


answer_to = partial(provider.answer_to, through=open_model)
failure_of = partial(provider.failure_of, through=open_model)
