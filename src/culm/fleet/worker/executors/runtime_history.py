"""Convert the conversation that a host sends with an assignment into our messages. Pure.

The host may be a foreign system: unknown fields are ignored, and unreadable messages are left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from culm.ids import MessageId, SessionId
from culm.run.context import history_of, user_message
from culm.wire.codec import Json, clean, encodable, encode
from culm.wire.messages import (
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)


class _Function(Struct):
    name: str
    arguments: Json = ""  # JSON text, as providers have it, or an object.


class _Call(Struct):
    id: str
    function: _Function


class _Image(Struct):
    url: str
    detail: str | None = None


class _ContentPart(Struct):
    type: str = ""
    text: str = ""
    image_url: _Image | str | None = None


class _WireMessage(Struct):
    """One message of the conversation; its host may send more fields."""

    role: Literal["system", "user", "assistant", "tool"]
    id: str = ""
    content: str | None = ""
    reasoning: str | None = None
    reasoning_signature: str | None = None
    content_parts: list[_ContentPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    tool_success: bool | None = None
    compressed: bool = False
    # culm only: the author. Only that model accepts the signature of its reasoning.
    model: str = ""
    provider: str = ""


_decoder = msgspec.json.Decoder(_WireMessage)


def history_from(messages: Iterable[Raw], assignment: str, session_id: SessionId) -> list[Message]:
    """Convert messages, oldest first, every call with its result; include the assignment once."""
    known = [_message(wire, session_id) for wire in _read(messages)]
    history = history_of(_with_names(known), summary_id="")
    if not any(_repeats(message, assignment) for message in _messages_since(history)):
        history.append(user_message(session_id, clean(assignment)))
    return history


def _messages_since(history: Sequence[Message]) -> Iterator[Message]:
    """Yield the user messages since the last answer, the latest first."""
    for message in reversed(history):
        if message.role != "user":
            return
        yield message


def _repeats(message: Message, assignment: str) -> bool:
    """Compare the beginning only: the text of an attached file may follow the assignment."""
    return full_text(message.parts).strip().startswith(assignment.strip())


def _read(messages: Iterable[Raw]) -> Iterator[_WireMessage]:
    for raw in messages:
        try:
            wire = _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError):
            continue
        if not wire.compressed:  # A summary replaces compressed messages.
            yield wire


def _message(wire: _WireMessage, session_id: SessionId) -> Message:
    message = Message(MessageId(wire.id), wire.role, session_id, list(_parts(wire)))
    message.model, message.provider = wire.model, wire.provider
    return encodable(message)


def _parts(wire: _WireMessage) -> Iterator[Part]:
    match wire.role:
        case "system" | "user":
            yield from _content(wire)
        case "assistant":
            yield from _answer(wire)
        case "tool":
            result = ToolResult(
                tool_call_id=wire.tool_call_id or "",
                content=wire.content or "",
                is_error=wire.tool_success is False,
            )
            yield ToolResultPart(result)


def _content(wire: _WireMessage) -> Iterator[Part]:
    """Yield text and images in order if the host sends parts, else the text."""
    parts: list[Part] = []
    for part in wire.content_parts or ():
        if part.text:
            parts.append(TextPart(Text(part.text)))
        elif isinstance(part.image_url, str):
            parts.append(ImageUrlPart(ImageUrl(part.image_url)))
        elif part.image_url is not None:
            image = ImageUrl(part.image_url.url, part.image_url.detail or "")
            parts.append(ImageUrlPart(image))
    if wire.content and not any(isinstance(part, TextPart) for part in parts):
        yield TextPart(Text(wire.content))
    yield from parts


def _answer(wire: _WireMessage) -> Iterator[Part]:
    if wire.reasoning or wire.reasoning_signature:
        yield ReasoningPart(Reasoning(wire.reasoning or "", wire.reasoning_signature or ""))
    yield from _content(wire)
    for call in wire.tool_calls or ():
        arguments = call.function.arguments
        text = arguments if isinstance(arguments, str) else encode(arguments).decode()
        yield ToolCallPart(ToolCall(call.id, call.function.name, text or "{}", finished=True))


def _with_names(messages: list[Message]) -> list[Message]:
    """Add the tool names to the results, which only have the ids of their calls."""
    names: dict[str, str] = {}
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                names[part.data.id] = part.data.name
            elif isinstance(part, ToolResultPart):
                part.data.name = names.get(part.data.tool_call_id, "")
    return messages
