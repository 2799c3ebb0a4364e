"""Messages in our format and in Anthropic's format."""

import json

from culm.ids import MessageId, SessionId
from culm.model.anthropic.model import encode_body
from culm.model.base import ModelRequest, ProviderAccess
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import (
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
from tests.model.anthropic_shapes import INFO, MODEL


def make_message(
    role: Role, *parts: Part | str, model: str = MODEL, provider: str = "acme"
) -> Message:
    made: list[Part] = [TextPart(Text(p)) if isinstance(p, str) else p for p in parts]
    return Message(MessageId("m"), role, SessionId("s"), made, model, provider)


def call(call_id: str, name: str = "ls", arguments: str = "{}") -> ToolCallPart:
    return ToolCallPart(ToolCall(call_id, name, arguments, finished=True))


def result(call_id: str, content: str = "ok", *, is_error: bool = False) -> ToolResultPart:
    return ToolResultPart(ToolResult(call_id, "ls", content, is_error=is_error))


def tool_use_block(call_id: str, name: str = "ls", **arguments: Json) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result_block(call_id: str, text: str = "ok", **more: Json) -> Json:
    content = [{"type": "text", "text": text}]
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def body(*messages: Message, info: ModelInfo = INFO, **settings: Json) -> dict[str, Json]:
    chosen = SelectedModel(provider="acme", **settings)
    return json.loads(
        encode_body(ModelRequest("", list(messages), settings=chosen), ProviderAccess(), info)
    )


def sent_messages(*messages: Message, info: ModelInfo = INFO) -> list[Json]:
    """Return the messages of the request body without cache marks."""
    found: list[Json] = body(*messages, info=info)["messages"]
    for block in [block for message in found for block in message["content"]]:
        block.pop("cache_control", None)
    return found
