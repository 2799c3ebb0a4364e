"""Sessions as sent to clients: their messages, and the files that they read and wrote."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from culm.ids import FileId, MessageId, SessionId

Role = Literal["user", "assistant", "tool", "system"]
Growing = Literal["text", "reasoning", "input"]  # The kinds of text that deltas append to.


class Text(Struct):
    text: str = ""


class Reasoning(Struct):
    thinking: str = ""
    signature: str = ""
    started_at: int = 0
    finished_at: int = 0


class ImageUrl(Struct):
    url: str = ""
    detail: str = ""


class Binary(Struct, rename={"path": "Path", "mime_type": "MIMEType", "data": "Data"}):
    path: str = ""
    mime_type: str = ""
    data: bytes = b""


class ToolCall(Struct):
    id: str = ""
    name: str = ""
    input: str = ""
    finished: bool = False


class ToolResult(Struct):
    tool_call_id: str = ""
    name: str = ""
    content: str = ""
    data: str = ""
    mime_type: str = ""
    metadata: str = ""
    is_error: bool = False


class Finish(Struct, omit_defaults=True):
    """The end of a message.

    `reason` is one that Crush clients know. `culm_reason` is set where ours is more specific.
    """

    reason: str
    time: int
    message: str = ""
    details: str = ""
    culm_reason: str = ""


class ShellCommand(Struct):
    command: str = ""
    output: str = ""
    exit_code: int = 0


class TextPart(Struct, tag_field="type", tag="text"):
    data: Text


class ReasoningPart(Struct, tag_field="type", tag="reasoning"):
    data: Reasoning


class ImageUrlPart(Struct, tag_field="type", tag="image_url"):
    data: ImageUrl


class BinaryPart(Struct, tag_field="type", tag="binary"):
    data: Binary


class ToolCallPart(Struct, tag_field="type", tag="tool_call"):
    data: ToolCall


class ToolResultPart(Struct, tag_field="type", tag="tool_result"):
    data: ToolResult


class FinishPart(Struct, tag_field="type", tag="finish"):
    data: Finish


class ShellCommandPart(Struct, tag_field="type", tag="shell_command"):
    data: ShellCommand


Part = (
    TextPart
    | ReasoningPart
    | ImageUrlPart
    | BinaryPart
    | ToolCallPart
    | ToolResultPart
    | FinishPart
    | ShellCommandPart
)


class Message(Struct):
    id: MessageId
    role: Role
    session_id: SessionId
    parts: list[Part] = msgspec.field(default_factory=list[Part])
    model: str = ""
    provider: str = ""
    created_at: int = 0
    updated_at: int = 0
    is_summary_message: bool = False
    # Increases when parts are cleared, at finish and at recovery. Within one rev text only grows.
    rev: int = 0
    # The run whose turn contains the message. For a prompt that was folded into another run's
    # turn, that other run. It never changes. Empty if no run wrote the message, and in messages
    # stored before this field existed.
    run_id: str = ""


class RawMessage(Struct, gc=False):  # It is never part of a cycle, and a listing makes thousands.
    """A message whose parts are still the JSON they were stored as."""

    id: MessageId
    role: Role
    session_id: SessionId
    parts: msgspec.Raw
    model: str
    provider: str
    created_at: int
    updated_at: int
    is_summary_message: bool
    rev: int
    run_id: str


class GoneMessage(Struct):
    """The fields of a deleted message in its `deleted` event. Crush requires `parts`."""

    id: MessageId
    session_id: SessionId
    role: str = ""
    parts: tuple[()] = ()
    model: str = ""
    provider: str = ""
    created_at: int = 0
    updated_at: int = 0


def new_part(kind: Growing) -> Part:
    match kind:
        case "text":
            return TextPart(Text())
        case "reasoning":
            return ReasoningPart(Reasoning())
        case "input":
            return ToolCallPart(ToolCall())


def text_of(part: Part, kind: Growing) -> str | None:
    """The text that deltas of `kind` append to, or None if the part has none of that kind."""
    match kind, part:
        case "text", TextPart(data=data):
            return data.text
        case "reasoning", ReasoningPart(data=data):
            return data.thinking
        case "input", ToolCallPart(data=data):
            return data.input
        case _:
            return None


def growing_of(part: Part) -> Growing | None:
    match part:
        case TextPart():
            return "text"
        case ReasoningPart():
            return "reasoning"
        case ToolCallPart():
            return "input"
        case _:
            return None


def set_text(part: Part, text: str) -> None:
    match part:
        case TextPart(data=data):
            data.text = text
        case ReasoningPart(data=data):
            data.thinking = text
        case ToolCallPart(data=data):
            data.input = text
        case _:
            raise AssertionError(f"a {type(part).__name__} does not grow")


def append_text(parts: list[Part], part: int, kind: Growing, offset: int, text: str) -> bool:
    """Append `text`, which starts at `offset` (code points) of a part, without what overlaps.

    Returns False if it does not fit: it starts beyond the known end, or the part has another kind.
    """
    if part == len(parts) and offset == 0:
        parts.append(new_part(kind))
    if not 0 <= part < len(parts):
        return False
    known = text_of(parts[part], kind)
    if known is None or offset > len(known):
        return False
    if offset + len(text) > len(known):
        set_text(parts[part], known + text[len(known) - offset :])
    return True


def close_parts(parts: Sequence[Part], now: int) -> None:
    """Close all parts: a call with incomplete input gets an empty one, reasoning gets an end."""
    for part in parts:
        match part:
            case ToolCallPart(data=call) if not call.finished:
                call.input, call.finished = "{}", True
            case ReasoningPart(data=reasoning) if not reasoning.finished_at:
                reasoning.finished_at = now
            case _:
                pass


def full_text(parts: Sequence[Part]) -> str:
    """The text of a message, without reasoning and tool calls."""
    return "".join(part.data.text for part in parts if isinstance(part, TextPart))


def is_finished(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, FinishPart) for part in parts)


# --- sessions and their files


class Todo(Struct):
    content: str = ""
    status: Literal["pending", "in_progress", "completed"] = "pending"
    active_form: str = ""


class Session(Struct):
    id: SessionId
    parent_session_id: str = ""
    title: str = ""
    message_count: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    summary_message_id: str = ""
    cost: float = 0.0
    todos: list[Todo] = msgspec.field(default_factory=list[Todo])
    created_at: int = 0
    updated_at: int = 0
    # Computed in REST responses. Events carry false and 0, because these two are not stored.
    is_busy: bool = False
    attached_clients: int = 0


class SaveSession(Struct):
    """The fields of a session that a client may set. Other fields are ignored."""

    title: str = ""


class File(Struct):
    """One version of a file. A session's first version of a path is the content it found there."""

    id: FileId
    session_id: SessionId
    path: str
    content: str
    version: int
    created_at: int
    updated_at: int


class ReadFile(Struct):
    session_id: str = ""
    path: str = ""
