"""A request in the words of Anthropic's messages.

Pure. Owns what a model of a certain age is asked for, and where its caches begin; how a history
is told is `anthropic_history.py`.
"""

import re
from typing import NamedTuple

from msgspec import UNSET

from culm.model.anthropic.history import called_names, messages_of, starts_with_thinking
from culm.model.base import ModelRequest, ProviderAccess, ToolSpec
from culm.model.http import spell_body
from culm.model.rendering import text_of
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel

# The dialect demands a number. Every model since Claude 3.5 may write so much.
DEFAULT_MAX_TOKENS = 8192
# How many tokens an effort may think, where the model must be told. The least they take is 1024;
# with the default above, the most stays below the 32,000 that Opus 4 may write in all.
BUDGETS = {"minimal": 1024, "low": 4096, "medium": 10_240, "high": 20_480}
DEFAULT_EFFORT = "medium"
CACHED_USER_MESSAGES = 2  # With the system and the tools that is four, which is what they allow.

_Object = dict[str, Json]


def encode_body(request: ModelRequest, access: ProviderAccess, info: ModelInfo) -> bytes:
    """The JSON to post. What the settings and then the access add goes over what is ours."""
    body: _Object = {"model": info.id, "stream": True}
    if system := _system(request):
        body["system"] = _cached(system)
    messages = messages_of(request, info)
    body |= _tools(request.tools, messages)
    body |= _settings(request, info, may_think=starts_with_thinking(messages))
    _cache(messages)
    body["messages"] = messages
    return spell_body(body, request, access)


def _system(request: ModelRequest) -> list[_Object]:
    within = (text_of(m.parts) for m in request.messages if m.role == "system")
    return [{"type": "text", "text": text} for text in (request.system, *within) if text.strip()]


def _tools(specs: tuple[ToolSpec, ...], messages: list[_Object]) -> _Object:
    """The tools; where there are none, those that were called must be known and not be called."""
    if specs:
        return {"tools": _cached([_tool(s.name, s.description, s.parameters) for s in specs])}
    if not (names := called_names(messages)):
        return {}
    gone = [_tool(name, "No longer there.", {"type": "object"}) for name in names]
    return {"tools": _cached(gone), "tool_choice": {"type": "none"}}


def _tool(name: str, description: str, parameters: dict[str, Json]) -> _Object:
    return {"name": name, "description": description, "input_schema": parameters}


# --- caches: what is the same in the next request ends at a mark


def _cached(blocks: list[_Object]) -> list[_Object]:
    """The blocks, with a mark at their end."""
    return [*blocks[:-1], blocks[-1] | {"cache_control": {"type": "ephemeral"}}]


def _cache(messages: list[_Object]) -> None:
    """Mark this request's end, and the previous one's, where its cache is found."""
    users = [message for message in messages if message["role"] == "user"]
    for message in users[-CACHED_USER_MESSAGES:]:
        message["content"] = _cached(message["content"])


# --- settings: what a model takes depends on its age


class ModelHabits(NamedTuple):
    """How a model wants to be asked."""

    adapts: bool  # It decides itself how much it thinks, and a budget is an error.
    samples: bool  # It takes a temperature and the like.


_FOREIGN = ModelHabits(adapts=False, samples=True)
_NEWEST = ModelHabits(adapts=True, samples=False)
# A number of one or two digits and what may be its minor part; longer ones are dates.
_VERSION = re.compile(r"(?<!\d)(\d{1,2})(?!\d)(?:[-.](\d{1,2})(?!\d))?")


def habits_of(model_id: str) -> ModelHabits:
    """What its name tells of a model: "claude-opus-4-7", "claude-3-7-sonnet-20250219", ...

    Claude adapts since 4.6 and does not sample since 4.7. A Claude without a number is a new
    one. Others that speak this dialect speak it as it was.
    """
    _, is_claude, rest = model_id.lower().rpartition("claude")
    if not is_claude:
        return _FOREIGN
    found = _VERSION.search(rest)
    if found is None:
        return _NEWEST
    version = int(found[1]), int(found[2] or 0)
    return ModelHabits(adapts=version >= (4, 6), samples=version < (4, 7))


def _settings(request: ModelRequest, info: ModelInfo, *, may_think: bool) -> _Object:
    chosen = request.settings
    habits = habits_of(info.id)
    settled: _Object = {"max_tokens": _max_tokens(request, info)}
    effort = _effort(chosen, info)
    if effort is not None and habits.adapts:
        # Without the second word, they think in silence.
        settled["thinking"] = {"type": "adaptive", "display": "summarized"}
        if effort:
            settled["output_config"] = {"effort": "low" if effort == "minimal" else effort}
        return settled
    if effort is not None and may_think:
        budget = BUDGETS.get(effort or DEFAULT_EFFORT, BUDGETS["high"])
        if settled["max_tokens"] <= budget:
            settled["max_tokens"] += budget  # Both count; the answer keeps what it was given.
        settled["thinking"] = {"type": "enabled", "budget_tokens": budget}
        return settled
    return settled | (_sampling(chosen) if habits.samples else {})


def _max_tokens(request: ModelRequest, info: ModelInfo) -> int:
    wanted = request.settings.max_tokens
    given = request.max_tokens or (0 if wanted is UNSET else wanted)
    return given or info.default_max_tokens or DEFAULT_MAX_TOKENS


def _effort(chosen: SelectedModel, info: ModelInfo) -> str | None:
    """How hard to think: "" is as hard as the model likes, None is not to ask for it."""
    effort = "" if chosen.reasoning_effort is UNSET else chosen.reasoning_effort.lower()
    if chosen.think is False or effort == "none":
        return None
    if chosen.think is True:
        return effort
    return effort if effort and info.can_reason else None


def _sampling(chosen: SelectedModel) -> _Object:
    """Some models refuse both of the first two; the temperature is what people know."""
    known: _Object = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p if chosen.temperature is UNSET else UNSET,
        "top_k": chosen.top_k,
    }
    return {name: value for name, value in known.items() if value is not UNSET}
