"""Conversion of a history to Anthropic's messages.

Pure. Any history becomes one that the API accepts (INV-82): the first and the last message are the
user's, roles alternate, no message is empty, every call has a unique id and a result. Thinking is
returned only during its own turn and only to the model that produced it: the API needs no more,
and it rejects thinking if anything before it has changed.
"""

import re
from base64 import b64encode
from collections.abc import Iterable

import msgspec

from culm.model.anthropic.reasoning_roundtrip import ThinkingBlock, thoughts_of
from culm.model.base import (
    ModelRequest,
    command_text,
    file_text,
    text_of,
    unread_file,
    unseen_image,
)
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.messages import (
    Binary,
    BinaryPart,
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    ReasoningPart,
    ShellCommandPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})  # Supported types.
NAME_CHARS_MAX = 128
# A history can begin in the middle, if a summary was lost. It can end with an incomplete answer;
# models since Claude 4.6 refuse to continue their own answer.
BEFORE = "[The beginning of this conversation is missing.]"
GO_ON = "Go on."
NO_RESULT = "[This call has no result.]"
NO_OUTPUT = "[no output]"  # An error result must not be empty.

_Object = dict[str, Json]
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def messages_of(request: ModelRequest, info: ModelInfo) -> list[_Object]:
    """The messages of a request as they are posted."""
    history = _History(sees_images=info.supports_attachments)
    turn = max((n for n, m in enumerate(request.messages) if m.role == "user"), default=-1)
    for n, message in enumerate(request.messages):
        match message.role:
            case "user":
                history.add_user(message.parts)
            case "assistant":
                own = (message.provider, message.model) == (request.settings.provider, info.id)
                history.add_assistant(message.parts, _thoughts(message) if own and n > turn else [])
            case "tool":
                history.add_results(message.parts)
            case "system":
                pass  # It has a field of its own.
    return history.end()


def starts_with_thinking(messages: list[_Object]) -> bool:
    """True if thinking with a budget can be requested.

    It requires that every answer with calls in this turn begins with thinking. An answer of
    another model, or of this one before thinking was enabled, does not; then the turn ends without.
    """
    for n in range(len(messages) - 1, 0, -2):
        if messages[n]["content"][0]["type"] != "tool_result":
            return True
        if messages[n - 1]["content"][0]["type"] not in ("thinking", "redacted_thinking"):
            return False
    return True


def called_names(messages: list[_Object]) -> list[str]:
    """The tools that were called, without duplicates, in order."""
    blocks = (block for message in messages for block in message["content"])
    return list(dict.fromkeys(b["name"] for b in blocks if b["type"] == "tool_use"))


def _thoughts(message: Message) -> list[ThinkingBlock]:
    return [t for p in message.parts if isinstance(p, ReasoningPart) for t in thoughts_of(p.data)]


class _History:
    """Builds the messages. Consecutive messages of the same role are combined."""

    def __init__(self, *, sees_images: bool) -> None:
        self._sees_images = sees_images
        self._messages: list[_Object] = []
        self._ids: set[str] = set()
        self._repeats: dict[str, int] = {}  # The number of duplicates of each id.
        self._open: dict[str, str] = {}  # Calls without a result: our id, id in the request.
        self._results = 0  # In the last message.

    def add_user(self, parts: list[Part]) -> None:
        blocks = (_block(part, sees_images=self._sees_images) for part in parts)
        self._add_message("user", [block for block in blocks if block is not None])

    def add_assistant(self, parts: list[Part], thoughts: list[ThinkingBlock]) -> None:
        self._close()
        calls = [self._call(part.data) for part in parts if isinstance(part, ToolCallPart)]
        self._add_message("assistant", _woven(text_of(parts), calls, thoughts))

    def add_results(self, parts: Iterable[Part]) -> None:
        """Add results, which come first in a message and belong to calls of the previous one."""
        for part in parts:
            if isinstance(part, ToolResultPart) and part.data.tool_call_id in self._open:
                self._add_result(part.data)

    def end(self) -> list[_Object]:
        self._close()
        if not self._messages or self._messages[-1]["role"] == "assistant":
            self._add_message("user", [_text(GO_ON)])
        return self._messages

    def _add_result(self, result: ToolResult) -> None:
        call_id = self._open.pop(result.tool_call_id)
        block = _result(result, call_id, sees_images=self._sees_images)
        self._add_message("user", [block], at=self._results)
        self._results += 1

    def _close(self) -> None:
        """Add an error result to every call that has none."""
        for call_id in list(self._open):
            self._add_result(ToolResult(call_id, content=NO_RESULT, is_error=True))

    def _add_message(self, role: str, blocks: list[_Object], *, at: int | None = None) -> None:
        if not blocks:
            return
        if not self._messages and role == "assistant":
            self._messages.append({"role": "user", "content": [_text(BEFORE)]})
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
            self._results = 0
        content: list[_Object] = self._messages[-1]["content"]
        index = len(content) if at is None else at
        content[index:index] = blocks

    def _call(self, call: ToolCall) -> _Object:
        """A call with a valid, unique id, which the ids of other providers need not be."""
        call_id = stem = _NOT_IN_NAMES.sub("_", call.id) or "call"
        while call_id in self._ids:
            self._repeats[stem] = self._repeats.get(stem, 1) + 1
            call_id = f"{stem}_{self._repeats[stem]}"
        self._ids.add(call_id)
        self._open[call.id] = call_id
        name = _NOT_IN_NAMES.sub("_", call.name)[:NAME_CHARS_MAX] or "unknown"
        return {"type": "tool_use", "id": call_id, "name": name, "input": _arguments(call.input)}


def _woven(text: str, calls: list[_Object], thoughts: list[ThinkingBlock]) -> list[_Object]:
    """The blocks of an answer, with each thinking block at its original position."""
    blocks: list[_Object] = []
    said = called = 0
    for thought in thoughts:
        blocks += _text_block(text[said : thought.said]) + calls[called : thought.called]
        blocks.append(_thinking(thought))
        # Our own positions only grow; those of another program must not repeat a call.
        said, called = max(said, thought.said), max(called, thought.called)
    return blocks + _text_block(text[said:]) + calls[called:]


def _thinking(thought: ThinkingBlock) -> _Object:
    match thought.kind:
        case "thinking":
            return {"type": "thinking", "thinking": thought.text, "signature": thought.proof}
        case "redacted":
            return {"type": "redacted_thinking", "data": thought.proof}


def _arguments(text: str) -> Json:
    """The arguments as an object, even if the call was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Json])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


def _result(result: ToolResult, call_id: str, *, sees_images: bool) -> _Object:
    content = _text_block(result.content)
    # An error result can only contain text.
    if result.data and result.mime_type.startswith("image/") and not result.is_error:
        is_shown = sees_images and result.mime_type in IMAGES
        shown = _encoded(result.mime_type, result.data) if is_shown else _text(unseen_image())
        content.append(shown)
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content or NO_OUTPUT}
    return block | ({"is_error": True} if result.is_error else {})


# --- parts of a user's message


def _block(part: Part, *, sees_images: bool) -> _Object | None:
    match part:
        case TextPart(data=data):
            return _text(data.text) if data.text.strip() else None
        case ShellCommandPart(data=command):
            return _text(command_text(command))
        case BinaryPart(data=file) if file.mime_type.startswith("text/"):
            return _text(file_text(file))
        case BinaryPart(data=file) if file.mime_type.startswith("image/"):
            return _image(file) if sees_images else _text(unseen_image(file.path))
        case BinaryPart(data=file):
            return _text(unread_file(file))
        case ImageUrlPart(data=image):
            return _linked(image) if sees_images else _text(unseen_image())
        case _:
            return None


def _text_block(text: str) -> list[_Object]:
    """Text as a block; none if it is blank."""
    return [_text(text)] if text.strip() else []


def _text(text: str) -> _Object:
    return {"type": "text", "text": text}


def _image(file: Binary) -> _Object:
    if file.mime_type not in IMAGES or not file.data:
        kinds = "JPEG, PNG, GIF or WebP"
        return _text(f"[The image {file.path} ({file.mime_type}) was left out: it is not {kinds}.]")
    return _encoded(file.mime_type, b64encode(file.data).decode())


def _linked(image: ImageUrl) -> _Object:
    """An image by URL. The API fetches only HTTPS; the content of a data URL is embedded."""
    head, _, data = image.url.partition(";base64,")
    if data and head.removeprefix("data:") in IMAGES:
        return _encoded(head.removeprefix("data:"), data)
    if image.url.startswith("https://"):
        return {"type": "image", "source": {"type": "url", "url": image.url}}
    return _text("[An image was left out: its address is not HTTPS.]")


def _encoded(mime_type: str, data: str) -> _Object:
    source = {"type": "base64", "media_type": mime_type, "data": data}
    return {"type": "image", "source": source}
