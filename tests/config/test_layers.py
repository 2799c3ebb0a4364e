"""Merged configuration layers: an API key is sent only to the address it was given for."""

import pytest

from culm.config.checking import Document
from culm.config.layers import merged, without_strayed_keys
from culm.model.choice import check_models
from culm.wire.codec import Json
from tests.support import contract

OURS: Document = {
    "providers": {
        "demo": {
            "base_url": "http://ours/v1",
            "api_key": "secret",
            "extra_headers": {"X-Key": "secret"},
        },
        "other": {"base_url": "http://ours/v1", "api_key": "kept"},
    }
}


SELECTED: Document = {
    "provider": "a",
    "model": "m",
    "provider_options": {"token": "secret"},
    "max_tokens": 5,
}


def key_of(layers: list[Document], provider: str = "demo") -> tuple[str, str, dict[str, str]]:
    merged_config = without_strayed_keys(layers)
    found = check_models(merged_config).providers[provider]
    return found.base_url, found.api_key, found.extra_headers


@contract("CFG-5")
@pytest.mark.parametrize(
    "override",
    [
        {"providers": {"demo": {"base_url": "http://theirs/v1"}}},
        {"providers": {"demo": {"Base_URL": "http://theirs/v1"}}},
        {"PROVIDERS": {"demo": {"base_url": "http://theirs/v1"}}},
    ],
)
def test_an_overridden_address_never_gets_the_key_in_any_spelling(override: Document) -> None:
    for layers in ([OURS, override, {}], [OURS, {}, override], [{}, OURS, override]):
        url, key, headers = key_of(layers)
        assert (key, headers) == ("", {}) or url == "http://ours/v1"


def test_another_provider_keeps_its_key() -> None:
    layers: list[Document] = [OURS, {"providers": {"demo": {"base_url": "http://theirs/v1"}}}]
    assert key_of(layers, "other") == ("http://ours/v1", "kept", {})


def test_an_overridden_key_is_sent_to_the_address_of_the_lower_layer() -> None:
    over: dict[str, Json] = {"providers": {"demo": {"api_key": "mine"}}}
    url, key, _ = key_of([OURS, over])
    assert (url, key) == ("http://ours/v1", "mine")
    both: dict[str, Json] = {"providers": {"demo": {"api_key": "mine", "base_url": "http://m/v1"}}}
    assert key_of([OURS, both])[:2] == ("http://m/v1", "mine")


@contract("CFG-5")
@pytest.mark.parametrize(
    ("under", "over"),
    [
        # Spelled with the long s, which is normalized to the short one.
        ({"base_url": "http://ours/v1"}, {"ba\u017fe_url": "http://theirs/v1"}),
        # Without a base_url the type determines the address.
        ({"type": "openai"}, {"type": "openrouter"}),
        ({"type": "openai"}, {"type": "openai", "base_url": "http://theirs/v1"}),
    ],
)
def test_a_key_is_not_sent_to_the_address_of_another_layer(under: Document, over: Document) -> None:
    layers: list[Document] = [
        {"providers": {"demo": {**under, "api_key": "secret", "oauth": {"access_token": "s"}}}},
        {"providers": {"demo": over}},
    ]
    provider = check_models(without_strayed_keys(layers)).providers["demo"]
    assert (provider.api_key, provider.oauth) == ("", {})


def test_null_overrides_neither_the_key_nor_its_address() -> None:
    nothing: Document = {"base_url": None, "api_key": None}
    for over in ({"providers": {"demo": nothing}}, {"providers": {"demo": None}}):
        assert key_of([OURS, over])[:2] == ("http://ours/v1", "secret")


def test_lists_are_replaced_and_objects_are_merged() -> None:
    under: Document = {"a": {"list": [1, 2], "kept": 1}, "b": {"c": 1}}
    over: Document = {"a": {"list": [3], "new": {}}, "b": 2}
    copy = {"a": {"list": [1, 2], "kept": 1}, "b": {"c": 1}}
    assert merged([under, over]) == {"a": {"list": [3], "kept": 1, "new": {}}, "b": 2}
    assert under == copy
    assert merged([]) == {}


def test_rules_and_hooks_of_all_layers_are_combined() -> None:
    deny: Json = {"decision": "deny", "command": "rm *"}
    allow: Json = {"decision": "allow", "tool": "edit"}
    under: Document = {
        "permission_rules": [deny],
        "hooks": {"PreToolUse": [{"command": "a"}]},
        "permissions": {"allowed_tools": ["view"]},
    }
    over: Document = {
        "permission_rules": [allow],
        "hooks": {"PreToolUse": [{"command": "b"}], "Other": []},
        "permissions": {"allowed_tools": ["edit"]},
    }
    assert merged([under, {"permission_rules": []}, over]) == {
        "permission_rules": [deny, allow],
        "hooks": {"PreToolUse": [{"command": "a"}, {"command": "b"}], "Other": []},
        "permissions": {"allowed_tools": ["edit"]},
    }


def test_a_tool_declared_again_is_replaced_entirely() -> None:
    first: Json = {"command": "a", "description": "d", "is_free": True, "parameters": {"x": 1}}
    second: Json = {"command": "b", "description": "e", "parameters": {"y": 2}}
    layers: list[Document] = [{"own_tools": {"t": first, "u": first}}, {"own_tools": {"t": second}}]
    assert merged(layers) == {"own_tools": {"t": second, "u": first}}


@contract("CFG-5")
@pytest.mark.parametrize(
    "above",
    [
        [{"base_url": "http://theirs/v1", "extra_headers": {"X-Mine": "1"}}],
        [{"base_url": "http://theirs/v1"}, {"extra_headers": {"X-Mine": "1"}}],
    ],
)
def test_headers_are_not_sent_to_an_address_of_a_later_layer(above: list[Document]) -> None:
    layers: list[Document] = [OURS, *({"providers": {"demo": over}} for over in above)]
    assert key_of(layers) == ("http://theirs/v1", "", {"X-Mine": "1"})


@contract("CFG-5")
def test_a_variable_that_changes_the_address_indirectly_drops_the_key() -> None:
    demo: Document = {"base_url": "$HERE", "api_key": "secret"}
    env = {"HERE": "$THERE", "THERE": "http://ours/v1"}
    ours: Document = {"env": env, "providers": {"demo": demo}}
    assert key_of([ours, {"env": {"OTHER": "x"}}])[:2] == ("$HERE", "secret")
    assert key_of([ours, {"env": {"THERE": "http://theirs/v1"}}])[:2] == ("$HERE", "")


# --- selected models

MODEL_OPTIONS: Document = {"provider_options": {"token": "s"}, "max_tokens": 5, "think": True}


def large_of(*selected: Document) -> Json:
    return merged({"models": {"large": one}} for one in selected)["models"]["large"]


@contract("CFG-5")
@pytest.mark.parametrize(
    "over",
    [{"provider": "other", "model": "m"}, {"provider": "demo", "model": "n"}],
)
def test_a_model_selected_over_another_inherits_no_options(
    over: Document,
) -> None:
    assert large_of({"provider": "demo", "model": "m", **MODEL_OPTIONS}, over) == over


def test_the_same_model_selected_again_merges_its_options() -> None:
    same: Document = {"provider": "demo", "model": "m"}
    merged_config = {**same, **MODEL_OPTIONS, "max_tokens": 7}
    assert large_of({**same, **MODEL_OPTIONS}, {**same, "max_tokens": 7}) == merged_config
    assert large_of({**same, **MODEL_OPTIONS}, {"max_tokens": 7}) == merged_config


def test_only_the_provider_with_a_changed_address_loses_its_key() -> None:
    names = [f"p{n}" for n in range(2000)]
    ours: Document = {
        "env": {"HOST": "http://ours"},
        "providers": {name: {"base_url": f"$HOST/{name}", "api_key": name} for name in names},
    }
    moved: Document = {"providers": {"p7": {"base_url": "http://theirs"}}}
    found = without_strayed_keys([ours, moved])["providers"]
    assert {name: provider.get("api_key") for name, provider in found.items()} == {
        name: None if name == "p7" else name for name in names
    }


@pytest.mark.parametrize(
    ("over", "left"),
    [
        ({"provider": "b", "model": "x"}, {"provider": "b", "model": "x"}),
        ({"Provider": "b", "Model": "x"}, {"Provider": "b", "Model": "x"}),
        ({"provider": "b"}, {"provider": "b"}),
        ({"model": "n"}, {"provider": "a", "model": "n"}),
        ({"max_tokens": 9}, {**SELECTED, "max_tokens": 9}),
        ({"provider": "a", "model": "m", "think": True}, {**SELECTED, "think": True}),
    ],
)
def test_options_are_merged_only_for_the_same_model(over: Document, left: Document) -> None:
    layers: list[Document] = [{"models": {"large": SELECTED}}, {"models": {"large": over}}]
    assert merged(layers) == {"models": {"large": left}}
