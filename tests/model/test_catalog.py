"""The catalog of well-known models: its data and lookups."""

import re
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from culm.model.catalog import KnownProvider, find_model, known_providers, vendor_of
from culm.wire.config import Model

KNOWN = known_providers()
MODELS = [(known, model) for known in KNOWN.values() for model in known.models]

every_provider = pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
every_model = pytest.mark.parametrize(
    ("known", "model"), MODELS, ids=[f"{known.id}/{model.id}" for known, model in MODELS]
)


def by_id(models: tuple[Model, ...]) -> Mapping[str, Model]:
    return {model.id: model for model in models}


# --- the data


def test_providers_are_in_order_of_preference() -> None:
    assert list(KNOWN) == [
        "openai",
        "anthropic",
        "openrouter",
        "groq",
        "deepseek",
        "mistral",
        "xai",
        "gemini",
    ]


@every_provider
def test_a_provider_has_everything_needed_to_reach_it(known: KnownProvider) -> None:
    prefix = known.id.upper()
    assert known.name
    assert known.type in ("openai", "anthropic", "openrouter", "openai-compat")
    assert (known.key_env, known.url_env) == (f"{prefix}_API_KEY", f"{prefix}_BASE_URL")
    assert known.base_url.startswith("https://")
    assert not known.base_url.endswith("/")
    assert vendor_of("", known.base_url) == known.id


@every_provider
def test_a_provider_names_its_source_and_month(known: KnownProvider) -> None:
    assert known.source.startswith("https://")
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", known.date)


@every_provider
def test_a_provider_has_a_few_models_with_unique_names(known: KnownProvider) -> None:
    assert 3 <= len(known.models) <= 8
    assert len(by_id(known.models)) == len(known.models)
    assert len({model.name for model in known.models}) == len(known.models)


@every_provider
def test_the_default_models_are_listed(known: KnownProvider) -> None:
    assert {known.large, known.small} <= by_id(known.models).keys()


@every_model
def test_a_model_has_a_plausible_context_window(known: KnownProvider, model: Model) -> None:
    assert 100_000 <= model.context_window <= 2_000_000
    assert 0 < model.default_max_tokens <= model.context_window // 4


@every_model
def test_a_model_has_plausible_prices_or_none(known: KnownProvider, model: Model) -> None:
    into, out = model.cost_per_1m_in, model.cost_per_1m_out
    write, read = model.cost_per_1m_in_cached, model.cost_per_1m_out_cached
    if not into:
        assert (out, write, read) == (0, 0, 0)
        return
    assert 0.01 <= into < out <= 200
    assert 0 <= read < into
    assert not write or into < write <= 2 * into


@every_model
def test_only_a_model_that_reasons_has_reasoning_levels(known: KnownProvider, model: Model) -> None:
    assert model.can_reason or not model.reasoning_levels


@every_model
def test_every_listed_model_is_found_unchanged(known: KnownProvider, model: Model) -> None:
    assert find_model(known.id, model.id) == model


# --- vendors


@pytest.mark.parametrize(
    ("provider_id", "base_url", "vendor"),
    [
        ("openai", "", "openai"),
        ("work", "https://api.openai.com/v1", "openai"),
        ("work", "https://EU.API.OpenAI.com:443/v1", "openai"),
        ("work", "https://api.openai.com./v1", "openai"),
        ("openai", "https://api.groq.com/openai/v1", "groq"),
        ("openai", "http://127.0.0.1:4000/v1", "openai"),
        ("openai-work", "http://127.0.0.1:4000/v1", ""),
        ("code", "https://codestral.mistral.ai/v1", "mistral"),
        ("work", "https://notmistral.ai/v1", ""),
        ("work", "https://api.openai.com.example.net/v1", ""),
        ("work", "https://example.net/api.openai.com", ""),
        ("work", "https://api.openai.com@example.net/v1", ""),
        ("ollama", "http://127.0.0.1:11434/v1", "ollama"),
        ("lmstudio", "", "lmstudio"),
        ("llamacpp", "", "llamacpp"),
        ("vllm", "", "vllm"),
        ("work", "http://[::1", ""),
        ("work", "no address", ""),
        ("", "", ""),
    ],
)
def test_the_vendor_follows_from_the_address_and_then_from_the_name(
    provider_id: str, base_url: str, vendor: str
) -> None:
    assert vendor_of(provider_id, base_url) == vendor


# --- one model


@pytest.mark.parametrize(
    ("vendor", "asked", "listed"),
    [
        ("openai", "gpt-5.4-2026-03-05", "gpt-5.4"),
        ("openai", "gpt-5.4-latest", "gpt-5.4"),
        ("anthropic", "claude-sonnet-5-20260630", "claude-sonnet-5"),
        ("anthropic", "claude-haiku-4-5", "claude-haiku-4-5-20251001"),
        ("anthropic", "claude-haiku-4-5-latest", "claude-haiku-4-5-20251001"),
        ("anthropic", "claude-haiku-4-5@20251001", "claude-haiku-4-5-20251001"),
        ("anthropic", "claude-opus-4.5", "claude-opus-4-5-20251101"),
        ("mistral", "codestral-latest", "codestral-2508"),
        ("mistral", "codestral", "codestral-2508"),
        ("openrouter", "openai/gpt-5.4:nitro", "openai/gpt-5.4"),
    ],
)
def test_a_model_is_found_without_its_date_or_variant(vendor: str, asked: str, listed: str) -> None:
    expected = replace(by_id(KNOWN[vendor].models)[listed], id=asked)
    assert find_model(vendor, asked) == expected


@pytest.mark.parametrize(
    ("asked", "owner", "listed"),
    [
        ("anthropic/claude-opus-5.5", "anthropic", "claude-opus-5-5"),
        ("openai/gpt-6-luna", "openai", "gpt-6-luna"),
        ("google/gemini-3.1-pro-preview", "gemini", "gemini-3.1-pro-preview"),
        ("x-ai/grok-4.7", "xai", "grok-4.7"),
        ("deepseek/deepseek-v4-pro", "deepseek", "deepseek-v4-pro"),
        ("mistralai/devstral-2512", "mistral", "devstral-2512"),
    ],
)
def test_an_openrouter_model_has_the_data_of_its_owner(asked: str, owner: str, listed: str) -> None:
    expected = replace(by_id(KNOWN[owner].models)[listed], id=asked)
    assert find_model("openrouter", asked) == expected


@pytest.mark.parametrize(
    ("vendor", "asked"),
    [
        ("openai", "gpt-99"),
        ("openai", "gpt-5.4-mini-high"),
        ("openai", "claude-sonnet-5-5"),
        ("openai", "openai/gpt-5.4"),
        ("mistral", "codestral-2501"),
        ("openrouter", "nobody/gpt-5.4"),
        ("openrouter", "gpt-5.4"),
        ("ollama", "gpt-oss:20b"),
        ("", "gpt-5.4"),
        ("openai", ""),
    ],
)
def test_an_unknown_model_is_not_found(vendor: str, asked: str) -> None:
    assert find_model(vendor, asked) is None


def test_a_free_variant_costs_nothing() -> None:
    assert find_model("openrouter", "google/gemini-3.8-flash:free") == Model(
        id="google/gemini-3.8-flash:free",
        name="Gemini 3.8 Flash",
        context_window=1_048_576,
        default_max_tokens=32_000,
        can_reason=True,
        reasoning_levels=["low", "medium", "high"],
        supports_attachments=True,
    )


def test_changing_a_returned_model_does_not_change_the_catalog() -> None:
    for model in (known_providers()["openai"].models[0], find_model("openai", "gpt-5.4")):
        assert model is not None
        assert isinstance(model.reasoning_levels, list)
        model.cost_per_1m_in = 99.0
        model.reasoning_levels.append("heroic")
    assert known_providers() == KNOWN
    assert find_model("openai", "gpt-5.4") == KNOWN["openai"].models[0]
