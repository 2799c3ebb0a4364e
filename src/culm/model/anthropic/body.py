"""The body of a request to Anthropic's messages API.

Pure. Owns the settings that each generation of models accepts, and the cache markers;
`history.py` converts the messages.
"""

import re
from typing import NamedTuple

from msgspec import UNSET

from culm.model.anthropic.history import called_names, messages_of, starts_with_thinking
from culm.model.base import ModelRequest, ProviderAccess, ToolSpec, text_of
from culm.model.http import merge_body
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel

# The API requires a number. Every model since Claude 3.5 can write this much.
DEFAULT_MAX_TOKENS = 8192
# Thinking tokens per effort, for models that need a budget. The API's minimum is 1024; with the
# default above, the maximum stays below the 32,000 tokens that Opus 4 can write in total.
BUDGETS = {"minimal": 1024, "low": 4096, "medium": 10_240, "high": 20_480}
DEFAULT_EFFORT = "medium"
CACHED_USER_MESSAGES = 2  # With system and tools that makes four markers, the limit of the API.

_Object = dict[str, Json]


def encode_body(request: ModelRequest, access: ProviderAccess, info: ModelInfo) -> bytes:
    """The JSON to post. The settings and then the access override our own fields."""
    body: _Object = {"model": info.id, "stream": True}
    if system := _system(request):
        body["system"] = _cached(system)
    messages = messages_of(request, info)
    body |= _tools(request.tools, messages)
    body |= _settings(request, info, may_think=starts_with_thinking(messages))
    _cache(messages)
    body["messages"] = messages
    return merge_body(body, request, access)


def _system(request: ModelRequest) -> list[_Object]:
    within = (text_of(m.parts) for m in request.messages if m.role == "system")
    return [{"type": "text", "text": text} for text in (request.system, *within) if text.strip()]


def _tools(specs: tuple[ToolSpec, ...], messages: list[_Object]) -> _Object:
    """The tools. Without any, those called in the history are declared but must not be used."""
    if specs:
        return {"tools": _cached([_tool(s.name, s.description, s.parameters) for s in specs])}
    if not (names := called_names(messages)):
        return {}
    gone = [_tool(name, "No longer available.", {"type": "object"}) for name in names]
    return {"tools": _cached(gone), "tool_choice": {"type": "none"}}


def _tool(name: str, description: str, parameters: dict[str, Json]) -> _Object:
    return {"name": name, "description": description, "input_schema": parameters}


# --- caches: a marker ends the part that the next request will repeat


def _cached(blocks: list[_Object]) -> list[_Object]:
    """The blocks, with a cache marker on the last one."""
    return [*blocks[:-1], blocks[-1] | {"cache_control": {"type": "ephemeral"}}]


def _cache(messages: list[_Object]) -> None:
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


def _settings(request: ModelRequest, info: ModelInfo, *, may_think: bool) -> _Object:
    chosen = request.settings
    traits = traits_of(info.id)
    fields: _Object = {"max_tokens": _max_tokens(request, info)}
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


def _sampling(chosen: SelectedModel) -> _Object:
    """Sampling settings. Some models reject temperature and top_p together; temperature wins."""
    known: _Object = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p if chosen.temperature is UNSET else UNSET,
        "top_k": chosen.top_k,
    }
    return {name: value for name, value in known.items() if value is not UNSET}
