"""`culm models`: what can be used, in which order, and why."""

import asyncio
import json
from typing import Any

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Script
from tests.cli.conftest import Desk, Said
from tests.support import WAIT_S

KEY = "sk-never-to-be-seen"
OFF = "\nCULM_NO_DISCOVERY is set: neither keys in the environment nor local servers count.\n"


def listed(desk: Desk, *args: str) -> dict[str, Any]:
    said = desk.culm("models", "--json", *args)
    assert said.status == 0
    return json.loads(said.out)


def test_with_nothing_at_all_the_offline_model_does_the_work_and_discovery_is_said_to_be_off(
    desk: Desk,
) -> None:
    desk.set_env(OPENAI_API_KEY=KEY)
    assert desk.culm("models") == Said(
        0,
        "large  offline/offline  (built in)\n"
        "small  offline/offline  (built in)\n"
        "\n"
        "Providers, the most preferred first:\n"
        "  offline  built in  usable\n" + OFF,
    )


def test_a_key_in_the_environment_is_named_and_never_shown(desk: Desk) -> None:
    desk.discover(OPENAI_API_KEY=KEY, GROQ_API_KEY=KEY)
    said = desk.culm("models")
    lines = said.out.splitlines()
    assert lines[0].split() == ["large", "openai/gpt-5.4", "(environment", "OPENAI_API_KEY)"]
    at = lines.index("Providers, the most preferred first:")
    assert lines[at + 1 : at + 4] == [
        "  openai   environment OPENAI_API_KEY  usable",
        "  groq     environment GROQ_API_KEY    usable",
        "  offline  built in                    usable",
    ]
    assert "  anthropic   ANTHROPIC_API_KEY" in lines
    for args in (("models",), ("models", "openai"), ("models", "--json")):
        assert KEY not in "".join(map(str, desk.culm(*args)))


async def test_a_local_server_is_found_with_the_models_it_lists(desk: Desk) -> None:
    async with asyncio.timeout(WAIT_S), open_model_server(Script()) as server:
        desk.discover(OLLAMA_HOST=server.url)
        shown = await asyncio.to_thread(listed, desk, "ollama")
    assert shown["origins"] == [f"found at {shown['address']}"]
    assert shown["usable"] is True
    assert shown["models"]


def test_what_is_selected_its_fallbacks_and_their_troubles_come_first(desk: Desk) -> None:
    mine = {"base_url": "http://me:pw@127.0.0.1:9/v1", "api_key": KEY, "models": [{"id": "m"}]}
    file = desk.write_user(
        {
            "providers": {"mine": mine, "other": {"base_url": "$NOWHERE"}},
            "models": {"large": {"provider": "other", "model": "x"}},
            "fallbacks": {"large": [{"provider": "mine", "model": "m"}]},
        }
    )
    why = "providers.other.base_url: $NOWHERE is not set"
    assert desk.culm("models") == Said(
        0,
        f"large  other/x  (selected in {file}) not usable: {why}\n"
        f"  or   mine/m   (selected in {file})\n"
        f"small  mine/m   (does large work, too)\n"
        "\n"
        "Providers, the most preferred first:\n"
        f"  mine     {file}  usable\n"
        f"  other    {file}  not usable: {why}\n"
        f"  offline  {'built in'.ljust(len(str(file)))}  usable\n" + OFF,
    )
    shown = desk.culm("models", "mine")
    assert "http://127.0.0.1:9/v1" in shown.out
    assert KEY not in shown.out
    assert "pw" not in shown.out


def test_a_provider_is_shown_with_windows_prices_and_abilities(desk: Desk) -> None:
    written = {
        "id": "m-1",
        "context_window": 128000,
        "cost_per_1m_in": 0.5,
        "cost_per_1m_out": 2,
        "can_reason": True,
        "supports_attachments": True,
    }
    provider = {"base_url": "http://127.0.0.1:9/v1", "models": [written, {"id": "m-2"}]}
    file = desk.write_user({"providers": {"mine": provider}})
    assert desk.culm("models", "mine") == Said(
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


def test_a_provider_without_its_key_is_shown_with_the_variable_it_needs(desk: Desk) -> None:
    desk.discover()
    shown = listed(desk, "anthropic")
    assert (shown["usable"], shown["reason"]) == (False, "ANTHROPIC_API_KEY is not set")
    assert shown["models"]


@pytest.mark.parametrize(
    ("name", "hint"), [("opnai", "did you mean 'openai'?"), ("zzz", "there is offline, openai, ")]
)
def test_a_provider_that_nobody_knows_is_refused_with_the_nearest(
    desk: Desk, name: str, hint: str
) -> None:
    said = desk.culm("models", name)
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith(f"culm: there is no provider '{name}'\nhint: {hint}")


def test_what_an_untrusted_project_would_add_is_not_there_and_is_told(desk: Desk) -> None:
    file = desk.write("culm.json", {"providers": {"theirs": {"base_url": "http://theirs/v1"}}})
    said = desk.culm("models")
    assert "theirs" not in said.out
    assert said.err == (
        f"note: {file} is not trusted, so this part of it is ignored: providers. "
        "Read it, then say: culm trust\n"
    )


def test_a_file_that_was_named_and_is_not_there_is_wrong_usage(desk: Desk) -> None:
    said = desk.culm("models", "--config", "nowhere.json")
    assert (said.status, said.out) == (2, "")
    assert said.err == f"culm: cannot read {desk.project}/nowhere.json: there is no such file\n"


def test_a_project_may_choose_among_the_providers_that_a_client_of_the_user_set(
    desk: Desk,
) -> None:
    document = desk.data_dir / "config.json"
    document.parent.mkdir(parents=True)
    document.write_text('{"providers": {"mine": {"base_url": "http://127.0.0.1:9/v1"}}}')
    file = desk.write("culm.json", {"models": {"large": {"provider": "mine", "model": "m"}}})
    said = desk.culm("models")
    assert said.err == ""
    assert said.out.startswith(f"large  mine/m  (selected in {file})\n")
