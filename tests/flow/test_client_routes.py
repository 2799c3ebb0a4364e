"""The client has a typed method for every route, and each does what its route documents."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.client.http import RequestRefused
from culm.ids import RunId
from culm.server.routes import BY_NOUN, ROUTES
from culm.testing.script import Reply
from culm.wire.agents import ChangeBudget, SendLetter, StartAgent
from culm.wire.asks import QuestionResponse
from culm.wire.config import OAuthToken, SelectedModel
from culm.wire.messages import full_text
from culm.wire.runs import Attachment, Limits, ShellRequest
from tests.flow.agents_harness import held, open_agents, talk
from tests.flow.asking import QuestionProbe, asking, batch_in, open_asking, request_in
from tests.flow.conftest import open_flow
from tests.flow.drive import UNKNOWN
from tests.flow.mail_harness import OUTSIDE, post_of
from tests.flow.probes import Probe, calling, script
from tests.flow.relay import Requests, open_relay, routes_of
from tests.flow.runs import open_runs
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def refused(request: Awaitable[object]) -> int:
    """The status of a refused request."""
    with pytest.raises(RequestRefused) as caught:
        await request
    return caught.value.status


async def drive_system(folder: Path) -> Requests:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        await client.health()
        assert (await client.version()).build_id.startswith("culm-")
        await client.open_workspace(flow.directory())
        assert await client.config() == {}
        assert await refused(client.shut_down()) == 409, "it hosts a workspace"
        await client.retire()
        assert await refused(client.open_workspace(flow.directory())) == 409, "retired for good"
        return relay.requests()


async def drive_workspaces(folder: Path) -> Requests:
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
        return relay.requests()


async def drive_sessions(folder: Path) -> Requests:
    async with open_runs(folder) as harness, open_relay(harness.flow) as (client, relay):
        remote = await client.open_workspace(harness.flow.directory())
        session = await remote.create_session("first")
        assert await remote.session(session.id) == session
        assert (await remote.rename_session(session.id, "second")).title == "second"
        await harness.received.complete(await harness.prompt("One.", session.id))
        harness.clock.advance(1)
        await harness.received.complete(await harness.prompt("Two."))
        roles = [message.role for message in await remote.messages(session.id)]
        assert roles == ["user", "assistant"]
        (last,) = await remote.messages(session.id, limit=1)
        (first,) = await remote.messages(session.id, limit=1, before=last.id)
        assert [first.role, last.role] == roles
        assert await remote.messages(session.id, before=first.id) == []
        texts = [full_text(message.parts) for message in await remote.user_messages()]
        assert texts == ["Two.", "One."]
        (only,) = await remote.user_messages(session.id)
        assert full_text(only.parts) == "One."
        await remote.delete_session(session.id)
        assert [one.id for one in await remote.sessions()] == [harness.session_id]
        return relay.requests()


async def drive_files(folder: Path) -> Requests:
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
        return relay.requests()


async def drive_agent(folder: Path) -> Requests:
    async with open_runs(folder, play=script(HELD)) as harness, open_relay(harness.flow) as given:
        client, relay = given
        remote = await client.open_workspace(harness.flow.directory())
        session_id = harness.session_id
        await remote.init_agent(interactive=True)
        await remote.update_agent()
        file = Attachment("/note.txt", "note.txt", "text/plain", b"a note")
        await remote.prompt(session_id, "First.", run_id="first", attachments=[file])
        await harness.received.text("Hello")
        assert "a note" in str(harness.sent(1)[-1].content)
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
        assert (await harness.received.complete("first")).cancelled
        await harness.until_idle()
        shown = await remote.shell(session_id, "echo seen", width=80)
        assert (shown.output.strip(), shown.exit_code) == ("seen", 0)
        await remote.summarize(session_id)
        assert (await harness.session()).summary_message_id
        await remote.compact(session_id)
        await harness.until_idle()
        assert {run.kind for run in await remote.runs(session_id)} == {"prompt", "summary"}
        return relay.requests()


async def drive_runs(folder: Path) -> Requests:
    async with open_runs(folder, play=script(HELD)) as harness, open_relay(harness.flow) as given:
        client, relay = given
        remote = await client.open_workspace(harness.flow.directory())
        for name in ("first", "next"):
            await remote.prompt(harness.session_id, name, run_id=name)
        await harness.received.text("Hello")
        assert [run.id for run in await remote.runs()] == ["next", "first"]
        assert [run.id for run in await remote.runs(harness.session_id, "queued")] == ["next"]
        assert await remote.runs(UNKNOWN) == []
        assert (await remote.edit_run("next", "Changed.")).prompt == "Changed."
        assert (await remote.run("next")).prompt == "Changed."
        assert await refused(remote.start_run("next")) == 409, "it waits, and is not held"
        assert (await remote.drop_run("next")).outcome == "canceled"
        assert (await remote.cancel_run("first")).result == "canceled"
        return relay.requests()


async def drive_asks(folder: Path) -> Requests:
    play = script(calling("look"), asking("Why?"), asking("And then?"))
    tools = (Probe("look", asks=True), QuestionProbe())
    async with open_asking(folder, play, *tools) as harness, open_relay(harness.flow) as given:
        client, relay = given
        remote = await client.open_workspace(harness.flow.directory())
        run_id = await harness.prompt("Look, and ask.")
        await request_in(harness.received)
        (ask,) = await remote.asks(harness.session_id)
        assert await remote.answer(ask, "allow_session")
        (allowed,) = await remote.asks(state="allowed")
        assert (allowed.request.id, allowed.by) == (ask.request.id, client.id)
        (grant,) = await remote.grants()
        assert grant.ask_id == ask.request.id
        await remote.remove_grant(grant.id)
        assert await remote.grants() == []
        batch = await batch_in(harness.received)
        assert [one.request for one in await remote.questions(harness.session_id)] == [batch]
        response = QuestionResponse(batch.questions[0].id, fill_in_text="Because.")
        assert await remote.answer_questions(batch.id, [response])
        assert await remote.cancel_questions((await batch_in(harness.received, 2)).id)
        states = {one.state for one in await remote.questions(state="all")}
        assert states == {"answered", "canceled"}
        await harness.received.complete(run_id)
        await remote.set_skip(on=True, session_id=harness.session_id)
        skipped = [await remote.is_skipped(one) for one in (harness.session_id, "")]
        assert skipped == [True, False]
        return relay.requests()


async def drive_agents(folder: Path) -> Requests:
    async with (
        open_agents(folder, talk("@ann", held("Ann "))) as harness,
        open_relay(harness.flow) as (client, relay),
    ):
        remote = await client.open_workspace(harness.flow.directory())
        ann = await remote.start_agent(StartAgent("@ann: go", limits=Limits(steps=5)))
        await harness.until_asked_by("@ann")
        assert [one.agent_id for one in await remote.agents()] == [ann.agent_id]
        assert await remote.agents(ann.agent_id) == []
        changed = await remote.set_budget(ann.agent_id, ChangeBudget(tokens=10_000))
        assert changed.budget == Limits(steps=5, tokens=10_000)
        assert (await remote.steer_agent(ann.agent_id, "Faster.")).run_id
        await remote.cancel_agent(ann.agent_id)
        assert (await remote.agent(ann.agent_id)).agent.outcome == "canceled"
        return relay.requests()


async def drive_mail(folder: Path) -> Requests:
    async with (
        open_agents(folder, talk("@")) as harness,
        open_relay(harness.flow) as (client, relay),
    ):
        remote = await client.open_workspace(harness.flow.directory())
        post_of(harness).make(OUTSIDE)
        letter = SendLetter(harness.session_id, "ask", "@you: what?", from_=OUTSIDE)
        sent = await remote.send_letter(letter)
        assert (await remote.letter(sent.letter_id)).to == harness.session_id
        reply = await remote.reply_to_letter(sent.letter_id, "That.", sender=harness.session_id)
        assert (reply.kind, reply.correlation_id) == ("reply", sent.letter_id)
        ids = {letter.letter_id for letter in await remote.letters(harness.session_id)}
        assert {sent.letter_id, reply.letter_id} <= ids
        await remote.ring(harness.session_id)
        await client.ring(str(harness.flow.directory()))
        assert await refused(client.ring("/not/known")) == 404
        await harness.until_idle()
        return relay.requests()


async def drive_processes(folder: Path) -> Requests:
    async with open_runs(folder) as harness, open_relay(harness.flow) as (client, relay):
        remote = await client.open_workspace(harness.flow.directory())
        async with asyncio.TaskGroup() as tasks:
            waits = tasks.create_task(remote.shell(harness.session_id, "sleep 60"))
            async with asyncio.timeout(WAIT_S):
                while not (found := await remote.processes()):
                    await asyncio.sleep(0.002)
            assert [one.kind for one in found] == ["shell"]
            waits.cancel()
        return relay.requests()


async def drive_tools(folder: Path) -> Requests:
    async with (
        open_runs(folder, tools=[Probe("look")]) as harness,
        open_relay(harness.flow) as (client, relay),
    ):
        remote = await client.open_workspace(harness.flow.directory())
        assert "look" in [tool.name for tool in await remote.tools()]
        return relay.requests()


async def drive_stats(folder: Path) -> Requests:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        remote = await client.open_workspace(flow.directory())
        assert (await remote.stats(days=7)).days == []
        return relay.requests()


async def drive_config(folder: Path) -> Requests:
    async with open_runs(folder) as harness, open_relay(harness.flow) as (client, relay):
        remote = await client.open_workspace(harness.flow.directory())
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
        return relay.requests()


async def drive_project(folder: Path) -> Requests:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        project = (await client.open_workspace(flow.directory())).project
        assert not await project.needs_init()
        await project.init()
        assert "AGENTS.md" in await project.init_prompt()
        return relay.requests()


async def drive_skills(folder: Path) -> Requests:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        skills = (await client.open_workspace(flow.directory())).skills
        assert await skills.all() == []
        assert await refused(skills.read("none")) == 404
        return relay.requests()


async def drive_lsp(folder: Path) -> Requests:
    async with open_flow(folder, "unix") as flow, open_relay(flow) as (client, relay):
        lsps = (await client.open_workspace(flow.directory())).lsps
        assert await lsps.states() == {}
        assert await refused(lsps.diagnostics("a/b")) == 404
        await lsps.start("main.py")
        await lsps.stop()
        return relay.requests()


async def drive_mcp(folder: Path) -> Requests:
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
        return relay.requests()


DRIVES: dict[str, Callable[[Path], Awaitable[Requests]]] = {
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
    "tools": drive_tools,
    "stats": drive_stats,
    "config": drive_config,
    "project": drive_project,
    "skills": drive_skills,
    "lsp": drive_lsp,
    "mcp": drive_mcp,
}
# Documentation of the interface, for browsers and for authors of other clients.
NOT_FOR_CLIENT = {"documents"}


@contract("CLIENT-1")
@pytest.mark.parametrize("noun", [noun for noun in BY_NOUN if noun not in NOT_FOR_CLIENT])
async def test_client_has_a_method_for_every_route_of_a_noun(tmp_path: Path, noun: str) -> None:
    asked = routes_of(await DRIVES[noun](tmp_path), ROUTES)
    assert {(route.method, route.path) for route in BY_NOUN[noun]} - asked == set()


async def test_request_fails_after_its_timeout(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        path = harness.remote.path(f"/agent/sessions/{harness.session_id}/shell")
        with pytest.raises(TimeoutError):
            await harness.remote.client.request(
                "POST", path, ShellRequest("sleep 60"), timeout_s=0.05
            )
