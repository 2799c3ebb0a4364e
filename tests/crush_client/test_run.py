"""`crush run`: aborts as documented while there is no agent, and knows how a run ends."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.crush_client.api import Api, CallError, StatusError
from tests.crush_client.client import open_tui
from tests.crush_client.events import parse_line
from tests.crush_client.lines import EVENTS, SESSION, TURN, line
from tests.crush_client.run import (
    NO_PROVIDERS,
    READY_TRIES,
    Ended,
    RunHung,
    crush_run,
    on_run_event,
    prompt_and_watch,
    retire,
    wait_ready,
    watch,
)
from tests.crush_client.servers import (
    Pauses,
    open_script,
    project,
    read_request,
    startup_for,
)
from tests.crush_client.sessions import create_session
from tests.crush_client.startup import create_workspace, new_id
from tests.crush_client.transport import Transport, parse_host
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S

RUN = "3b1c1a52-1111-4222-8333-444455556666"


@asynccontextmanager
async def registered(flow: FlowServer) -> AsyncGenerator[Api]:
    """A client that got past the check for a provider."""
    api = Api(Transport(parse_host(flow.url)), new_id())
    async with asyncio.timeout(WAIT_S):
        await create_workspace(api, project(flow), startup_for(flow.url, flow.folder))
        try:
            yield api
        finally:
            await retire(api)
            await api.transport.aclose()


# --- against the real server


async def test_a_run_without_an_enabled_provider_aborts_and_leaves_nothing_behind(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        ended = await crush_run("hi", project(flow), startup_for(flow.url, flow.folder))
    assert ended == Ended(error=NO_PROVIDERS)
    assert flow.server.registry.list() == []


async def test_a_run_beside_a_tui_leaves_the_tui_its_workspace(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        await crush_run("hi", project(flow), startup)
        await tui.polling.agent()
        assert (tui.calls.log, tui.events.connections) == ([], 1)


async def test_a_run_initialises_the_agent_before_it_prompts(flow: FlowServer) -> None:
    async with registered(flow) as api:
        assert await api.call(37, {"interactive": False}) is None


async def test_a_run_waits_for_the_agent_30_s_and_gives_up(flow: FlowServer) -> None:
    pauses = Pauses()
    async with registered(flow) as api:
        with pytest.raises(CallError, match="timed out"):
            await wait_ready(api, pauses)
    assert pauses.asked == [0.2] * READY_TRIES


async def test_a_prompt_of_a_run_is_refused_while_there_is_no_agent(flow: FlowServer) -> None:
    async with registered(flow) as api:
        session = await create_session(api, "non-interactive")
        refused = r"^status code 400: agent coordinator not initialized$"
        with pytest.raises(StatusError, match=refused):
            await prompt_and_watch(api, session.text("id"), "hi")


# --- how a run ends


def complete(**fields: object) -> str:
    return line("run_complete", "updated", {"session_id": SESSION, "run_id": RUN, **fields})


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        (EVENTS["run_complete"], Ended("There are 3 files.")),
        (complete(message_id="", text="unseen"), Ended()),
        (complete(message_id="M"), Ended()),
        (complete(message_id="M", error="boom"), Ended(error="agent run failed: boom")),
        (complete(error="context canceled", cancelled=True), Ended()),
        (EVENTS["error"], Ended(error="agent error: model provider not configured")),
        (
            line("agent_event", "created", {"type": "error", "error": "e", "session_id": SESSION}),
            Ended(error="agent error: e"),
        ),
        (complete(run_id="another", message_id="M", text="x"), None),
        (line("run_complete", "updated", {"session_id": SESSION, "message_id": "M"}), None),
        (EVENTS["agent_finished"], None),
        (
            line("agent_event", "created", {"type": "error", "error": "e", "session_id": "other"}),
            None,
        ),
        *((told, None) for told in TURN),
    ],
)
def test_a_run_ends_by_its_own_run_complete_or_error_and_by_nothing_else(
    told: str, ended: Ended | None
) -> None:
    event = parse_line(told.encode())
    assert event is not None
    assert on_run_event(event, RUN, SESSION) == ended


async def watched(folder: Path, answer: bytes) -> Ended:
    """What a run makes of a stream that says this and ends."""

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


async def test_a_run_prints_the_text_of_its_run_complete(tmp_path: Path) -> None:
    lines = "".join(f"{told}\n" for told in (*TURN, EVENTS["run_complete"]))
    assert await watched(tmp_path, HEAD + b"\r\n" + lines.encode()) == Ended("There are 3 files.")


async def test_a_run_whose_stream_ends_is_over_with_status_0_and_no_output(tmp_path: Path) -> None:
    assert await watched(tmp_path, HEAD + b"\r\n" + TURN[0].encode()) == Ended()


async def test_a_run_whose_stream_is_truncated_hangs_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunHung):
        await watched(tmp_path, HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n")


@pytest.mark.parametrize("status", [404, 500])
async def test_a_run_releases_on_any_failure_of_its_retiring(tmp_path: Path, status: int) -> None:
    heard: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for code in (status, 200):
            heard.append((await read_request(reader)).decode().partition(" HTTP")[0])
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % code)

    async with open_script(tmp_path, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        api.workspace_id = "w"
        await retire(api)
        await api.transport.aclose()
    assert heard == ["DELETE /v1/clients/c", "DELETE /v1/workspaces/w?client_id=c"]
