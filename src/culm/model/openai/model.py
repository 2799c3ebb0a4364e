"""The adapter for OpenAI-style chat completions, which most providers and local servers offer.

Encodes requests, adapted to the vendor: any history becomes a valid one (INV-82), every call has a
result, images are sent only to models with image input, and reasoning is returned only to vendors
that want it. `answer.py` parses answers, and `vendor_quirks.py` lists the deviations of vendors.
"""

import re
import string
from base64 import b64encode
from hashlib import sha256

import msgspec
from msgspec import UNSET

from culm.model.base import ModelRequest, ModelSetup, ProviderAccess, ToolSpec
from culm.model.failures import ProviderPeer
from culm.model.history import (
    NO_RESULT,
    Block,
    text_block,
    text_of,
    tool_name,
    unseen_image,
    user_blocks,
)
from culm.model.http import merge_body
from culm.model.openai.answer import OpenAiAnswer
from culm.model.openai.vendor_quirks import VendorQuirks, quirks_of
from culm.model.reasoning_roundtrip import ReasoningLine, parse_lines
from culm.model.streaming import ProviderModel
from culm.wire.config import Model as ModelInfo
from culm.wire.messages import (
    Binary,
    ImageUrl,
    Message,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

IMAGES_FOLLOW = "The images of the results above:"
SHORT_ID_CHARS = 9  # Required by Mistral, and short enough for all vendors.
NAME_CHARS_MAX = 64  # Of a tool; the limit of OpenAI and most others.

_ALPHABET = string.digits + string.ascii_letters


class OpenAiModel(ProviderModel):
    PATH = "/chat/completions"
    TAKES_DOCUMENT = True

    def __init__(self, setup: ModelSetup) -> None:
        key = setup.access.api_key.strip()  # Keys are often pasted with their line end.
        super().__init__(setup, {"Authorization": f"Bearer {key}"} if key else {})

    def _encode(self, request: ModelRequest) -> bytes:
        return encode_body(request, self._setup.access, self._setup.info)

    def _make_parser(self, peer: ProviderPeer) -> OpenAiAnswer:
        return OpenAiAnswer(peer, quirks_of(self._setup.access))


def encode_body(request: ModelRequest, access: ProviderAccess, info: ModelInfo) -> bytes:
    """The JSON to post. The settings and then the access override our own fields."""
    quirks = quirks_of(access)
    conversation = _Conversation(quirks, info, request.settings.provider)
    if request.system:
        conversation.messages.append(_system(request.system))
    for message in request.messages:
        conversation.add(message)
    body: Block = {
        "model": info.id,
        "messages": conversation.end(),
        "stream": True,
        **_settings(request, quirks, info),
    }
    if quirks.counts_when_asked:
        body["stream_options"] = {"include_usage": True}
    if quirks.prices_when_asked:
        body["usage"] = {"include": True}
    if request.tools:
        body["tools"] = [_tool(spec) for spec in request.tools]
    return merge_body(body, request, access)


def _settings(request: ModelRequest, quirks: VendorQuirks, info: ModelInfo) -> Block:
    chosen = request.settings
    known: Block = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k if quirks.takes_top_k else UNSET,
        "frequency_penalty": chosen.frequency_penalty,
        "presence_penalty": chosen.presence_penalty,
        quirks.max_tokens: request.max_tokens or chosen.max_tokens or UNSET,
        **_effort(request, quirks, info),
    }
    refused = quirks.refused_by_reasoners if info.can_reason else ()
    return {name: x for name, x in known.items() if x is not UNSET and name not in refused}


def _effort(request: ModelRequest, quirks: VendorQuirks, info: ModelInfo) -> Block:
    """The chosen effort; else the one that the vendor requires together with tools."""
    effort = request.settings.reasoning_effort
    levels = () if info.reasoning_levels is UNSET else info.reasoning_levels
    if not effort and request.tools and quirks.effort_with_tools in levels:
        effort = quirks.effort_with_tools
    if not effort:
        return {}
    if quirks.nests_effort:
        return {"reasoning": {"effort": effort}}
    return {"reasoning_effort": effort}


def _tool(spec: ToolSpec) -> Block:
    return {
        "type": "function",
        "function": {
            "name": spec.name,
            "description": spec.description,
            "parameters": spec.parameters,
        },
    }


def _system(text: str) -> Block:
    return {"role": "system", "content": text}


class _Conversation:
    """Builds the messages of one request, valid at every step."""

    def __init__(self, quirks: VendorQuirks, info: ModelInfo, provider_id: str) -> None:
        self.messages: list[Block] = []
        self._quirks = quirks
        self._info = info
        self._self = (provider_id, info.id)
        self._open: dict[str, None] = {}  # The calls without a result, in order.
        # Of results, which can only be text: a user message after the results has the images.
        self._images: list[Block] = []

    def add(self, message: Message) -> None:
        """Add a message. It can become several messages, or none if it has no usable part."""
        if message.role == "tool":
            for part in message.parts:
                if isinstance(part, ToolResultPart):
                    self._add_result(part.data)
            return
        self._close_calls()
        match message.role:
            case "user":
                sees_images = self._info.supports_attachments
                blocks = user_blocks(message.parts, _image, _linked, sees_images=sees_images)
                self._add_user(list(blocks))
            case "assistant":
                self._add_user([])
                self._add_assistant(message)
            case "system":
                self._add_user([])
                if text := text_of(message.parts):
                    self.messages.append(_system(text))

    def end(self) -> list[Block]:
        self._close_calls()
        self._add_user([])
        return self.messages

    def _add_user(self, blocks: list[Block]) -> None:
        if self._images:
            blocks = [text_block(IMAGES_FOLLOW), *self._images, *blocks]
            self._images = []
        if not blocks:
            return
        if self._quirks.after_results and self.messages and self.messages[-1]["role"] == "tool":
            self.messages.append({"role": "assistant", "content": self._quirks.after_results})
        self.messages.append({"role": "user", "content": _content(blocks)})

    def _add_assistant(self, message: Message) -> None:
        text = text_of(message.parts)
        calls = [part.data for part in message.parts if isinstance(part, ToolCallPart)]
        if not (text or calls):
            return
        answer: Block = {"role": "assistant", "content": text or None}
        thoughts = [part.data for part in message.parts if isinstance(part, ReasoningPart)]
        is_own = (message.provider, message.model) == self._self
        lines = [line for t in thoughts if is_own for line in parse_lines(t.signature)]
        if calls:
            signatures = self._signatures(lines, is_own=is_own)
            answer["tool_calls"] = [self._call(c, signatures.get(n)) for n, c in enumerate(calls)]
        if self._quirks.returns_reasoning:
            thought = "\n\n".join(t.thinking for t in thoughts if t.thinking)
            if thought or self._info.can_reason:
                answer["reasoning_content"] = thought
        if self._quirks.returns_details:
            details = [detail for line in lines for detail in line.details]
            answer |= {"reasoning_details": details} if details else {}
        self.messages.append(answer)

    def _signatures(self, lines: list[ReasoningLine], *, is_own: bool) -> dict[int, str]:
        """The signatures of the calls of one message, by index."""
        if not self._quirks.foreign_signature:
            return {}
        if not is_own:
            return {0: self._quirks.foreign_signature}
        return {line.call: line.signature for line in lines if line.signature}

    def _call(self, call: ToolCall, signature: str | None) -> Block:
        call_id = self._id(call.id)
        self._open[call_id] = None
        name = tool_name(call.name, NAME_CHARS_MAX)
        function = {"name": name, "arguments": _arguments(call.input)}
        sent: Block = {"id": call_id, "type": "function", "function": function}
        if signature:
            sent["extra_content"] = {"google": {"thought_signature": signature}}
        return sent

    def _add_result(self, result: ToolResult) -> None:
        call_id = self._id(result.tool_call_id)
        if call_id not in self._open:
            return  # A result without a call, or a second one.
        del self._open[call_id]
        notes = [result.content]
        if result.data and result.mime_type.startswith("image/"):
            if self._info.supports_attachments:
                notes.append("[The image is in the next message.]")
                self._images.append(_embedded(result.mime_type, result.data))
            else:
                notes.append(unseen_image())
        elif result.data:
            notes.append(f"[Data ({result.mime_type}) was left out: it is not text.]")
        content = "\n".join(filter(None, notes))
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _close_calls(self) -> None:
        for call_id in self._open:
            missing = {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}
            self.messages.append(missing)
        self._open.clear()

    def _id(self, call_id: str) -> str:
        """The id, or a hash of it in the form that the vendor accepts."""
        if re.fullmatch(self._quirks.call_id, call_id):
            return call_id
        number = int.from_bytes(sha256(call_id.encode(errors="replace")).digest())
        letters: list[str] = []
        for _ in range(SHORT_ID_CHARS):
            number, letter = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[letter])
        return "".join(letters)


def _arguments(text: str) -> str:
    """The arguments if they are an object, as servers require; a call can have been cut off."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return "{}"
    return text


# --- content of a user's message


def _content(blocks: list[Block]) -> str | list[Block]:
    """Plain text if there are no images, as some servers accept nothing else."""
    if any(block["type"] != "text" for block in blocks):
        return blocks
    return "\n\n".join(block["text"] for block in blocks)


def _image(file: Binary) -> Block:
    return _embedded(file.mime_type, b64encode(file.data).decode())


def _embedded(mime_type: str, data: str) -> Block:
    return {"type": "image_url", "image_url": {"url": f"data:{mime_type};base64,{data}"}}


def _linked(image: ImageUrl) -> Block:
    detail = {"detail": image.detail} if image.detail else {}
    return {"type": "image_url", "image_url": {"url": image.url} | detail}
