"""The body of a request to Anthropic."""

import json

import pytest

from culm.model.anthropic.model import ModelTraits, encode_body, traits_of
from culm.model.base import ModelRequest, ProviderAccess, ToolSpec
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import (
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.model.anthropic_messages import make_message
from tests.model.anthropic_shapes import INFO, MODEL

OLD, NEW = MODEL, "claude-opus-5-5"
MARK = {"cache_control": {"type": "ephemeral"}}


HELLO = make_message("user", "hello")


def body(
    *messages: Message,
    settings: SelectedModel | None = None,
    info: ModelInfo = INFO,
    system: str = "",
    tools: tuple[ToolSpec, ...] = (),
    max_tokens: int | None = None,
    access: ProviderAccess | None = None,
) -> dict[str, Json]:
    chosen = settings or SelectedModel(provider="acme")
    request = ModelRequest(system, list(messages) or [HELLO], tools, chosen, max_tokens)
    return json.loads(encode_body(request, access or ProviderAccess(), info))


def parameters_for(
    model_id: str = OLD, *, can_reason: bool = True, **settings: Json
) -> dict[str, Json]:
    """Return the body of a request without its conversation."""
    found = body(
        settings=SelectedModel(provider="acme", **settings),
        info=ModelInfo(id=model_id, can_reason=can_reason),
    )
    return {k: v for k, v in found.items() if k not in ("model", "stream", "messages")}


def test_a_request_marks_the_ends_of_its_cached_parts() -> None:
    ls = ToolSpec("ls", "List files.", {"type": "object", "properties": {}})
    view = ToolSpec("view", "Show a file.", {"type": "object"})
    assert body(
        make_message("system", "and kind"),
        make_message("user", "one"),
        make_message("assistant", "1"),
        make_message("user", "two", "three"),
        make_message("assistant", "2"),
        make_message("user", "four"),
        system="be brief",
        tools=(ls, view),
    ) == {
        "model": MODEL,
        "stream": True,
        "max_tokens": 8192,
        "system": [
            {"type": "text", "text": "be brief"},
            {"type": "text", "text": "and kind", **MARK},
        ],
        "tools": [
            {"name": "ls", "description": "List files.", "input_schema": ls.parameters},
            {
                "name": "view",
                "description": "Show a file.",
                "input_schema": view.parameters,
                **MARK,
            },
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "1"}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "two"},
                    {"type": "text", "text": "three", **MARK},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
            {"role": "user", "content": [{"type": "text", "text": "four", **MARK}]},
        ],
    }


def test_a_request_without_tools_declares_the_called_ones_and_forbids_them() -> None:
    calls = [
        ToolCallPart(ToolCall(f"c{n}", name, "{}")) for n, name in enumerate(["ls", "ls", "x"])
    ]
    results = [ToolResultPart(ToolResult(f"c{n}", content="done")) for n in range(3)]
    found = body(HELLO, make_message("assistant", *calls), make_message("tool", *results))
    gone = {"description": "No longer available.", "input_schema": {"type": "object"}}
    assert found["tools"] == [{"name": "ls", **gone}, {"name": "x", **gone, **MARK}]
    assert found["tool_choice"] == {"type": "none"}


def test_an_unpaired_surrogate_is_replaced() -> None:
    assert body(make_message("user", "a\ud83d"))["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a\ufffd", **MARK}]}
    ]


# --- the length of an answer


@pytest.mark.parametrize(
    ("of_request", "of_settings", "of_model", "sent"),
    [
        (7, 100, 4096, 7),
        (None, 100, 4096, 100),
        (None, None, 4096, 4096),
        (None, 0, 0, 8192),
        (None, None, 0, 8192),
    ],
)
def test_every_request_has_a_max_tokens(
    of_request: int | None, of_settings: int | None, of_model: int, sent: int
) -> None:
    settings = SelectedModel() if of_settings is None else SelectedModel(max_tokens=of_settings)
    info = ModelInfo(id=MODEL, default_max_tokens=of_model)
    assert body(settings=settings, info=info, max_tokens=of_request)["max_tokens"] == sent


# --- sampling and thinking


@pytest.mark.parametrize(
    ("model_id", "traits"),
    [
        ("claude-3-7-sonnet-20250219", ModelTraits(adapts=False, samples=True)),
        ("claude-instant-1.2", ModelTraits(adapts=False, samples=True)),
        ("claude-opus-4-20250514", ModelTraits(adapts=False, samples=True)),
        ("claude-haiku-4-5-20251001", ModelTraits(adapts=False, samples=True)),
        ("claude-sonnet-4-6", ModelTraits(adapts=True, samples=True)),
        ("us.anthropic.claude-opus-4-6-v1:0", ModelTraits(adapts=True, samples=True)),
        ("claude-opus-4-7", ModelTraits(adapts=True, samples=False)),
        ("anthropic/claude-opus-4.8", ModelTraits(adapts=True, samples=False)),
        ("claude-sonnet-5", ModelTraits(adapts=True, samples=False)),
        ("Claude-Fable-5-1", ModelTraits(adapts=True, samples=False)),
        ("claude-opus-10", ModelTraits(adapts=True, samples=False)),
        ("claude-mythos-preview", ModelTraits(adapts=True, samples=False)),
        ("glm-4.7", ModelTraits(adapts=False, samples=True)),
        ("", ModelTraits(adapts=False, samples=True)),
    ],
)
def test_the_traits_of_a_model_follow_from_its_version(model_id: str, traits: ModelTraits) -> None:
    assert traits_of(model_id) == traits


@pytest.mark.parametrize(
    ("model_id", "settings", "sent"),
    [
        (OLD, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_k": 3}),
        (OLD, {"top_p": 0.9}, {"top_p": 0.9}),
        (OLD, {"temperature": 0.0}, {"temperature": 0.0}),
        (OLD, {"frequency_penalty": 0.1, "presence_penalty": 0.2}, {}),
        (NEW, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {}),
    ],
)
def test_sampling_settings_are_sent_only_to_models_that_accept_them(
    model_id: str, settings: dict[str, Json], sent: dict[str, Json]
) -> None:
    assert parameters_for(model_id, **settings) == {"max_tokens": 8192, **sent}


def enabled(budget: int, max_tokens: int) -> dict[str, Json]:
    thinking = {"type": "enabled", "budget_tokens": budget}
    return {"max_tokens": max_tokens, "thinking": thinking}


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"reasoning_effort": "minimal"}, enabled(1024, 8192)),
        ({"reasoning_effort": "low"}, enabled(4096, 8192)),
        ({"reasoning_effort": "Medium"}, enabled(10_240, 18_432)),
        ({"reasoning_effort": "high"}, enabled(20_480, 28_672)),
        ({"reasoning_effort": "max"}, enabled(20_480, 28_672)),
        ({"think": True}, enabled(10_240, 18_432)),
        ({"think": True, "reasoning_effort": "low"}, enabled(4096, 8192)),
        ({"think": True, "max_tokens": 10_240}, enabled(10_240, 20_480)),
        ({"think": True, "max_tokens": 10_241}, enabled(10_240, 10_241)),
        ({"think": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3}, enabled(10_240, 18_432)),
        ({"think": False, "reasoning_effort": "high"}, {"max_tokens": 8192}),
        ({"reasoning_effort": ""}, {"max_tokens": 8192}),
        ({"reasoning_effort": "none", "think": True}, {"max_tokens": 8192}),
        ({}, {"max_tokens": 8192}),
    ],
)
def test_an_old_model_thinks_within_a_budget(
    settings: dict[str, Json], sent: dict[str, Json]
) -> None:
    assert parameters_for(OLD, **settings) == sent


ADAPTIVE = {"max_tokens": 8192, "thinking": {"type": "adaptive", "display": "summarized"}}


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"think": True}, ADAPTIVE),
        ({"reasoning_effort": "xhigh"}, ADAPTIVE | {"output_config": {"effort": "xhigh"}}),
        ({"reasoning_effort": "minimal"}, ADAPTIVE | {"output_config": {"effort": "low"}}),
        ({"think": False, "reasoning_effort": "high"}, {"max_tokens": 8192}),
        ({}, {"max_tokens": 8192}),
    ],
)
def test_a_new_model_gets_only_the_effort(settings: dict[str, Json], sent: dict[str, Json]) -> None:
    assert parameters_for(NEW, **settings) == sent


def test_a_model_not_known_to_reason_thinks_only_if_the_user_sets_it() -> None:
    assert parameters_for(can_reason=False, reasoning_effort="high") == {"max_tokens": 8192}
    assert parameters_for(can_reason=False, think=True) == enabled(10_240, 18_432)


def test_settings_then_the_access_override_the_body() -> None:
    options: dict[str, Json] = {"max_tokens": 1, "metadata": {"user_id": "u"}, "model": "mine"}
    found = body(
        settings=SelectedModel(max_tokens=5, provider_options=options),
        access=ProviderAccess(body={"model": "theirs", "service_tier": "auto"}),
    )
    del found["messages"]
    assert found == {
        "model": "theirs",
        "stream": True,
        "max_tokens": 1,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }


# --- a turn that began without thinking


def thought(signature: str) -> ReasoningPart:
    return ReasoningPart(Reasoning("hm", signature))


def step(n: int, *before: Part) -> list[Message]:
    """Return one call of the model and its result."""
    call = ToolCallPart(ToolCall(f"c{n}", "ls", "{}"))
    return [
        make_message("assistant", *before, call),
        make_message("tool", ToolResultPart(ToolResult(f"c{n}", "ls", "a.txt"))),
    ]


@pytest.mark.parametrize(
    ("messages", "thinks"),
    [
        pytest.param([HELLO], True, id="nothing was called"),
        pytest.param([HELLO, *step(1, thought("sig"))], True, id="signed"),
        pytest.param([HELLO, *step(1)], False, id="no thinking"),
        pytest.param([HELLO, *step(1, thought(""))], False, id="not signed"),
        pytest.param(
            [HELLO, *step(1, thought("sig")), *step(2)], False, id="not in the second step"
        ),
        pytest.param(
            [HELLO, *step(1, thought("a")), *step(2, thought("b"))], True, id="in both steps"
        ),
        pytest.param(
            [HELLO, *step(1), make_message("assistant", "done"), HELLO], True, id="a new turn"
        ),
        pytest.param([HELLO, *step(1), HELLO], False, id="results that come with a question"),
        pytest.param(
            [HELLO, make_message("assistant", "first words"), *step(1, thought("sig"))],
            False,
            id="words before the thinking",
        ),
    ],
)
def test_no_thinking_budget_is_sent_in_a_turn_that_started_without_thinking(
    messages: list[Message], *, thinks: bool
) -> None:
    settings = SelectedModel(provider="acme", think=True, temperature=0.5)
    found = body(*messages, settings=settings)
    assert ("thinking" in found) == thinks
    assert ("temperature" in found) != thinks
    new = ModelInfo(id=NEW)
    assert body(*messages, settings=settings, info=new)["thinking"]["type"] == "adaptive"
