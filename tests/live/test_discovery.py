"""What is found without configuration: one variable is enough, and `culm run` answers by it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import Struct

from culm.model.catalog import known_providers
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.request_log import SeenRequest
from culm.testing.script import Reply
from culm.wire.codec import decode
from tests.live.found import env_of, open_machine, run_fresh, server_pid
from tests.live.harness import Ended, open_process_server
from tests.live.run_drive import TITLES, script

KEY = "the-key-in-the-environment"
HELLO = "Hello from afar."


@dataclass(frozen=True)
class Case:
    """A variable or two, and how the provider should be asked then."""

    env: Mapping[str, str]  # `{url}` stands for where the provider is.
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


class Question(Struct):
    model: str
    stream: bool


def environment_of(case: Case, model: ModelServer) -> dict[str, str]:
    host = model.url.removeprefix("http://").removesuffix("/v1")
    return {name: text.format(url=model.url, host=host) for name, text in case.env.items()}


def asked(model: ModelServer) -> list[SeenRequest]:
    """Without those who want a title."""
    return [seen for seen in model.requests if TITLES.encode() not in seen.raw]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_a_variable_alone_is_enough_for_an_answer_by_the_right_model(
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
        assert decode(seen.raw, Question) == Question(case.model, stream=True)


async def test_of_several_keys_the_preferred_provider_is_asked_and_the_others_are_not(
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


async def test_who_wants_nothing_found_is_answered_offline_with_real_results(folder: Path) -> None:
    async with open_model_server(script()) as model, open_machine(folder):
        env = environment_of(CASES["OpenAI"], model) | environment_of(CASES["Ollama"], model)
        env["CULM_NO_DISCOVERY"] = "1"
        ended = await run_fresh(folder, env, "read README.md")
        assert ended.status == 0
        assert "not an LLM" in ended.stdout
        assert "# Plums" in ended.stdout
        assert ended.stderr.startswith("→ view README.md\n")
        assert model.requests == []


async def test_a_key_that_only_the_client_has_counts_in_a_server_that_has_none(
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


async def test_a_server_that_a_client_starts_has_none_of_its_keys_and_the_next_shell_asks_nobody(
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
