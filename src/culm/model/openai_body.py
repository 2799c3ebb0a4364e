"""A request in the words of OpenAI's chat completions.

Pure. Reasoning is not sent back: this dialect has no place for it.
"""

from base64 import b64encode

import msgspec
from msgspec import UNSET

from culm.model.base import Access, Request, ToolSpec
from culm.wire.codec import Json, encodable, encode
from culm.wire.config import SelectedModel
from culm.wire.messages import (
    Binary,
    BinaryPart,
    ImageUrlPart,
    Message,
    Part,
    ShellCommand,
    ShellCommandPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResultPart,
)

_Object = dict[str, Json]


def encode_body(request: Request, access: Access, model_id: str, *, sees_images: bool) -> bytes:
    """The JSON to post. What the settings and then the access add goes over what is ours."""
    messages = [_system(request.system)] if request.system else []
    for message in request.messages:
        messages += _messages(message, sees_images=sees_images)
    body: _Object = {
        "model": model_id,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_settings(request.settings),
    }
    if request.tools:
        body["tools"] = [_tool(spec) for spec in request.tools]
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    options = request.settings.provider_options
    body |= {} if options is UNSET else options
    body |= access.body
    try:
        return encode(body)
    except UnicodeEncodeError:
        return encode(encodable(body))


def _settings(chosen: SelectedModel) -> _Object:
    known: _Object = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "frequency_penalty": chosen.frequency_penalty,
        "presence_penalty": chosen.presence_penalty,
        "max_tokens": chosen.max_tokens or UNSET,
        "reasoning_effort": chosen.reasoning_effort or UNSET,
    }
    return {name: value for name, value in known.items() if value is not UNSET}


def _tool(spec: ToolSpec) -> _Object:
    return {
        "type": "function",
        "function": {
            "name": spec.name,
            "description": spec.description,
            "parameters": spec.parameters,
        },
    }


def _system(text: str) -> _Object:
    return {"role": "system", "content": text}


def _messages(message: Message, *, sees_images: bool) -> list[_Object]:
    """One message of ours can be several of theirs, or none if nothing of it can be sent."""
    match message.role:
        case "system":
            text = _text_of(message.parts)
            return [_system(text)] if text else []
        case "user":
            blocks = [
                block
                for part in message.parts
                if (block := _block(part, sees_images=sees_images)) is not None
            ]
            return [{"role": "user", "content": _content(blocks)}] if blocks else []
        case "assistant":
            return _assistant(message.parts)
        case "tool":
            results = [part.data for part in message.parts if isinstance(part, ToolResultPart)]
            return [
                {"role": "tool", "tool_call_id": result.tool_call_id, "content": result.content}
                for result in results
            ]


def _assistant(parts: list[Part]) -> list[_Object]:
    text = _text_of(parts)
    calls = [_call(part.data) for part in parts if isinstance(part, ToolCallPart)]
    if calls:
        return [{"role": "assistant", "content": text or None, "tool_calls": calls}]
    return [{"role": "assistant", "content": text}] if text else []


def _call(call: ToolCall) -> _Object:
    function = {"name": call.name, "arguments": _arguments(call.input)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> str:
    """A call that was cut off stays in the history; servers refuse arguments that are no object."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "{}"
    return text


def _text_of(parts: list[Part]) -> str:
    return "\n\n".join(p.data.text for p in parts if isinstance(p, TextPart) and p.data.text)


# --- a user's message: text and images, in their order


def _content(blocks: list[_Object]) -> str | list[_Object]:
    """Plain text where that is all: some servers take nothing else."""
    if any(block["type"] != "text" for block in blocks):
        return blocks
    return "\n\n".join(block["text"] for block in blocks)


def _block(part: Part, *, sees_images: bool) -> _Object | None:
    match part:
        case TextPart(data=data):
            return _text(data.text) if data.text else None
        case ShellCommandPart(data=command):
            return _text(_shell(command))
        case BinaryPart(data=file) if file.mime_type.startswith("text/"):
            return _text(_file(file))
        case BinaryPart(data=file) if file.mime_type.startswith("image/"):
            if sees_images:
                data = b64encode(file.data).decode()
                return _image({"url": f"data:{file.mime_type};base64,{data}"})
            return _text(f"[The image {file.path} was left out: this model sees no images.]")
        case BinaryPart(data=file):
            return _text(f"[The file {file.path} ({file.mime_type}) was left out: it is no text.]")
        case ImageUrlPart(data=image):
            if sees_images:
                return _image(
                    {"url": image.url} | ({"detail": image.detail} if image.detail else {})
                )
            return _text("[An image was left out: this model sees no images.]")
        case _:
            return None


def _text(text: str) -> _Object:
    return {"type": "text", "text": text}


def _image(image_url: _Object) -> _Object:
    return {"type": "image_url", "image_url": image_url}


def _file(file: Binary) -> str:
    return f'<file path="{file.path}">\n{file.data.decode(errors="replace")}\n</file>'


def _shell(ran: ShellCommand) -> str:
    return (
        f"I ran this command:\n<command>\n{ran.command}\n</command>\n"
        f"<output>\n{ran.output}\n</output>\n<exit_code>{ran.exit_code}</exit_code>"
    )
