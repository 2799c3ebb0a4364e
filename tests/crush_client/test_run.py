"""`crush run`: one prompt to its end, and its other endings."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from tests.crush_client.agents import (
    assert_no_errors,
    conversation,
    event_summaries,
    events_of,
    finishes,
    open_agent,
    open_attached,
)
from tests.crush_client.api import Api, CallError, StatusError
from tests.crush_client.client import open_tui
from tests.crush_client.events import parse_line
from tests.crush_client.lines import EVENTS, SESSION, TURN, line
from tests.crush_client.run import (
    NO_PROVIDERS,
    READY_EVERY_S,
    READY_TRIES,
    RunHung,
    RunOptions,
    RunResult,
    crush_run,
    on_run_event,
    prompt_and_watch,
    retire,
    wait_ready,
    watch,
)
from tests.crush_client.servers import (
    Pauses,
    open_flow,
    open_script,
    project,
    read_request,
    startup_for,
)
from tests.crush_client.sessions import create_session
from tests.crush_client.startup import create_workspace, new_id
from tests.crush_client.transport import Transport, parse_host
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.support import WAIT_S

SELECTED = {"model": "demo-1", "provider": "demo"}
RUN = "3b1c1a52-1111-4222-8333-444455556666"


@asynccontextmanager
async def registered(flow: FlowServer) -> AsyncGenerator[Api]:
    """Open a client with a registered workspace, past the provider check."""
    api = Api(Transport(parse_host(flow.url)), new_id())
    async with asyncio.timeout(WAIT_S):
        await create_workspace(api, project(flow), startup_for(flow.url, flow.folder))
        try:
            yield api
        finally:
            await retire(api)
            await api.transport.aclose()


# --- real server without a model


async def test_run_without_an_enabled_provider_fails_and_leaves_no_workspace(
    bare: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        ended = await crush_run("hi", project(bare), startup_for(bare.url, bare.folder))
    assert ended == RunResult(error=NO_PROVIDERS)
    assert bare.server.registry.list() == []


async def test_run_initializes_the_agent_before_it_prompts(bare: FlowServer) -> None:
    async with registered(bare) as api:
        assert await api.call(37, {"interactive": False}) is None


async def test_run_waits_30_s_for_the_agent(bare: FlowServer) -> None:
    pauses = Pauses()
    async with registered(bare) as api:
        with pytest.raises(CallError, match="timed out"):
            await wait_ready(api, pauses)
    assert pauses.requested == [0.2] * READY_TRIES


async def test_prompt_of_a_run_without_a_model_is_refused(bare: FlowServer) -> None:
    async with registered(bare) as api:
        session = await create_session(api, "non-interactive")
        refused = r"^status code 400: agent coordinator not initialized$"
        with pytest.raises(StatusError, match=refused):
            await prompt_and_watch(api, session.text("id"), "hi")


# --- real server with a model


async def test_run_makes_the_calls_of_crush_and_prints_the_answer(
    tmp_path: Path, kind: str
) -> None:
    async with open_agent(tmp_path, kind, Reply(text="There are 3 files.")) as agent:
        sent: list[str] = []
        ended = await crush_run("list files", agent.project, agent.startup, sent=sent)
        assert ended == RunResult("There are 3 files.")
        assert sent == [
            "POST /v1/workspaces",
            "POST W/agent/init",
            "GET W/agent",
            "POST W/agent/update",
            "POST W/sessions",
            "GET W/events?client_id=C",
            "POST W/agent",
            "DELETE /v1/clients/C",
        ]


async def test_run_next_to_a_tui_keeps_the_workspace_of_the_tui(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        ended = await crush_run("hi", project(flow), startup)
        assert (bool(ended.output), ended.error) == (True, "")
        await tui.polling.agent()
        assert (tui.calls.log, tui.events.connections) == ([], 1)


async def test_run_polls_until_a_model_is_selected(tmp_path: Path, kind: str) -> None:
    async with (
        open_model_server(Script(otherwise=Reply(text="Now I can."))) as model,
        asyncio.timeout(WAIT_S),
    ):
        # The provider exists, but none of its models is known yet.
        demo = {"type": "openai-compat", "base_url": model.url}
        providers = {"offline": {"disable": True}, "demo": demo}
        async with open_flow(tmp_path, kind, config={"providers": providers}) as flow:
            startup = startup_for(flow.url, flow.folder)
            async with open_tui(project(flow), startup) as tui:
                pauses: list[float] = []

                async def sleep(seconds: float) -> None:
                    pauses.append(seconds)
                    if len(pauses) == 3:
                        body = {"scope": 0, "model_type": "large", "model": SELECTED}
                        await tui.api.call(49, body)

                ended = await crush_run("hi", project(flow), startup, sleep=sleep)
                assert (ended, pauses) == (RunResult("Now I can."), [READY_EVERY_S] * 3)


async def test_run_ends_with_the_error_of_its_model(tmp_path: Path, kind: str) -> None:
    async with open_agent(tmp_path, kind, Reply(status=401)) as agent:
        ended = await crush_run("hi", agent.project, agent.startup)
    # The `agent_event` comes before the `run_complete`; either ends the run.
    assert ended.output == ""
    assert ended.error.startswith("agent error: Authentication problem: ")
    assert "refused the key (401)" in ended.error


async def test_run_complete_has_the_error_of_the_model(tmp_path: Path, kind: str) -> None:
    async with open_agent(tmp_path, kind, Reply(status=401)) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await tui.until(lambda: "run_complete" in event_summaries(tui))
        (complete,) = [event for event in events_of(tui) if event.type == "run_complete"]
        run_id, session_id = complete.payload.text("run_id"), tui.screen.session_id
        ended = on_run_event(complete, run_id, session_id)
    assert ended is not None
    assert ended.error.startswith("agent run failed: Authentication problem: ")


async def test_interrupted_run_ends_with_an_error(tmp_path: Path, kind: str) -> None:
    async with open_agent(tmp_path, kind, Reply(deltas=["Once upon"], hold_after=1)) as agent:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(crush_run("story", agent.project, agent.startup))
            await agent.model_request()
            await agent.flow.server.registry.close()
        assert running.result().error.startswith("agent error: Interrupted")


async def test_canceled_run_prints_its_partial_text_and_succeeds(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon"], hold_after=1)) as agent,
        open_attached(agent) as tui,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(crush_run("story", agent.project, agent.startup))
        await agent.model_request()
        await agent.title_request()
        (session,) = await tui.sessions.pick()
        await tui.calls.attempt(40, sid=session.text("id"))
        assert await running == RunResult("Once upon")
        await tui.until(lambda: "run_complete cancelled" in event_summaries(tui))
        assert "error" not in event_summaries(tui)
        assert_no_errors(tui)


async def test_run_does_not_end_with_other_runs(tmp_path: Path, kind: str) -> None:
    replies = Reply(text="Mine.", hold_after=0), Reply(text="Of another."), Reply(status=401)
    async with (
        open_agent(tmp_path, kind, *replies) as agent,
        open_attached(agent) as tui,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(crush_run("mine", agent.project, agent.startup))
        request = await agent.model_request()
        for finish in ("end_turn", "error"):
            assert await tui.send_prompt("another")
            await tui.until(lambda finish=finish: finishes(tui)[-1:] == [finish])
        assert not running.done()
        agent.model.release(request)
        assert await running == RunResult("Mine.")
        assert_no_errors(tui)


async def test_two_runs_in_one_session_are_queued_and_print_their_own_answers(
    tmp_path: Path, kind: str
) -> None:
    replies = Reply(text="First.", hold_after=0), Reply(text="Second.")
    async with (
        open_agent(tmp_path, kind, *replies) as agent,
        open_attached(agent) as tui,
        asyncio.TaskGroup() as tasks,
    ):
        await tui.sessions.create()
        options = RunOptions(session=tui.screen.session_id)
        one = tasks.create_task(crush_run("one", agent.project, agent.startup, options=options))
        request = await agent.model_request()
        two = tasks.create_task(crush_run("two", agent.project, agent.startup, options=options))
        live = agent.flow.workspace(tui.api.workspace_id).runs
        await until(lambda: len(live.live()) == 2)
        await tui.polling.queue()
        assert tui.screen.queue == ["two"]
        agent.model.release(request)
        assert [await one, await two] == [RunResult("First."), RunResult("Second.")]
        await tui.until(lambda: len(tui.screen.items) == 4 and finishes(tui)[-1] == "end_turn")
        assert [text for _, text, _ in conversation(tui)] == ["one", "First.", "two", "Second."]
        assert_no_errors(tui)


async def test_run_continues_the_last_session_with_its_messages(tmp_path: Path, kind: str) -> None:
    replies = Reply(text="Forty-two."), Reply(text="Still forty-two.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await crush_run("the answer?", agent.project, agent.startup) == RunResult(
            "Forty-two."
        )
        options = RunOptions(continue_last=True)
        ended = await crush_run("really?", agent.project, agent.startup, options=options)
        assert ended == RunResult("Still forty-two.")
        assert len(await tui.sessions.pick()) == 1
        assert b"Forty-two." in agent.model.requests[-1].raw
        assert_no_errors(tui)


async def test_run_with_a_model_option_uses_that_model(tmp_path: Path, kind: str) -> None:
    async with open_agent(tmp_path, kind, Reply(text="I am another.")) as agent:
        options = RunOptions(model=("demo", "demo-2"))
        ended = await crush_run("who?", agent.project, agent.startup, options=options)
        assert ended == RunResult("I am another.")
        request = await agent.model_request()
        (seen,) = [seen for seen in agent.model.requests if seen.n == request]
        assert b'"model":"demo-2"' in seen.raw


# --- endings


def complete(**fields: object) -> str:
    return line("run_complete", "updated", {"session_id": SESSION, "run_id": RUN, **fields})


@pytest.mark.parametrize(
    ("event_line", "ended"),
    [
        (EVENTS["run_complete"], RunResult("There are 3 files.")),
        (complete(message_id="", text="unseen"), RunResult()),
        (complete(message_id="M"), RunResult()),
        (complete(message_id="M", error="boom"), RunResult(error="agent run failed: boom")),
        (complete(error="context canceled", cancelled=True), RunResult()),
        (EVENTS["error"], RunResult(error="agent error: model provider not configured")),
        (
            line("agent_event", "created", {"type": "error", "error": "e", "session_id": SESSION}),
            RunResult(error="agent error: e"),
        ),
        (complete(run_id="another", message_id="M", text="x"), None),
        (line("run_complete", "updated", {"session_id": SESSION, "message_id": "M"}), None),
        (EVENTS["agent_finished"], None),
        (
            line("agent_event", "created", {"type": "error", "error": "e", "session_id": "other"}),
            None,
        ),
        *((event_line, None) for event_line in TURN),
    ],
)
def test_run_ends_only_by_its_own_run_complete_or_error(
    event_line: str, ended: RunResult | None
) -> None:
    event = parse_line(event_line.encode())
    assert event is not None
    assert on_run_event(event, RUN, SESSION) == ended


async def watch_response(folder: Path, answer: bytes) -> RunResult:
    """The result of a run whose stream has this content and ends."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with open_script(folder, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        body = await api.subscribe()
        try:
            return await watch(body, RUN, SESSION)
        finally:
            await api.transport.drop(body)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


async def test_run_prints_the_text_of_its_run_complete(tmp_path: Path) -> None:
    lines = "".join(f"{event_line}\n" for event_line in (*TURN, EVENTS["run_complete"]))
    assert await watch_response(tmp_path, HEAD + b"\r\n" + lines.encode()) == RunResult(
        "There are 3 files."
    )


async def test_run_whose_stream_ends_has_status_0_and_no_output(tmp_path: Path) -> None:
    assert await watch_response(tmp_path, HEAD + b"\r\n" + TURN[0].encode()) == RunResult()


async def test_run_whose_stream_is_truncated_hangs_forever(tmp_path: Path) -> None:
    with pytest.raises(RunHung):
        await watch_response(tmp_path, HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n")


@pytest.mark.parametrize("status", [404, 500])
async def test_run_releases_if_its_retire_fails(tmp_path: Path, status: int) -> None:
    requests: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for code in (status, 200):
            requests.append((await read_request(reader)).decode().partition(" HTTP")[0])
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % code)

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        api.workspace_id = "w"
        await retire(api)
        await api.transport.aclose()
    assert requests == ["DELETE /v1/clients/c", "DELETE /v1/workspaces/w?client_id=c"]
