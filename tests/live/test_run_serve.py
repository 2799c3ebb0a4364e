"""Runs and `culm serve`: its signals, clients, configuration and disk."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.run.rules import BEHIND_INTERRUPTED
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.runs import AgentInfo, Run, RunChanged
from culm.wire.workspaces import StoreHealth
from tests.live.harness import (
    RESUME_S,
    make_directory,
    open_client_of,
    open_process,
    open_process_server,
    run_serve,
)
from tests.live.run_harness import (
    HELD,
    HELD_PREFIX,
    HELD_WHOLE,
    Watch,
    asked,
    open_agent,
    open_watch,
    outcomes,
    questions,
    rows,
    script,
    until_abandoned,
    until_asked,
    write_config,
)
from tests.live.test_peers import open_disk
from tests.support import WAIT_S, contract, model_config

PACED = Reply(tokens=4000, rate=400)
# A client that has left is dropped soon; one that has yet to attach may be slow.
LEAVES_SOON = {"create_grace_s": 20.0, "detach_grace_s": 0.2, "linger_s": 0.2}


@contract("EXC-16")
async def test_signal_in_mid_stream_interrupts_the_run_and_holds_its_queue(
    folder: Path,
) -> None:
    async with open_model_server(script(PACED)) as model:
        async with open_agent(folder, model) as (server, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "count", run_id="active")
                await watch.until(
                    lambda: [t.type for t in watch.events].count("message_delta") > 40
                )
                await remote.prompt(session.id, "next", run_id="queued")
                ended = await server.end()
                assert (ended.status, ended.stderr.count("Traceback")) == (0, 0)
                # Both were published before the stream ended.
                (complete,) = watch.completes()
                assert (complete.run_id, complete.culm_reason) == ("active", "interrupted")
                changes = [t.read(RunChanged) for t in watch.events if t.type == "run_changed"]
                assert (changes[-1].run_id, changes[-1].state) == ("queued", "held")
            await until_abandoned(model, asked(model)[0])

        found: list[object] = []
        for _ in range(2):
            async with open_agent(folder, model) as (again, client):
                remote = await client.open_workspace(make_directory(folder))
                (held,) = (await remote.snapshot()).runs
                assert (held.id, held.state, held.title) == ("queued", "held", BEHIND_INTERRUPTED)
                active = await remote.run("active")
                assert (active.state, active.outcome) == ("ended", "interrupted")
                prompt, cut = await rows(remote, session.id)
                assert prompt == ("user", "count", "stop", "")
                assert cut == ("assistant", watch.text_of(complete), "error", "interrupted")
                found.append([await remote.messages(session.id), active, held])
                assert (await again.end()).status == 0
        assert found[0] == found[1]
        assert len(questions(model)) == 1


# A client that runs until it is killed.
POSTER = """
import asyncio, sys
from culm.client.http import open_client
from culm.client.follower import open_mirror

async def main():
    async with open_client(sys.argv[1]) as client:
        remote = await client.open_workspace(sys.argv[2])
        session = await remote.create_session("s")
        async with open_mirror(remote) as follower:
            await follower.connected()
            await remote.prompt(session.id, "go", run_id="outlives")
            print("posted", session.id, flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@contract("INV-30", "INV-31")
async def test_run_of_a_killed_client_ends_normally_and_then_the_server_exits(
    folder: Path,
) -> None:
    async with open_model_server(script(HELD)) as model:
        write_config(folder, model, **LEAVES_SOON)
        directory = make_directory(folder)
        async with open_agent(folder, model) as (server, client):
            async with open_process(folder, "-c", POSTER, server.url, str(directory)) as poster:
                await poster.until(lambda: bool(poster.lines), RESUME_S)
                await until_asked(model, 1)
                await poster.kill()
            await asyncio.sleep(0.8)  # Longer than all grace periods: only the run is left.
            (workspace,) = await client.workspaces()
            path = f"/v1/workspaces/{workspace.id}/runs/outlives"
            assert (await client.ask("GET", path, Run)).state == "active"
            with pytest.raises(RequestRefused) as refused:
                await client.shut_down()
            assert refused.value.status == 409

            model.release()
            ended = await server.wait()
            assert ended.status == 0
            assert "nobody needs it" in ended.stderr

        write_config(folder, model)
        async with open_agent(folder, model) as (_, client):
            remote = await client.open_workspace(directory)
            assert await outcomes(remote, ["outlives"]) == ["end_turn"]
            (session,) = await remote.sessions()
            assert await rows(remote, session.id) == [
                ("user", "go", "stop", ""),
                ("assistant", HELD_WHOLE, "end_turn", ""),
            ]
        assert len(questions(model)) == 1


@contract("EXC-16")
async def test_abandoned_run_is_interrupted_and_the_server_exits(
    folder: Path,
) -> None:
    async with open_model_server(script(HELD)) as model:
        write_config(folder, model, abandoned_runs_s=0.4, **LEAVES_SOON)
        async with open_agent(folder, model) as (server, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "go", run_id="alone")
                await remote.prompt(session.id, "next", run_id="behind")
                await watch.until(lambda: any(t.type == "message_delta" for t in watch.events))
            ended = await server.wait()
            assert ended.status == 0
            assert "no client for too long" in ended.stderr
            assert "Traceback" not in ended.stderr

        write_config(folder, model)
        async with open_agent(folder, model) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            assert await outcomes(remote, ["alone"]) == ["interrupted"]
            held = [(run.id, run.state) for run in (await remote.snapshot()).runs]
            assert held == [("behind", "held")]
            assert await rows(remote, session.id) == [
                ("user", "go", "stop", ""),
                ("assistant", HELD_PREFIX, "error", "interrupted"),
            ]


# --- configuration


@pytest.mark.parametrize("where", ["--config", "XDG_CONFIG_HOME", "HOME"])
async def test_configuration_file_is_found_and_makes_the_agent_ready(
    folder: Path, where: str
) -> None:
    args, env = ["--host", f"unix://{folder}/s"], dict[str, str]()
    home = folder / ".config" / "culm"
    home.mkdir(parents=True)
    (home / "culm.json").write_text("broken, and not to be read unless it is the one")
    async with open_model_server(script(Reply(text="Here."))) as model:
        text = json.dumps(model_config(model.url))
        match where:
            case "--config":
                (folder / "other.json").write_text(text)
                args += ["--config", str(folder / "other.json")]
            case "XDG_CONFIG_HOME":
                xdg = make_directory(make_directory(folder, "xdg"), "culm")
                (xdg / "culm.json").write_text(text)
                env = {"XDG_CONFIG_HOME": str(folder / "xdg")}
            case _:
                (home / "culm.json").write_text(text)
        async with (
            open_process_server(folder, *args, env=env) as server,
            open_client_of(server) as client,
        ):
            remote = await client.open_workspace(make_directory(folder))
            info = await client.ask("GET", remote.path("/agent"), AgentInfo)
            assert (info.is_ready, info.model.name) == (True, "Demo One")
            session = await remote.create_session("s")
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "who is there?", run_id="r")
                await watch.until_complete("r")
            assert [complete.text for complete in watch.completes()] == ["Here."]


SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("providers = 1", "not valid JSON"),
        ("[]", "object"),
        ('{"provider": {}}', "provider"),
        ('{"providers": []}', "providers"),
        (f'{{"providers": {{"demo": "{SECRET}"}}}}', "providers"),
        (f'{{"providers": {{"demo": {{"api_key": ["{SECRET}"]}}}}}}', "api_key"),
        ('{"providers": {"demo": {"extra_headers": []}}}', "extra_headers"),
        ('{"providers": {"demo": {"models": {}}}}', "models"),
        ('{"models": {"large": "demo-1"}}', "models"),
        ('{"models": {"large": {"model": 1}}}', "model"),
    ],
)
async def test_broken_configuration_file_is_refused_at_start_with_a_hint(
    folder: Path, text: str, named: str
) -> None:
    config = folder / "culm.json"
    config.write_text(text)
    ended = await run_serve(folder, "--host", f"unix://{folder}/s", "--config", str(config))
    assert (ended.status, ended.stdout) == (2, "")
    assert f"culm: {config}" in ended.stderr
    assert named in ended.stderr
    assert "hint: " in ended.stderr
    assert SECRET not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (folder / "s").exists()


async def test_missing_configuration_file_given_by_option_is_refused(folder: Path) -> None:
    nowhere = folder / "nowhere.json"
    ended = await run_serve(folder, "--config", str(nowhere))
    assert (ended.status, ended.stdout) == (2, "")
    assert f"cannot read {nowhere}" in ended.stderr


async def test_key_reaches_its_provider_and_is_not_shown_logged_or_stored(folder: Path) -> None:
    secrets = {SECRET, "header-secret-42", "password-43"}
    echo = json.dumps({"error": {"message": f"Incorrect key {SECRET} with header-secret-42"}})
    async with open_model_server(script(Reply(status=401, body=echo))) as model:
        config = json.loads(json.dumps(model_config(model.url)))
        config["providers"]["demo"]["api_key"] = SECRET
        config["providers"]["demo"]["extra_headers"] = {"X-Extra": "header-secret-42"}
        config["providers"]["idle"] = {
            "base_url": "http://name:password-43@127.0.0.1:9/v1",
            "models": [{"id": "m"}],
        }
        (folder / "culm.json").write_text(json.dumps(config))
        async with open_agent(folder, model, "--log-level", "debug") as (server, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "open", run_id="r")
                await watch.until_complete("r")
            assert await outcomes(remote, ["r"]) == ["error"]
            assert "401" in watch.completes()[0].error
            paths = ["", "/config", "/providers", "/agent", "/runs", "/snapshot?sessions=*"]
            shown = [
                await client.request("GET", "/v1/config"),
                await client.request("GET", "/v1/workspaces"),
                *[await client.request("GET", remote.path(path)) for path in paths],
                *[bytes(event.payload) for event in watch.events],
            ]
            ended = await server.end()
        heads = [seen.headers for seen in model.requests]
        assert {(h["Authorization"], h["X-Extra"]) for h in heads} == {
            (f"Bearer {SECRET}", "header-secret-42")
        }
    kept = [p for part in ("data", "state") for p in (folder / part).rglob("*") if p.is_file()]
    assert {p.name for p in kept} >= {"culm.db", "culm.log"}
    shown += [ended.stdout.encode(), ended.stderr.encode(), *[p.read_bytes() for p in kept]]
    for secret in secrets:
        assert not [text[:200] for text in shown if secret.encode() in text]


# --- a full disk


def healths(watch: Watch) -> list[str]:
    return [t.read(StoreHealth).state for t in watch.events if t.type == "store_health"]


@contract("EXC-16", "INV-36")
@pytest.mark.parametrize("then", ["freed", "killed"])
async def test_full_disk_stops_a_run_whose_end_is_published_once_writable(
    folder: Path, then: str
) -> None:
    endless = Reply(tokens=1_000_000, rate=50_000)
    async with (
        open_disk(folder) as disk,
        open_model_server(script(endless, otherwise=Reply(text="Again."))) as model,
        open_agent(folder, model, program=disk.program) as (server, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        session = await remote.create_session("s")
        async with open_watch(remote) as watch:
            await remote.prompt(session.id, "go", run_id="full")
            await until_asked(model, 1)
            await disk.order("fill")
            await watch.until(lambda: "failing" in healths(watch), RESUME_S)
            await until_abandoned(model, asked(model)[0])
            async with asyncio.timeout(WAIT_S):
                while (await remote.run("full")).state != "ending":
                    await asyncio.sleep(0.02)
            assert (await remote.session(session.id)).is_busy
            with pytest.raises(RequestRefused) as refused:
                await remote.prompt(session.id, "x" * 500_000, run_id="refused")
            assert (refused.value.status, refused.value.code) == (503, "store_busy")
            assert watch.completes() == []

            if then == "freed":
                await disk.order("free")
                await assert_ended(remote, watch, session.id, "error")
                return
            await server.kill()
            await disk.order("free")
            async with open_agent(folder, model, program=disk.program):
                await assert_ended(remote, watch, session.id, "interrupted")


async def assert_ended(
    remote: RemoteWorkspace, watch: Watch, session_id: SessionId, outcome: str
) -> None:
    """Assert that the run `full` has this end, published once, and the refused prompt no trace."""
    await watch.until_complete("full", wait_s=RESUME_S)
    await watch.until(lambda: healths(watch)[-1] == "ok", RESUME_S)
    assert await outcomes(remote, ["full"]) == [outcome]
    prompt, cut = await rows(remote, session_id)
    assert (prompt, cut[2]) == (("user", "go", "stop", ""), "error")
    assert "".join(f"tok{n} " for n in range(1000)).startswith(cut[1][:5000])
    with pytest.raises(RequestRefused) as refused:
        await remote.run("refused")
    assert refused.value.status == 404
    await remote.prompt(session_id, "and now?", run_id="after")
    await watch.until_complete("after")
    assert watch.completed() == ["after", "full"]
