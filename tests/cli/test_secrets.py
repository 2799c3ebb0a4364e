"""References to keys are shown; literal keys are hidden."""

import pytest

from culm.cli.config_report import SECRET, without_secrets


@pytest.mark.parametrize(
    "text", ["", "$NAME", "${NAME}", "$(pass show key)", "Bearer $TOKEN", "$A$B"]
)
def test_reference_is_shown_as_written(text: str) -> None:
    assert without_secrets(text, ("providers", "one", "api_key")) == text


@pytest.mark.parametrize(
    "text", ["sk-1", "sk-$NAME", "${NAME:-sk-1}", "Bearer sk-1", "$$sk", "$(", "Digest $A"]
)
def test_literal_or_partly_literal_key_is_hidden(text: str) -> None:
    assert without_secrets(text, ("providers", "one", "api_key")) == SECRET


def test_strings_that_may_hold_keys_are_hidden_and_numbers_are_not() -> None:
    provider = {
        "name": "One",
        "base_url": "https://me:pw@host/v1?key=1",
        "extra_headers": {"X-Key": "sk-1"},
        "extra_body": {"user": "sk-1", "seed": 7, "stop": ["sk-1"]},
    }
    whole = {
        "providers": {"one": provider},
        "env": {"KEY": "sk-1", "OTHER": "$KEY"},
        "mcp": {"db": {"command": "serve", "args": ["--token", "sk-1"]}},
    }
    assert without_secrets(whole) == {
        "providers": {
            "one": {
                "name": "One",
                "base_url": "https://host/v1",
                "extra_headers": {"X-Key": SECRET},
                "extra_body": {"user": SECRET, "seed": 7, "stop": [SECRET]},
            }
        },
        "env": {"KEY": SECRET, "OTHER": "$KEY"},
        "mcp": {"db": {"command": "serve", "args": [SECRET, SECRET]}},
    }
