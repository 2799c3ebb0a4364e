"""`culm models`: usable providers and models, their order and origin."""

import asyncio
import json
from typing import Any

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Script
from tests.cli.conftest import CliHarness, CommandResult
from tests.support import WAIT_S

KEY = "sk-never-to-be-seen"
DISCOVERY_OFF_NOTE = (
    "\nCULM_NO_DISCOVERY is set: keys in the environment and local servers are not used.\n"
)


def listed(cli: CliHarness, *args: str) -> dict[str, Any]:
    result = cli.culm("models", "--json", *args)
    assert result.status == 0
    return json.loads(result.out)


def test_offline_model_is_used_by_default_and_discovery_off_is_noted(
    cli: CliHarness,
) -> None:
    cli.set_env(OPENAI_API_KEY=KEY)
    assert cli.culm("models") == CommandResult(
        0,
        "large  offline/offline  (built in)\n"
        "small  offline/offline  (built in)\n"
        "\n"
        "Providers, the most preferred first:\n"
        "  offline  built in  usable\n" + DISCOVERY_OFF_NOTE,
    )


def test_key_in_the_environment_is_named_and_never_shown(cli: CliHarness) -> None:
    cli.discover(OPENAI_API_KEY=KEY, GROQ_API_KEY=KEY)
    result = cli.culm("models")
    lines = result.out.splitlines()
    assert lines[0].split() == ["large", "openai/gpt-5.4", "(environment", "OPENAI_API_KEY)"]
    at = lines.index("Providers, the most preferred first:")
    assert lines[at + 1 : at + 4] == [
        "  openai   environment OPENAI_API_KEY  usable",
        "  groq     environment GROQ_API_KEY    usable",
        "  offline  built in                    usable",
    ]
    assert "  anthropic   ANTHROPIC_API_KEY" in lines
    for args in (("models",), ("models", "openai"), ("models", "--json")):
        assert KEY not in "".join(map(str, cli.culm(*args)))


async def test_local_server_is_found_with_its_models(cli: CliHarness) -> None:
    async with asyncio.timeout(WAIT_S), open_model_server(Script()) as server:
        cli.discover(OLLAMA_HOST=server.url)
        shown = await asyncio.to_thread(listed, cli, "ollama")
    assert shown["origins"] == [f"found at {shown['address']}"]
    assert shown["usable"] is True
    assert shown["models"]


def test_selected_models_and_fallbacks_come_first_with_problems(cli: CliHarness) -> None:
    mine = {"base_url": "http://me:pw@127.0.0.1:9/v1", "api_key": KEY, "models": [{"id": "m"}]}
    file = cli.write_user(
        {
            "providers": {"mine": mine, "other": {"base_url": "$NOWHERE"}},
            "models": {"large": {"provider": "other", "model": "x"}},
            "fallbacks": {"large": [{"provider": "mine", "model": "m"}]},
        }
    )
    reason = "providers.other.base_url: $NOWHERE is not set"
    assert cli.culm("models") == CommandResult(
        0,
        f"large  other/x  (selected in {file}) not usable: {reason}\n"
        f"  or   mine/m   (selected in {file})\n"
        f"small  mine/m   (same as large)\n"
        "\n"
        "Providers, the most preferred first:\n"
        f"  mine     {file}  usable\n"
        f"  other    {file}  not usable: {reason}\n"
        f"  offline  {'built in'.ljust(len(str(file)))}  usable\n" + DISCOVERY_OFF_NOTE,
    )
    shown = cli.culm("models", "mine")
    assert "http://127.0.0.1:9/v1" in shown.out
    assert KEY not in shown.out
    assert "pw" not in shown.out


def test_provider_is_shown_with_windows_prices_and_abilities(cli: CliHarness) -> None:
    written = {
        "id": "m-1",
        "context_window": 128000,
        "cost_per_1m_in": 0.5,
        "cost_per_1m_out": 2,
        "can_reason": True,
        "supports_attachments": True,
    }
    provider = {"base_url": "http://127.0.0.1:9/v1", "models": [written, {"id": "m-2"}]}
    file = cli.write_user({"providers": {"mine": provider}})
    assert cli.culm("models", "mine") == CommandResult(
        0,
        "provider  mine (mine)\n"
        "type      openai-compat\n"
        "address   http://127.0.0.1:9/v1\n"
        f"from      {file}\n"
        "state     usable\n"
        "\n"
        "model  context  USD per 1M in  out  abilities\n"
        "m-1    128,000  0.5            2    reasons, sees images\n"
        "m-2    -        -              -    -\n",
    )


def test_provider_without_a_key_names_the_variable_it_needs(cli: CliHarness) -> None:
    cli.discover()
    shown = listed(cli, "anthropic")
    assert (shown["usable"], shown["reason"]) == (False, "ANTHROPIC_API_KEY is not set")
    assert shown["models"]


@pytest.mark.parametrize(
    ("name", "hint"), [("opnai", "did you mean 'openai'?"), ("zzz", "known: offline, openai, ")]
)
def test_unknown_provider_is_refused_with_the_nearest_name(
    cli: CliHarness, name: str, hint: str
) -> None:
    result = cli.culm("models", name)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"culm: unknown provider '{name}'\nhint: {hint}")


def test_providers_of_an_untrusted_project_are_ignored_with_a_note(cli: CliHarness) -> None:
    file = cli.write("culm.json", {"providers": {"theirs": {"base_url": "http://theirs/v1"}}})
    result = cli.culm("models")
    assert "theirs" not in result.out
    assert result.err == (
        f"note: {file} is not trusted, so this part of it is ignored: providers. "
        "Read it, then run: culm trust\n"
    )


def test_missing_config_file_is_a_usage_error(cli: CliHarness) -> None:
    result = cli.culm("models", "--config", "nowhere.json")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"culm: cannot read {cli.project}/nowhere.json: no such file\n"


def test_project_may_select_a_provider_set_by_a_client(
    cli: CliHarness,
) -> None:
    document = cli.data_dir / "config.json"
    document.parent.mkdir(parents=True)
    document.write_text('{"providers": {"mine": {"base_url": "http://127.0.0.1:9/v1"}}}')
    file = cli.write("culm.json", {"models": {"large": {"provider": "mine", "model": "m"}}})
    result = cli.culm("models")
    assert result.err == ""
    assert result.out.startswith(f"large  mine/m  (selected in {file})\n")
