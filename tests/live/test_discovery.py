"""Providers found without configuration: one variable is enough for `culm run`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import Struct

from culm.model.catalog import known_providers
from culm.testing.answering import SeenRequest
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply
from culm.wire.codec import decode
from tests.live.harness import Ended, open_process_server
from tests.live.machine import env_of, open_machine, run_fresh, server_pid
from tests.live.run_harness import TITLES, script

KEY = "the-key-in-the-environment"
HELLO = "Hello from afar."


@dataclass(frozen=True)
class Case:
    """Environment variables, and the request that the provider should get."""

    env: Mapping[str, str]  # `{url}` is the address of the provider.
    path: str
    headers: Mapping[str, str]
    model: str


def by_key(provider_id: str, path: str, **headers: str) -> Case:
    known = known_providers()[provider_id]
    env = {known.key_env: KEY, known.url_env: "{url}"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Case(env, path, names, known.large)


CHAT = "/v1/chat/completions"
CASES = {
    "OpenAI": by_key("openai", CHAT, Authorization=f"Bearer {KEY}"),
    "OpenRouter": by_key("openrouter", CHAT, Authorization=f"Bearer {KEY}"),
    "Anthropic": by_key("anthropic", "/v1/messages", X_Api_Key=KEY),
    "Groq": by_key("groq", CHAT, Authorization=f"Bearer {KEY}"),
    "Ollama": Case({"OLLAMA_HOST": "{host}"}, CHAT, {}, "scripted"),
}


class ChatRequest(Struct):
    model: str
    stream: bool


def environment_of(case: Case, model: ModelServer) -> dict[str, str]:
    host = model.url.removeprefix("http://").removesuffix("/v1")
    return {name: text.format(url=model.url, host=host) for name, text in case.env.items()}


def asked(model: ModelServer) -> list[SeenRequest]:
    """Return all requests except those for a title."""
    return [seen for seen in model.requests if TITLES.encode() not in seen.raw]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_environment_variable_alone_selects_the_provider_and_model(
    folder: Path, case: Case
) -> None:
    async with (
        open_model_server(script(otherwise=Reply(text=HELLO))) as model,
        open_machine(folder),
    ):
        ended = await run_fresh(folder, environment_of(case, model), "say", "hello")
        assert ended == Ended(0, HELLO, "")
        (seen,) = asked(model)
        assert seen.path == case.path
        assert {name: seen.headers[name] for name in case.headers} == case.headers
        assert decode(seen.raw, ChatRequest) == ChatRequest(case.model, stream=True)


async def test_with_several_keys_only_the_preferred_provider_is_asked(
    folder: Path,
) -> None:
    async with (
        open_model_server(script(otherwise=Reply(text=HELLO))) as preferred,
        open_model_server(script(otherwise=Reply(text="No."))) as other,
        open_machine(folder),
    ):
        env = environment_of(CASES["Ollama"], other) | environment_of(CASES["Groq"], other)
        env |= environment_of(CASES["OpenAI"], preferred)
        assert await run_fresh(folder, env, "say", "hello") == Ended(0, HELLO, "")
        assert other.requests == []


async def test_without_discovery_the_offline_model_answers_with_real_results(folder: Path) -> None:
    async with open_model_server(script()) as model, open_machine(folder):
        env = environment_of(CASES["OpenAI"], model) | environment_of(CASES["Ollama"], model)
        env["CULM_NO_DISCOVERY"] = "1"
        ended = await run_fresh(folder, env, "read README.md")
        assert ended.status == 0
        assert "not an LLM" in ended.stdout
        assert "# Plums" in ended.stdout
        assert ended.stderr.startswith("→ view README.md\n")
        assert model.requests == []


async def test_key_of_the_client_is_used_by_a_server_without_keys(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_model_server(script(otherwise=Reply(text=HELLO))) as model,
        open_process_server(folder, *host, env=env_of({"CULM_NO_DISCOVERY": "1"})),
    ):
        env = environment_of(CASES["OpenAI"], model)
        assert await run_fresh(folder, env, "say", "hello") == Ended(0, HELLO, "")
        (seen,) = asked(model)
        assert seen.headers["Authorization"] == f"Bearer {KEY}"


async def test_server_started_by_a_client_does_not_inherit_its_keys(
    folder: Path,
) -> None:
    async with (
        open_model_server(script(otherwise=Reply(text=HELLO))) as model,
        open_machine(folder),
    ):
        env = environment_of(CASES["OpenAI"], model) | {"MY_TOKEN": KEY}
        assert await run_fresh(folder, env, "say", "hello") == Ended(0, HELLO, "")
        environ = Path(f"/proc/{server_pid(folder)}/environ").read_bytes()
        assert (KEY.encode() in environ, model.url.encode() in environ) == (False, False)
        assert f"HOME={folder}\0".encode() in environ
        (seen,) = asked(model)
        ended = await run_fresh(folder, {}, "read README.md")
        assert (ended.status, "not an LLM" in ended.stdout) == (0, True)
        assert asked(model) == [seen]
