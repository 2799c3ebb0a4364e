"""The conversation that a host sends with an assignment, as messages that our models read. Pure.

A host may be another system's: what of its messages we do not know is passed over, and a message
that cannot be read at all is left out.
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


class _Spoken(Struct):
    """One message of the conversation; more fields are known to its host than to us."""

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
    # Ours: who said it. Only that model believes the signature of its reasoning.
    model: str = ""
    provider: str = ""


_decoder = msgspec.json.Decoder(_Spoken)


def history_from(messages: Iterable[Raw], assignment: str, session_id: SessionId) -> list[Message]:
    """All that was said, oldest first, every call with its result; the assignment is in it once."""
    known = [_message(spoken, session_id) for spoken in _read(messages)]
    history = history_of(_with_names(known), summary_id="")
    if not any(_repeats(message, assignment) for message in _messages_since(history)):
        history.append(user_message(session_id, clean(assignment)))
    return history


def _messages_since(history: Sequence[Message]) -> Iterator[Message]:
    """What was said since the last answer."""
    for message in reversed(history):
        if message.role != "user":
            return
        yield message


def _repeats(message: Message, assignment: str) -> bool:
    """A file that came with it may stand behind it."""
    return full_text(message.parts).strip().startswith(assignment.strip())


def _read(messages: Iterable[Raw]) -> Iterator[_Spoken]:
    for raw in messages:
        try:
            spoken = _decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError):
            continue
        if not spoken.compressed:  # Else a summary stands in its place.
            yield spoken


def _message(spoken: _Spoken, session_id: SessionId) -> Message:
    message = Message(MessageId(spoken.id), spoken.role, session_id, list(_parts(spoken)))
    message.model, message.provider = spoken.model, spoken.provider
    return encodable(message)


def _parts(spoken: _Spoken) -> Iterator[Part]:
    match spoken.role:
        case "system" | "user":
            yield from _content(spoken)
        case "assistant":
            yield from _answer(spoken)
        case "tool":
            result = ToolResult(
                tool_call_id=spoken.tool_call_id or "",
                content=spoken.content or "",
                is_error=spoken.tool_success is False,
            )
            yield ToolResultPart(result)


def _content(spoken: _Spoken) -> Iterator[Part]:
    """Text and images in their order, where a host has that; else the text."""
    parts: list[Part] = []
    for part in spoken.content_parts or ():
        if part.text:
            parts.append(TextPart(Text(part.text)))
        elif isinstance(part.image_url, str):
            parts.append(ImageUrlPart(ImageUrl(part.image_url)))
        elif part.image_url is not None:
            image = ImageUrl(part.image_url.url, part.image_url.detail or "")
            parts.append(ImageUrlPart(image))
    if spoken.content and not any(isinstance(part, TextPart) for part in parts):
        yield TextPart(Text(spoken.content))
    yield from parts


def _answer(spoken: _Spoken) -> Iterator[Part]:
    if spoken.reasoning or spoken.reasoning_signature:
        yield ReasoningPart(Reasoning(spoken.reasoning or "", spoken.reasoning_signature or ""))
    yield from _content(spoken)
    for call in spoken.tool_calls or ():
        given = call.function.arguments
        text = given if isinstance(given, str) else encode(given).decode()
        yield ToolCallPart(ToolCall(call.id, call.function.name, text or "{}", finished=True))


def _with_names(messages: list[Message]) -> list[Message]:
    """A result says which call it answers, and our models also want to know which tool's it is."""
    names: dict[str, str] = {}
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                names[part.data.id] = part.data.name
            elif isinstance(part, ToolResultPart):
                part.data.name = names.get(part.data.tool_call_id, "")
    return messages
