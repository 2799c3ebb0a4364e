"""Runs that need a key of a client are held after a restart, and no model is called."""

import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.run.rules import BEHIND_INTERRUPTED
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply
from culm.wire.runs import Run
from tests.flow.config_files import config_of, provider, write
from tests.live.harness import ProcessServer, make_directory, open_client_of, open_process_server
from tests.live.machine import env_of
from tests.live.run_harness import HELD, act_on, asked, open_watch, questions, script, until_asked
from tests.support import contract

KEY = "a-key-that-only-a-client-has"


@asynccontextmanager
async def open_keyless(
    folder: Path, *args: str, discovers: bool = True
) -> AsyncGenerator[tuple[ProcessServer, Client]]:
    """A server without keys, and a client without an open workspace."""
    given = ("--host", f"unix://{folder}/s", *args)
    env = env_of({} if discovers else {"CULM_NO_DISCOVERY": "1"})
    async with (
        open_process_server(folder, *given, env=env) as server,
        open_client_of(server) as client,
    ):
        yield server, client


async def join(client: Client, folder: Path, **env: str) -> RemoteWorkspace:
    return await client.open_workspace(make_directory(folder), env=env)


async def held_runs(remote: RemoteWorkspace) -> list[tuple[str, str, str]]:
    """Return the id, state and title of all runs that have not ended."""
    return [(run.id, run.state, run.title) for run in (await remote.snapshot()).runs]


async def assert_runs_with_the_key(
    remote: RemoteWorkspace, model: ModelServer, run_id: str, before: int
) -> None:
    """Start a held run, and assert that it calls its model with the key of the client."""
    assert len(model.requests) == before, "no request was sent without the key"
    async with open_watch(remote) as watch:
        assert isinstance(await act_on(remote, run_id, "start"), Run)
        await watch.until_complete(run_id)
    assert (await remote.run(run_id)).outcome == "end_turn"
    assert asked(model)[-1].headers["Authorization"] == f"Bearer {KEY}"


@contract("INV-36", "MODEL-3")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
async def test_queued_run_without_its_key_is_held_until_a_client_starts_it(
    folder: Path, number: signal.Signals
) -> None:
    async with open_model_server(script(HELD, otherwise=Reply(text="Done."))) as model:
        env = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": model.url}
        async with open_keyless(folder) as (server, client):
            remote = await join(client, folder, **env)
            session = await remote.create_session("s")
            await remote.prompt(session.id, "first", run_id="active")
            await until_asked(model, 1)
            await remote.prompt(session.id, "second", run_id="queued")
            await server.end(number)
        before = len(model.requests)

        async with open_keyless(folder) as (_, client):
            remote = await join(client, folder)
            ((run_id, state, reason),) = await held_runs(remote)
            assert (run_id, state) == ("queued", "held")
            assert reason == BEHIND_INTERRUPTED or "OPENAI_API_KEY" in reason
            assert (await remote.run("active")).outcome == "interrupted"
            assert remote.info.config.models["large"].provider == "offline"
            with pytest.raises(RequestRefused, match="OPENAI_API_KEY"):
                await act_on(remote, "queued", "start")
            assert (await remote.run("queued")).state == "held"

            remote = await join(client, folder, **env)
            assert (await held_runs(remote))[0][:2] == ("queued", "held"), "still held"
            await assert_runs_with_the_key(remote, model, "queued", before)
        assert [question.conversation[-1] for question in questions(model)] == [
            ("user", "first"),
            ("user", "second"),
        ]


@contract("INV-36", "MODEL-3")
async def test_prompt_accepted_with_a_client_key_is_held_after_a_kill(
    folder: Path,
) -> None:
    """The turn had not begun: a command that prints one of its headers was still running."""
    gate = folder / "gate"
    async with open_model_server(script(otherwise=Reply(text="Done."))) as model:
        waiting = f"$(while [ ! -e {gate} ]; do sleep 0.02; done; echo open)"
        config = config_of(
            {"demo": provider(model.url, "$CLIENT_KEY", extra_headers={"X-Gate": waiting})}
        )
        write(folder / "culm.json", config)
        given = ("--config", str(folder / "culm.json"))
        async with open_keyless(folder, *given, discovers=False) as (server, client):
            remote = await join(client, folder, CLIENT_KEY=KEY)
            session = await remote.create_session("s")
            await remote.prompt(session.id, "hello", run_id="accepted")
            await server.kill()
        gate.touch()

        async with open_keyless(folder, *given, discovers=False) as (_, client):
            remote = await join(client, folder)
            reason = "providers.demo.api_key: $CLIENT_KEY is not set"
            assert await held_runs(remote) == [("accepted", "held", reason)]
            with pytest.raises(RequestRefused, match=r"\$CLIENT_KEY is not set"):
                await act_on(remote, "accepted", "start")
            remote = await join(client, folder, CLIENT_KEY=KEY)
            await assert_runs_with_the_key(remote, model, "accepted", 0)
        assert [question.conversation for question in questions(model)] == [[("user", "hello")]]
