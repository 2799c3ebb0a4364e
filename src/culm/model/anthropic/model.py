"""The adapter for Anthropic's messages API, which some other providers offer, too.

Encodes requests: the settings that each generation of models accepts, the cache markers, and the
history. Any history becomes one that the API accepts (INV-82): the first and the last message are
the user's, roles alternate, no message is empty, every call has a unique id and a result. Thinking
is returned only during its own turn and only to the model that produced it: the API needs no more,
and it rejects thinking if anything before it has changed. `answer.py` parses answers.
"""

import re
from base64 import b64encode
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, structs
from msgspec.structs import replace

from culm.model.anthropic.answer import AnthropicAnswer
from culm.model.base import ModelRequest, ModelSetup, ProviderAccess, ToolSpec
from culm.model.failures import ProviderPeer
from culm.model.history import (
    NO_RESULT,
    NOT_IN_NAMES,
    Block,
    text_block,
    text_of,
    tool_name,
    unseen_image,
    user_blocks,
)
from culm.model.http import merge_body
from culm.model.reasoning_roundtrip import ThinkingBlock, thoughts_of
from culm.model.streaming import ProviderModel
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import (
    Binary,
    ImageUrl,
    Message,
    Part,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

VERSION = "2023-06-01"  # Of the API. Other providers do not support later ones.
BEARER = "Bearer "  # Prefix of keys that are tokens, such as those of gateways and logins.
# The API requires a number. Every model since Claude 3.5 can write this much.
DEFAULT_MAX_TOKENS = 8192
# Thinking tokens per effort, for models that need a budget. The API's minimum is 1024; with the
# default above, the maximum stays below the 32,000 tokens that Opus 4 can write in total.
BUDGETS = {"minimal": 1024, "low": 4096, "medium": 10_240, "high": 20_480}
DEFAULT_EFFORT = "medium"
CACHED_USER_MESSAGES = 2  # With system and tools that makes four markers, the limit of the API.

IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})  # Supported types.
NAME_CHARS_MAX = 128
# A history can begin in the middle, if a summary was lost. It can end with an incomplete answer;
# models since Claude 4.6 refuse to continue their own answer.
BEFORE = "[The beginning of this conversation is missing.]"
GO_ON = "Go on."
NO_OUTPUT = "[no output]"  # An error result must not be empty.


class AnthropicModel(ProviderModel):
    PATH = "/messages"

    def __init__(self, setup: ModelSetup) -> None:
        access = setup.access
        key = access.api_key.strip()  # Keys are often pasted with their line end.
        token = key.removeprefix(BEARER).strip()
        # Without "Bearer", so that the token itself is treated as a secret.
        bare = structs.replace(access, base_url=full_url(access.base_url), api_key=token)
        headers = _headers(token, is_bearer=token != key)
        super().__init__(replace(setup, access=bare), headers)

    def _encode(self, request: ModelRequest) -> bytes:
        return encode_body(request, self._setup.access, self._setup.info)

    def _make_parser(self, peer: ProviderPeer) -> AnthropicAnswer:
        return AnthropicAnswer(peer)


def full_url(base_url: str) -> str:
    """The address with `/v1`, which users omit, as they do for Anthropic's own tools."""
    try:
        parts = urlsplit(base_url.strip())
    except ValueError:
        return base_url  # Sending a request there fails with a clear error.
    if not parts.netloc or parts.path.strip("/"):
        return base_url
    return parts._replace(path="/v1").geturl()


def _headers(token: str, *, is_bearer: bool) -> dict[str, str]:
    headers = {"anthropic-version": VERSION}
    if token and is_bearer:
        headers["Authorization"] = BEARER + token
    elif token:
        headers["x-api-key"] = token
    return headers


# --- the body of a request


def encode_body(request: ModelRequest, access: ProviderAccess, info: ModelInfo) -> bytes:
    """The JSON to post. The settings and then the access override our own fields."""
    body: Block = {"model": info.id, "stream": True}
    if system := _system(request):
        body["system"] = _cached(system)
    messages = messages_of(request, info)
    body |= _tools(request.tools, messages)
    body |= _settings(request, info, may_think=starts_with_thinking(messages))
    _cache(messages)
    body["messages"] = messages
    return merge_body(body, request, access)


def _system(request: ModelRequest) -> list[Block]:
    within = (text_of(m.parts) for m in request.messages if m.role == "system")
    return [{"type": "text", "text": text} for text in (request.system, *within) if text.strip()]


def _tools(specs: tuple[ToolSpec, ...], messages: list[Block]) -> Block:
    """The tools. Without any, those called in the history are declared but must not be used."""
    if specs:
        return {"tools": _cached([_tool(s.name, s.description, s.parameters) for s in specs])}
    if not (names := called_names(messages)):
        return {}
    gone = [_tool(name, "No longer available.", {"type": "object"}) for name in names]
    return {"tools": _cached(gone), "tool_choice": {"type": "none"}}


def _tool(name: str, description: str, parameters: dict[str, Json]) -> Block:
    return {"name": name, "description": description, "input_schema": parameters}


# --- caches: a marker ends the part that the next request will repeat


def _cached(blocks: list[Block]) -> list[Block]:
    """The blocks, with a cache marker on the last one."""
    return [*blocks[:-1], blocks[-1] | {"cache_control": {"type": "ephemeral"}}]


def _cache(messages: list[Block]) -> None:
    """Mark the end of this request, and that of the previous one, whose cache is used."""
    users = [message for message in messages if message["role"] == "user"]
    for message in users[-CACHED_USER_MESSAGES:]:
        message["content"] = _cached(message["content"])


# --- settings, which depend on the generation of the model


class ModelTraits(NamedTuple):
    """Parameters that a model accepts."""

    adapts: bool  # It decides itself how much it thinks, and rejects a budget.
    samples: bool  # It accepts a temperature and other sampling settings.


_FOREIGN = ModelTraits(adapts=False, samples=True)
_NEWEST = ModelTraits(adapts=True, samples=False)
# A number of one or two digits and an optional minor part; longer numbers are dates.
_VERSION = re.compile(r"(?<!\d)(\d{1,2})(?!\d)(?:[-.](\d{1,2})(?!\d))?")


def traits_of(model_id: str) -> ModelTraits:
    """The traits of a model by its id: "claude-opus-4-7", "claude-3-7-sonnet-20250219", ...

    Claude adapts since 4.6 and does not sample since 4.7. A Claude without a version is a new
    one. Other vendors implement the older form of the API.
    """
    _, is_claude, rest = model_id.lower().rpartition("claude")
    if not is_claude:
        return _FOREIGN
    found = _VERSION.search(rest)
    if found is None:
        return _NEWEST
    version = int(found[1]), int(found[2] or 0)
    return ModelTraits(adapts=version >= (4, 6), samples=version < (4, 7))


def _settings(request: ModelRequest, info: ModelInfo, *, may_think: bool) -> Block:
    chosen = request.settings
    traits = traits_of(info.id)
    fields: Block = {"max_tokens": _max_tokens(request, info)}
    effort = _effort(chosen, info)
    if effort is not None and traits.adapts:
        # Without `display`, the thinking is not streamed.
        fields["thinking"] = {"type": "adaptive", "display": "summarized"}
        if effort:
            fields["output_config"] = {"effort": "low" if effort == "minimal" else effort}
        return fields
    if effort is not None and may_think:
        budget = BUDGETS.get(effort or DEFAULT_EFFORT, BUDGETS["high"])
        if fields["max_tokens"] <= budget:
            fields["max_tokens"] += budget  # The limit includes thinking.
        fields["thinking"] = {"type": "enabled", "budget_tokens": budget}
        return fields
    return fields | (_sampling(chosen) if traits.samples else {})


def _max_tokens(request: ModelRequest, info: ModelInfo) -> int:
    configured = request.settings.max_tokens
    limit = request.max_tokens or (0 if configured is UNSET else configured)
    return limit or info.default_max_tokens or DEFAULT_MAX_TOKENS


def _effort(chosen: SelectedModel, info: ModelInfo) -> str | None:
    """The thinking effort: "" leaves it to the model, None requests no thinking."""
    effort = "" if chosen.reasoning_effort is UNSET else chosen.reasoning_effort.lower()
    if chosen.think is False or effort == "none":
        return None
    if chosen.think is True:
        return effort
    return effort if effort and info.can_reason else None


def _sampling(chosen: SelectedModel) -> Block:
    """Sampling settings. Some models reject temperature and top_p together; temperature wins."""
    known: Block = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p if chosen.temperature is UNSET else UNSET,
        "top_k": chosen.top_k,
    }
    return {name: value for name, value in known.items() if value is not UNSET}


# --- the history


def messages_of(request: ModelRequest, info: ModelInfo) -> list[Block]:
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


def starts_with_thinking(messages: list[Block]) -> bool:
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


def called_names(messages: list[Block]) -> list[str]:
    """The tools that were called, without duplicates, in order."""
    blocks = (block for message in messages for block in message["content"])
    return list(dict.fromkeys(b["name"] for b in blocks if b["type"] == "tool_use"))


def _thoughts(message: Message) -> list[ThinkingBlock]:
    return [t for p in message.parts if isinstance(p, ReasoningPart) for t in thoughts_of(p.data)]


class _History:
    """Builds the messages. Consecutive messages of the same role are combined."""

    def __init__(self, *, sees_images: bool) -> None:
        self._sees_images = sees_images
        self._messages: list[Block] = []
        self._ids: set[str] = set()
        self._repeats: dict[str, int] = {}  # The number of duplicates of each id.
        self._open: dict[str, str] = {}  # Calls without a result: our id, id in the request.
        self._results = 0  # In the last message.

    def add_user(self, parts: list[Part]) -> None:
        blocks = user_blocks(parts, _image, _linked, sees_images=self._sees_images)
        # Blank text is refused.
        shown = [b for b in blocks if b["type"] != "text" or b["text"].strip()]
        self._add_message("user", shown)

    def add_assistant(self, parts: list[Part], thoughts: list[ThinkingBlock]) -> None:
        self._close()
        calls = [self._call(part.data) for part in parts if isinstance(part, ToolCallPart)]
        self._add_message("assistant", _woven(text_of(parts), calls, thoughts))

    def add_results(self, parts: Iterable[Part]) -> None:
        """Add results, which come first in a message and belong to calls of the previous one."""
        for part in parts:
            if isinstance(part, ToolResultPart) and part.data.tool_call_id in self._open:
                self._add_result(part.data)

    def end(self) -> list[Block]:
        self._close()
        if not self._messages or self._messages[-1]["role"] == "assistant":
            self._add_message("user", [text_block(GO_ON)])
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

    def _add_message(self, role: str, blocks: list[Block], *, at: int | None = None) -> None:
        if not blocks:
            return
        if not self._messages and role == "assistant":
            self._messages.append({"role": "user", "content": [text_block(BEFORE)]})
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
            self._results = 0
        content: list[Block] = self._messages[-1]["content"]
        index = len(content) if at is None else at
        content[index:index] = blocks

    def _call(self, call: ToolCall) -> Block:
        """A call with a valid, unique id, which the ids of other providers need not be."""
        call_id = stem = NOT_IN_NAMES.sub("_", call.id) or "call"
        while call_id in self._ids:
            self._repeats[stem] = self._repeats.get(stem, 1) + 1
            call_id = f"{stem}_{self._repeats[stem]}"
        self._ids.add(call_id)
        self._open[call.id] = call_id
        name = tool_name(call.name, NAME_CHARS_MAX)
        return {"type": "tool_use", "id": call_id, "name": name, "input": _arguments(call.input)}


def _woven(text: str, calls: list[Block], thoughts: list[ThinkingBlock]) -> list[Block]:
    """The blocks of an answer, with each thinking block at its original position."""
    blocks: list[Block] = []
    said = called = 0
    for thought in thoughts:
        blocks += _visible(text[said : thought.said]) + calls[called : thought.called]
        blocks.append(_thinking(thought))
        # Our own positions only grow; those of another program must not repeat a call.
        said, called = max(said, thought.said), max(called, thought.called)
    return blocks + _visible(text[said:]) + calls[called:]


def _thinking(thought: ThinkingBlock) -> Block:
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


def _result(result: ToolResult, call_id: str, *, sees_images: bool) -> Block:
    content = _visible(result.content)
    # An error result can only contain text.
    if result.data and result.mime_type.startswith("image/") and not result.is_error:
        is_shown = sees_images and result.mime_type in IMAGES
        shown = _encoded(result.mime_type, result.data) if is_shown else text_block(unseen_image())
        content.append(shown)
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content or NO_OUTPUT}
    return block | ({"is_error": True} if result.is_error else {})


# --- content of messages


def _visible(text: str) -> list[Block]:
    """Text as a block; none if it is blank."""
    return [text_block(text)] if text.strip() else []


def _image(file: Binary) -> Block:
    if file.mime_type not in IMAGES or not file.data:
        kinds = "JPEG, PNG, GIF or WebP"
        return text_block(
            f"[The image {file.path} ({file.mime_type}) was left out: it is not {kinds}.]"
        )
    return _encoded(file.mime_type, b64encode(file.data).decode())


def _linked(image: ImageUrl) -> Block:
    """An image by URL. The API fetches only HTTPS; the content of a data URL is embedded."""
    head, _, data = image.url.partition(";base64,")
    if data and head.removeprefix("data:") in IMAGES:
        return _encoded(head.removeprefix("data:"), data)
    if image.url.startswith("https://"):
        return {"type": "image", "source": {"type": "url", "url": image.url}}
    return text_block("[An image was left out: its address is not HTTPS.]")


def _encoded(mime_type: str, data: str) -> Block:
    source = {"type": "base64", "media_type": mime_type, "data": data}
    return {"type": "image", "source": source}
