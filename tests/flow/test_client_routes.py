"""The client has a typed method for every route, and each does what the route promises."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.client.http import RequestRefused
from culm.ids import RunId
from culm.server.routes import BY_NOUN, ROUTES
from culm.testing.script import Reply
from culm.wire.agent import Attachment, ShellCommand
from culm.wire.agents import ChangeBudget, SendLetter, StartAgent
from culm.wire.asks import QuestionResponse
from culm.wire.config import OAuthToken, SelectedModel
from culm.wire.messages import full_text
from culm.wire.runs import Limits
from tests.flow.agents_stage import held, open_agents, talk
from tests.flow.asking import Questioning, asking, batch_in, open_asking, request_in
from tests.flow.conftest import open_flow
from tests.flow.drive import UNKNOWN
from tests.flow.mail_stage import OUTSIDE, post_of
from tests.flow.probes import Probe, calling, script
from tests.flow.relay import Asked, open_relay, routes_of
from tests.flow.runs import open_runs
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def refused(request: Awaitable[object]) -> int:
    """The status of an answer that is a refusal."""
    with pytest.raises(RequestRefused) as caught:
        await request
    return caught.value.status


async def drive_system(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        await client.health()
        assert (await client.version()).build_id.startswith("culm-")
        await client.open_workspace(flow.directory())
        assert await client.config() == {}
        assert await refused(client.shut_down()) == 409, "it hosts a workspace"
        await client.retire()
        assert await refused(client.open_workspace(flow.directory())) == 409, "retired for good"
        return relay.asked()


async def drive_workspaces(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        remote = await client.open_workspace(flow.directory())
        assert [one.id for one in await client.workspaces()] == [remote.id]
        await remote.config.set_compact(on=True)
        assert (await remote.refresh()).config.options.tui.compact_mode
        assert remote.info.config.options.tui.compact_mode
        session = await remote.create_session("looked at")
        async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
            await follower.connected()
            await remote.select_session(session.id)
            await follower.until(lambda m: m.presence.get(client.id) == session.id)
            assert [one.id for one in (await remote.snapshot()).sessions] == [session.id]
        await remote.release()
        return relay.asked()


async def drive_sessions(folder: Path) -> Asked:
    async with open_runs(folder) as stage, open_relay(stage.flow) as (client, relay):
        remote = await client.open_workspace(stage.flow.directory())
        session = await remote.create_session("first")
        assert await remote.session(session.id) == session
        assert (await remote.rename_session(session.id, "second")).title == "second"
        await stage.heard.complete(await stage.prompt("One.", session.id))
        stage.clock.advance(1)
        await stage.heard.complete(await stage.prompt("Two."))
        roles = [message.role for message in await remote.messages(session.id)]
        assert roles == ["user", "assistant"]
        said = [full_text(message.parts) for message in await remote.user_messages()]
        assert said == ["Two.", "One."]
        (said_here,) = await remote.user_messages(session.id)
        assert full_text(said_here.parts) == "One."
        await remote.delete_session(session.id)
        assert [one.id for one in await remote.sessions()] == [stage.session_id]
        return relay.asked()


async def drive_files(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        remote = await client.open_workspace(flow.directory())
        session = await remote.create_session("s")
        assert await remote.find_last_read(session.id, "/a b.txt") is None
        await remote.mark_read(session.id, "/a b.txt")
        read_at = await remote.find_last_read(session.id, "/a b.txt")
        assert read_at is not None
        assert int(read_at.timestamp()) == int(flow.clock.now_s())
        assert await remote.read_files(session.id) == ["/a b.txt"]
        assert await remote.file_history(session.id) == []
        return relay.asked()


async def drive_agent(folder: Path) -> Asked:
    async with open_runs(folder, play=script(HELD)) as stage, open_relay(stage.flow) as given:
        client, relay = given
        remote = await client.open_workspace(stage.flow.directory())
        session_id = stage.session_id
        await remote.init_agent(interactive=True)
        await remote.update_agent()
        file = Attachment("/note.txt", "note.txt", "text/plain", b"a note")
        await remote.prompt(session_id, "First.", run_id="first", attachments=[file])
        await stage.heard.text("Hello")
        assert "a note" in str(stage.sent(1)[-1].content)
        assert (await remote.agent_info()).is_busy
        assert (await remote.agent_session(session_id)).is_busy
        selected = (await remote.agent_info()).model_cfg
        assert (await remote.default_small_model(selected.provider)).provider == selected.provider
        for name in ("a", "b"):
            await remote.prompt(session_id, name, run_id=name, limits=Limits(steps=3))
        assert await remote.count_queued(session_id) == 2
        assert await remote.queued_prompts(session_id) == ["a", "b"]
        ordered = await remote.order_queue(session_id, [RunId("b"), RunId("a")])
        assert await remote.queue(session_id) == ordered
        assert [waiting.run_id for waiting in ordered] == ["b", "a"]
        await remote.clear_queue(session_id)
        assert await remote.queue(session_id) == []
        assert (await remote.steer(session_id, "Be brief.")).session_id == session_id
        await remote.cancel(session_id)
        assert (await stage.heard.complete("first")).cancelled
        await stage.until_idle()
        shown = await remote.shell(session_id, "echo seen", width=80)
        assert (shown.output.strip(), shown.exit_code) == ("seen", 0)
        await remote.summarize(session_id)
        assert (await stage.session()).summary_message_id
        await remote.compact(session_id)
        await stage.until_idle()
        assert {run.kind for run in await remote.runs(session_id)} == {"prompt", "summary"}
        return relay.asked()


async def drive_runs(folder: Path) -> Asked:
    async with open_runs(folder, play=script(HELD)) as stage, open_relay(stage.flow) as given:
        client, relay = given
        remote = await client.open_workspace(stage.flow.directory())
        for name in ("first", "next"):
            await remote.prompt(stage.session_id, name, run_id=name)
        await stage.heard.text("Hello")
        assert [run.id for run in await remote.runs()] == ["next", "first"]
        assert [run.id for run in await remote.runs(stage.session_id, "queued")] == ["next"]
        assert await remote.runs(UNKNOWN) == []
        assert (await remote.edit_run("next", "Changed.")).prompt == "Changed."
        assert (await remote.run("next")).prompt == "Changed."
        assert await refused(remote.start_run("next")) == 409, "it waits, and is not held"
        assert (await remote.drop_run("next")).outcome == "canceled"
        assert (await remote.cancel_run("first")).result == "canceled"
        return relay.asked()


async def drive_asks(folder: Path) -> Asked:
    play = script(calling("look"), asking("Why?"), asking("And then?"))
    tools = (Probe("look", asks=True), Questioning())
    async with open_asking(folder, play, *tools) as stage, open_relay(stage.flow) as given:
        client, relay = given
        remote = await client.open_workspace(stage.flow.directory())
        run_id = await stage.prompt("Look, and ask.")
        await request_in(stage.heard)
        (ask,) = await remote.asks(stage.session_id)
        assert await remote.answer(ask, "allow_session")
        (allowed,) = await remote.asks(state="allowed")
        assert (allowed.request.id, allowed.by) == (ask.request.id, client.id)
        (grant,) = await remote.grants()
        assert grant.ask_id == ask.request.id
        await remote.remove_grant(grant.id)
        assert await remote.grants() == []
        batch = await batch_in(stage.heard)
        assert [one.request for one in await remote.questions(stage.session_id)] == [batch]
        said = QuestionResponse(batch.questions[0].id, fill_in_text="Because.")
        assert await remote.answer_questions(batch.id, [said])
        assert await remote.cancel_questions((await batch_in(stage.heard, 2)).id)
        states = {one.state for one in await remote.questions(state="all")}
        assert states == {"answered", "canceled"}
        await stage.heard.complete(run_id)
        await remote.set_skip(on=True, session_id=stage.session_id)
        skipped = [await remote.is_skipped(one) for one in (stage.session_id, "")]
        assert skipped == [True, False]
        return relay.asked()


async def drive_agents(folder: Path) -> Asked:
    async with (
        open_agents(folder, talk("@ann", held("Ann "))) as stage,
        open_relay(stage.flow) as (client, relay),
    ):
        remote = await client.open_workspace(stage.flow.directory())
        ann = await remote.start_agent(StartAgent("@ann: go", limits=Limits(steps=5)))
        await stage.asked_by("@ann")
        assert [one.agent_id for one in await remote.agents()] == [ann.agent_id]
        assert await remote.agents(ann.agent_id) == []
        changed = await remote.set_budget(ann.agent_id, ChangeBudget(tokens=10_000))
        assert changed.budget == Limits(steps=5, tokens=10_000)
        assert (await remote.steer_agent(ann.agent_id, "Faster.")).run_id
        await remote.cancel_agent(ann.agent_id)
        assert (await remote.agent(ann.agent_id)).agent.outcome == "canceled"
        return relay.asked()


async def drive_mail(folder: Path) -> Asked:
    async with open_agents(folder, talk("@")) as stage, open_relay(stage.flow) as (client, relay):
        remote = await client.open_workspace(stage.flow.directory())
        post_of(stage).make(OUTSIDE)
        letter = SendLetter(stage.session_id, "ask", "@you: what?", from_=OUTSIDE)
        sent = await remote.send_letter(letter)
        assert (await remote.letter(sent.letter_id)).to == stage.session_id
        reply = await remote.reply_to_letter(sent.letter_id, "That.", sender=stage.session_id)
        assert (reply.kind, reply.correlation_id) == ("reply", sent.letter_id)
        ids = {letter.letter_id for letter in await remote.letters(stage.session_id)}
        assert {sent.letter_id, reply.letter_id} <= ids
        await remote.ring(stage.session_id)
        await client.ring(str(stage.flow.directory()))
        assert await refused(client.ring("/not/known")) == 404
        await stage.until_idle()
        return relay.asked()


async def drive_processes(folder: Path) -> Asked:
    async with open_runs(folder) as stage, open_relay(stage.flow) as (client, relay):
        remote = await client.open_workspace(stage.flow.directory())
        async with asyncio.TaskGroup() as tasks:
            waits = tasks.create_task(remote.shell(stage.session_id, "sleep 60"))
            async with asyncio.timeout(WAIT_S):
                while not (found := await remote.processes()):
                    await asyncio.sleep(0.002)
            assert [one.kind for one in found] == ["shell"]
            waits.cancel()
        return relay.asked()


async def drive_stats(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        remote = await client.open_workspace(flow.directory())
        assert (await remote.stats(days=7)).days == []
        return relay.asked()


async def drive_config(folder: Path) -> Asked:
    async with open_runs(folder) as stage, open_relay(stage.flow) as (client, relay):
        remote = await client.open_workspace(stage.flow.directory())
        config = remote.config
        (provider, *_) = await config.providers()
        await config.set("options.progress", value=True)
        assert (await config.show()).options.progress is True
        await config.remove("options.progress")
        assert (await config.show()).options.progress is not True
        await config.set_compact(on=True, scope="user")
        assert (await config.show()).options.tui.compact_mode
        model = SelectedModel(provider.models[0].id, provider.id)
        await config.select_model(model, "small")
        assert (await config.show()).models["small"] == model
        await config.set_provider_key(provider.id, "a key")
        await config.set_provider_key(provider.id, OAuthToken("a token", "another"), scope="user")
        assert not (await config.import_copilot()).success
        assert await refused(config.refresh_oauth(provider.id)) == 404
        return relay.asked()


async def drive_project(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        project = (await client.open_workspace(flow.directory())).project
        assert not await project.needs_init()
        await project.init()
        assert "AGENTS.md" in await project.init_prompt()
        return relay.asked()


async def drive_skills(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        skills = (await client.open_workspace(flow.directory())).skills
        assert await skills.all() == []
        assert await refused(skills.read("none")) == 404
        return relay.asked()


async def drive_lsp(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        lsps = (await client.open_workspace(flow.directory())).lsps
        assert await lsps.states() == {}
        assert await refused(lsps.diagnostics("a/b")) == 404
        await lsps.start("main.py")
        await lsps.stop()
        return relay.asked()


async def drive_mcp(folder: Path) -> Asked:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        mcp = (await client.open_workspace(flow.directory())).mcp
        assert await mcp.states() == {}
        assert await mcp.pending_auth() == []
        assert await mcp.auth_url("a&b") == ""
        assert await refused(mcp.authenticate("none")) == 404
        for refresh in (mcp.refresh_tools, mcp.refresh_prompts, mcp.refresh_resources):
            await refresh("none")
        assert await refused(mcp.read_resource("none", "file:///a")) == 404
        assert await mcp.prompts() == []
        assert await refused(mcp.fill_prompt("none", "greet", {"name": "you"})) == 404
        for switch in (mcp.enable_docker, mcp.disable_docker):
            assert await refused(switch()) == 501
        return relay.asked()


DRIVES: dict[str, Callable[[Path], Awaitable[Asked]]] = {
    "system": drive_system,
    "workspaces": drive_workspaces,
    "sessions": drive_sessions,
    "files": drive_files,
    "agent": drive_agent,
    "runs": drive_runs,
    "asks": drive_asks,
    "agents": drive_agents,
    "mail": drive_mail,
    "processes": drive_processes,
    "stats": drive_stats,
    "config": drive_config,
    "project": drive_project,
    "skills": drive_skills,
    "lsp": drive_lsp,
    "mcp": drive_mcp,
}
# These are the interface about itself, for a browser and for makers of other clients.
FOR_OTHERS = {"documents"}


@contract("CLIENT-1")
@pytest.mark.parametrize("noun", [noun for noun in BY_NOUN if noun not in FOR_OTHERS])
async def test_every_route_of_a_noun_has_a_method_of_the_client(tmp_path: Path, noun: str) -> None:
    asked = routes_of(await DRIVES[noun](tmp_path), ROUTES)
    assert {(route.method, route.path) for route in BY_NOUN[noun]} - asked == set()


async def test_a_request_is_given_up_after_the_time_its_answer_may_take(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        path = stage.remote.path(f"/agent/sessions/{stage.session_id}/shell")
        with pytest.raises(TimeoutError):
            await stage.remote.client.request(
                "POST", path, ShellCommand("sleep 60"), timeout_s=0.05
            )
