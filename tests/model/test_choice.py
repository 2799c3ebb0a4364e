"""The choice of a model: reasons, defaults, fallbacks, and where keys are sent."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from culm.config.checking import Document
from culm.config.references import UnresolvedReference
from culm.config.sources import LoadedConfig
from culm.errors import ModelFailed
from culm.model.base import LanguageModel, ProviderAccess
from culm.model.catalog import dialect_types, find_model
from culm.model.choice import ChosenModel, ModelConfig, Models, layers_of, merged_config, preferred
from culm.model.local_servers import NOTHING, OFFLINE_PROVIDER, FoundProviders, providers_by_key
from culm.model.scripted import ScriptedModel
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from tests.support import WAIT_S

SECRET = "sk-very-secret"
ENV = {"KEY": SECRET, "HOST": "http://h"}
LOCAL: Document = {"base_url": "http://l/v1", "models": [{"id": "l1"}, {"id": "l2"}]}
ONE = SelectedModel("m1", "one")
TWO = SelectedModel("m2", "two")
THREE = SelectedModel("m3", "three")


class RecordingFactory:
    """A model factory and a command runner that record their calls."""

    def __init__(self) -> None:
        self.made: list[ChosenModel] = []
        self.ran: list[str] = []

    def make(self, chosen: ChosenModel) -> LanguageModel:
        self.made.append(chosen)
        return ScriptedModel([])

    async def run(self, command: str) -> str:
        self.ran.append(command)
        if command == "fail":
            raise UnresolvedReference("a command failed with status 1")
        return f"<{command}>"


def models_of(document: Document, env: Mapping[str, str] = ENV) -> ModelConfig:
    return ModelConfig(document, env)


@dataclass(frozen=True)
class FixedSource:
    models: ModelConfig


async def open_model(
    config: ModelConfig, factory: RecordingFactory, provider_id: str, model_id: str
) -> None:
    models = Models(FixedSource(config), factory.make, factory.run)
    async with asyncio.timeout(WAIT_S):
        await models.open(config.get(provider_id, model_id))


def selection(selected: SelectedModel) -> Document:
    return {"model": selected.model, "provider": selected.provider}


def three_providers(**more: Json) -> Document:
    providers = {name: {"base_url": "http://h/v1"} for name in ("one", "two", "three")}
    return {"providers": providers, "models": {"large": selection(ONE)}, **more}


# --- reasons


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        ({"base_url": "http://h/v1"}, ""),
        ({"base_url": "$HOST/v1", "api_key": "${KEY}"}, ""),
        ({"base_url": "http://h/v1", "api_key": "$(pass show it)"}, ""),
        ({"base_url": "http://h/v1", "disable": True}, "provider 'p' is disabled"),
        ({}, "provider 'p' has no base_url"),
        ({"type": "openai"}, "provider 'p' has no key: write providers.p.api_key"),
        ({"type": "openai", "api_key": "k"}, ""),
        ({"type": "openai", "extra_headers": {"Authorization": "x"}}, ""),
        ({"type": "offline"}, ""),
        (
            {"type": "klingon"},
            "unknown provider type 'klingon'; known types: " + ", ".join(dialect_types()),
        ),
        ({"base_url": "$NONE/v1"}, "providers.p.base_url: $NONE is not set"),
        ({"base_url": "http://h", "api_key": "$NONE"}, "providers.p.api_key: $NONE is not set"),
        (
            {"base_url": "http://h", "extra_headers": {"X-A": "$KEY", "X-B": "${NONE}"}},
            "providers.p.extra_headers.X-B: $NONE is not set",
        ),
    ],
)
def test_an_unusable_provider_has_a_reason(provider: Document, reason: str) -> None:
    models = models_of({"providers": {"p": provider}})
    assert models.why_not("p", "m") == reason
    if reason:
        with pytest.raises(ModelFailed) as caught:
            models.get("p", "m")
        failure = caught.value
        assert (failure.title, failure.message) == ("Model not available", reason)
        assert failure.hint == "culm models lists the usable models"
    else:
        assert models.get("p", "m").provider_id == "p"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (("nobody", "m"), "provider 'nobody' is not configured"),
        (("openai", "m"), "OpenAI is not configured: set OPENAI_API_KEY"),
        (("", ""), "provider '' is not configured"),
        (("p", ""), "no model of provider 'p' is selected"),
    ],
)
def test_an_unknown_model_has_a_reason_with_the_next_step(
    name: tuple[str, str], reason: str
) -> None:
    assert models_of({"providers": {"p": {"type": "offline"}}}).why_not(*name) == reason


def test_a_known_provider_without_a_key_names_its_variable() -> None:
    models = models_of({"providers": {"anthropic": {}}})
    assert models.why_not("anthropic", "m") == (
        "provider 'anthropic' has no key: set ANTHROPIC_API_KEY, "
        "or write providers.anthropic.api_key"
    )


# --- selection


def test_the_first_usable_selected_model_is_chosen() -> None:
    document = three_providers(fallbacks={"large": [selection(TWO), selection(THREE)]})
    models = models_of(document)
    assert models.choose("large") == ONE
    assert models.choose("small") == ONE  # Without a small model the large one is used.
    assert models.after("one", "m1") == [TWO, THREE]
    assert models.after("two", "m2") == [THREE]
    assert models.after("three", "m3") == []
    assert models.after("two", "another") == ()
    document["providers"]["one"]["disable"] = document["providers"]["two"]["disable"] = True
    models = models_of(document)
    assert models.choose("large") == THREE
    assert models.after("one", "m1") == [THREE]
    document["providers"]["three"]["disable"] = True
    models = models_of(document)
    assert models.choose("large") == ONE  # A request to it reports the problem.


def test_small_fallbacks_come_before_the_large_model() -> None:
    small = {"small": selection(TWO)}
    document = three_providers(
        models={"large": selection(ONE), **small},
        fallbacks={"small": [selection(THREE)], "large": []},
    )
    for disabled, expected in (("", TWO), ("two", THREE), ("three", ONE)):
        if disabled:
            document["providers"][disabled]["disable"] = True
        assert models_of(document).choose("small") == expected


def test_without_a_selection_no_model_is_chosen() -> None:
    models = models_of({})
    assert (models.choose("large"), models.selected("large")) == (None, SelectedModel())
    assert models.after("one", "m1") == ()


def test_an_invalid_document_selects_no_model_and_raises_nothing() -> None:
    assert models_of({"models": {"large": 7}}).choose("large") is None


def test_a_model_gets_the_settings_of_its_role() -> None:
    small = {**selection(ONE), "max_tokens": 100}
    large = {**selection(ONE), "max_tokens": 9000}
    fallback = {**selection(TWO), "max_tokens": 50}
    models = models_of(
        three_providers(models={"small": small, "large": large}, fallbacks={"large": [fallback]})
    )
    assert models.get("one", "m1").settings.max_tokens == 9000
    assert models.get("two", "m2").settings.max_tokens == 50
    assert models.get("three", "m9").settings == SelectedModel("m9", "three")


def test_the_small_model_next_to_a_large_one_has_the_same_provider() -> None:
    document = three_providers(models={"large": selection(ONE), "small": selection(TWO)})
    document["providers"]["anthropic"] = {"api_key": "k"}
    models = models_of(document)
    assert models.small_of("two") == TWO
    assert models.small_of("anthropic").provider == "anthropic"
    assert models.small_of("three") == ONE


# --- model information


def test_configured_model_data_overrides_the_catalog() -> None:
    known = find_model("openai", "gpt-5.4")
    assert known is not None
    written = {"id": "gpt-5.4", "context_window": 7, "name": "Mine"}
    provider = {"api_key": "k", "models": [{"id": "other", "context_window": 1}, written]}
    models = models_of({"providers": {"openai": provider}})
    info = models.get("openai", "gpt-5.4").info
    assert (info.context_window, info.name) == (7, "Mine")
    assert info.cost_per_1m_in == known.cost_per_1m_in > 0
    assert models.info(SelectedModel("new", "openai")) == ModelInfo(id="new", name="new")
    assert find_model("openai", "gpt-5.4") == known


# --- references


async def test_references_are_resolved_only_when_the_model_is_opened() -> None:
    provider = {
        "base_url": "$HOST/v1",
        "api_key": "$KEY",
        "extra_headers": {"X-Key": "Token $(pass show it)", "X-Plain": "a"},
        "extra_body": {"user": "$KEY"},
        "system_prompt_prefix": "Be $KEY.",
    }
    factory = RecordingFactory()
    models = models_of({"providers": {"p": provider}})
    chosen = models.get("p", "m")
    written = ProviderAccess(
        "openai-compat",
        "",
        "$HOST/v1",
        "$KEY",
        {"X-Key": "Token $(pass show it)", "X-Plain": "a"},
        {"user": "$KEY"},
    )
    assert (chosen.access, factory.ran) == (written, [])
    await open_model(models, factory, "p", "m")
    read = ProviderAccess(
        "openai-compat",
        "",
        "http://h/v1",
        SECRET,
        {"X-Key": "Token <pass show it>", "X-Plain": "a"},
        {"user": "$KEY"},
    )
    assert factory.made == [chosen._replace(access=read)]
    assert factory.ran == ["pass show it"]


async def test_a_failed_reference_names_its_key_and_makes_no_model() -> None:
    factory = RecordingFactory()
    provider = {"base_url": "http://h/v1", "api_key": "$KEY", "extra_headers": {"X": "$(fail)"}}
    models = models_of({"providers": {"p": provider}})
    with pytest.raises(ModelFailed) as caught:
        await open_model(models, factory, "p", "m")
    assert caught.value.title == "Unresolved reference"
    assert caught.value.message.startswith("providers.p.extra_headers")
    assert caught.value.hint == "run `culm config check` to list them all"
    assert SECRET not in repr(caught.value) + caught.value.message
    assert factory.made == []


async def test_no_repr_shows_a_key() -> None:
    factory = RecordingFactory()
    provider: Document = {
        "base_url": f"http://user:{SECRET}@h/v1",
        "api_key": SECRET,
        "extra_headers": {"X": SECRET},
        "extra_body": {"key": SECRET},
    }
    document: Document = {"providers": {"p": provider}}
    models = models_of(document)
    await open_model(models, factory, "p", "m")
    for thing in (factory.made[0], factory.made[0].access, models):
        assert SECRET not in f"{thing!r} {thing}"


# --- defaults


def models_with(
    env: Mapping[str, str],
    user: Document | None = None,
    *,
    local: Document | None = None,
    project: Document | None = None,
    workspace: Document | None = None,
) -> ModelConfig:
    """Return the models of a workspace with these configuration layers."""
    found = FoundProviders({**providers_by_key(env), **(local or {}), "offline": OFFLINE_PROVIDER})
    layers = layers_of(found, LoadedConfig(user or {}, (project or {},)), {}, workspace or {})
    document = merged_config(layers, env)
    return models_of(document, env)


def large(models: ModelConfig) -> str:
    chosen = models.choose("large")
    return "" if chosen is None else f"{chosen.provider}/{chosen.model}"


KEYS = {"ANTHROPIC_API_KEY": SECRET, "GROQ_API_KEY": SECRET}


def test_defaults_prefer_configuration_then_keys_then_local_then_offline() -> None:
    local: Document = {"ollama": LOCAL}
    user: Document = {"providers": {"own": {"base_url": "http://o/v1", "models": [{"id": "m"}]}}}
    assert large(models_with({})) == "offline/offline"
    assert large(models_with({}, local=local)) == "ollama/l1"
    assert large(models_with(KEYS, local=local)).startswith("anthropic/")
    assert large(models_with({"GROQ_API_KEY": SECRET}, local=local)).startswith("groq/")
    assert large(models_with(KEYS, user, local=local)) == "own/m"
    selected: Document = {"models": {"large": {"provider": "ollama", "model": "l2"}}}
    assert large(models_with(KEYS, user, local=local, workspace=selected)) == "ollama/l2"


def test_the_default_order_is_that_of_the_catalog() -> None:
    env = {"GEMINI_API_KEY": "k", "OPENAI_API_KEY": "k", "MISTRAL_API_KEY": "k"}
    found = FoundProviders({**providers_by_key(env), "offline": OFFLINE_PROVIDER})
    assert preferred([found.document]) == ["openai", "mistral", "gemini", "offline"]
    user: Document = {"providers": {"mistral": {}, "own": {}}}
    order = ["mistral", "own", "openai", "gemini", "offline"]
    assert preferred([found.document, user]) == order


@pytest.mark.parametrize(
    "provider",
    [
        {"base_url": "http://o/v1"},  # Has no model.
        {"base_url": "http://o/v1", "models": [{"id": "m"}], "disable": True},
        {"base_url": "http://o/v1", "models": [{"id": "m"}], "api_key": "$NONE"},
        {"models": [{"id": "m"}]},
        {"type": "klingon", "models": [{"id": "m"}]},
    ],
)
def test_an_unusable_provider_is_not_a_default(provider: Document) -> None:
    assert large(models_with({}, {"providers": {"own": provider}})) == "offline/offline"


def test_a_selected_small_model_stays_next_to_a_default_large_one() -> None:
    user: Document = {"models": {"small": {"provider": "offline", "model": "offline"}}}
    models = models_with(KEYS, user)
    assert large(models).startswith("anthropic/")
    assert models.choose("small") == SelectedModel("offline", "offline")


def test_a_null_role_counts_as_not_selected() -> None:
    assert large(models_with({}, {"models": {"large": None}})) == "offline/offline"


def test_a_found_key_does_not_change_a_selection() -> None:
    user: Document = {"models": {"large": {"provider": "offline", "model": "offline"}}}
    assert large(models_with(KEYS, user)) == "offline/offline"


# --- keys and addresses


@pytest.mark.parametrize(
    "over",
    [
        {"base_url": "http://evil/v1"},
        {"BASE_URL": "http://evil/v1"},
        {"base_url": "http://evil/v1", "type": "openai-compat"},
    ],
)
def test_a_found_key_is_not_sent_to_an_address_of_a_later_layer(over: Document) -> None:
    for layer in ("project", "workspace"):
        document: Document = {"providers": {"anthropic": over}}
        models = models_with(KEYS, **{layer: document})
        if not models.why_not("anthropic", "m"):
            assert models.get("anthropic", "m").access.api_key == ""
    models = models_with(KEYS, {"providers": {"anthropic": {**over, "api_key": "mine"}}})
    access = models.get("anthropic", "m").access
    assert (access.base_url, access.api_key) == ("http://evil/v1", "mine")


def test_a_key_of_the_environment_is_sent_to_the_address_in_the_user_file() -> None:
    models = models_with(KEYS, {"providers": {"anthropic": {"base_url": "http://proxy/v1"}}})
    access = models.get("anthropic", "m").access
    assert (access.base_url, access.api_key) == ("http://proxy/v1", "$ANTHROPIC_API_KEY")


async def test_a_variable_of_a_later_layer_does_not_redirect_a_key() -> None:
    env = {**KEYS, "ANTHROPIC_BASE_URL": "http://ours/v1"}
    factory = RecordingFactory()
    found = FoundProviders({**providers_by_key(env), "offline": OFFLINE_PROVIDER})
    layers = layers_of(found, LoadedConfig(), {}, {"env": {"ANTHROPIC_BASE_URL": "http://evil/v1"}})
    models = models_of(merged_config(layers, env), env)
    if not models.why_not("anthropic", "m"):
        await open_model(models, factory, "anthropic", "m")
        access = factory.made[0].access
        assert access.base_url == "http://ours/v1" or SECRET not in access.api_key


def test_without_any_provider_the_offline_model_is_chosen() -> None:
    document = merged_config(layers_of(NOTHING, LoadedConfig(), {}, {}), {})
    chosen = {"model": "offline", "provider": "offline"}
    assert document["models"] == {"large": chosen, "small": chosen}
    access = models_of(document).get("offline", "offline").access
    assert access == ProviderAccess("offline", "")
