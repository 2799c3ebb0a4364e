"""A key goes to the address it was given for, and to no other."""

import pytest

from culm.config.documents import Document, merged
from culm.model.choice import check_models
from culm.wire.codec import Json
from culm.workspace.configuration import without_strayed_keys

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


def key_of(layers: list[Document], provider: str = "demo") -> tuple[str, str, dict[str, str]]:
    whole = without_strayed_keys(layers, merged(layers))
    found = check_models(whole).providers[provider]
    return found.base_url, found.api_key, found.extra_headers


@pytest.mark.parametrize(
    "laid_over",
    [
        {"providers": {"demo": {"base_url": "http://theirs/v1"}}},
        {"providers": {"demo": {"Base_URL": "http://theirs/v1"}}},
        {"PROVIDERS": {"demo": {"base_url": "http://theirs/v1"}}},
    ],
)
def test_an_address_laid_over_takes_no_key_along_however_it_is_spelled(laid_over: Document) -> None:
    for layers in ([OURS, laid_over, {}], [OURS, {}, laid_over], [{}, OURS, laid_over]):
        url, key, headers = key_of(layers)
        assert (key, headers) == ("", {}) or url == "http://ours/v1"


def test_another_provider_keeps_its_key() -> None:
    layers: list[Document] = [OURS, {"providers": {"demo": {"base_url": "http://theirs/v1"}}}]
    assert key_of(layers, "other") == ("http://ours/v1", "kept", {})


def test_a_key_laid_over_goes_to_the_address_below_it() -> None:
    over: dict[str, Json] = {"providers": {"demo": {"api_key": "mine"}}}
    url, key, _ = key_of([OURS, over])
    assert (url, key) == ("http://ours/v1", "mine")
    both: dict[str, Json] = {"providers": {"demo": {"api_key": "mine", "base_url": "http://m/v1"}}}
    assert key_of([OURS, both])[:2] == ("http://m/v1", "mine")
