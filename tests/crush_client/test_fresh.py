"""A Crush client on a fresh server without configuration, and selecting another model."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.model.offline.answers import INTRODUCTION
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from tests.crush_client.agents import (
    assert_no_errors,
    conversation,
    event_summaries,
    finishes,
    until_turn_ended,
)
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.golang import Record, record, records, to_json
from tests.crush_client.run import RunResult, crush_run
from tests.crush_client.servers import open_flow, project, startup_for
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S, contract, model_config

OFFLINE = {"model": "offline", "provider": "offline"}
DEMO = {"model": "demo-1", "provider": "demo"}


@asynccontextmanager
async def attached(flow: FlowServer) -> AsyncGenerator[Tui]:
    """Open a TUI with a connected stream, in a directory with two files."""
    (flow.directory() / "README.md").write_text("# Demo\n")
    (flow.directory() / "main.go").write_text("package main\n")
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        yield tui


def selected(config: Record) -> dict[str, object]:
    """The selected model for each role in a configuration."""
    return {kind: to_json(model) for kind, model in config.mapping("models").items()}


async def test_tui_on_a_fresh_server_shows_real_calls_and_their_answer(
    flow: FlowServer,
) -> None:
    prompt = "list the files and read README.md"
    async with attached(flow) as tui:
        assert "POST W/agent/init" in tui.sent  # It is configured, so no onboarding is shown.
        assert tui.screen.is_ready
        assert await tui.send_prompt(prompt)
        await until_turn_ended(tui)
        *before, (role, answer, finish) = conversation(tui)
        assert before == [("user", prompt, "stop"), ("assistant", INTRODUCTION.strip(), "tool_use")]
        assert (role, finish) == ("assistant", "end_turn")
        calls = [(call.name, call.input, call.state) for call in tui.screen.calls.values()]
        read = '{"file_path":"README.md"}'
        assert calls == [("ls", "{}", "done"), ("view", read, "done")]
        listed, viewed = (call.result for call in tui.screen.calls.values())
        assert "main.go" in listed
        assert "main.go" in answer
        assert "# Demo" in viewed
        assert "# Demo" in answer
        await tui.until(lambda: event_summaries(tui)[-2:] == ["agent_finished", "run_complete"])
        assert_no_errors(tui)


async def test_crush_run_on_a_fresh_server_prints_the_final_text(
    flow: FlowServer,
) -> None:
    (flow.directory() / "main.go").write_text("package main\n")
    async with asyncio.timeout(WAIT_S):
        startup = startup_for(flow.url, flow.folder)
        ended = await crush_run("how many files are there?", project(flow), startup)
    assert ended == RunResult("Found 1 file.")
    assert flow.server.registry.list() == []


async def test_tui_on_a_fresh_server_names_the_offline_model(
    flow: FlowServer,
) -> None:
    async with attached(flow) as tui:
        created, fetched = tui.calls.config, await tui.api.get(11)
        assert selected(created) == selected(fetched) == {"large": OFFLINE, "small": OFFLINE}
        info = await tui.api.get(35)
        assert to_json(info.record("model_cfg")) == OFFLINE
        assert info.record("model").text("name") == "culm offline (no LLM)"
        assert record(created.mapping("providers")["offline"]).text("name") == "Offline"
        assert created.mapping("recent_models") == {}  # It was not selected by a user.


@contract("INV-68")
async def test_model_selected_in_one_tui_answers_next_and_reaches_the_other(
    tmp_path: Path, kind: str
) -> None:
    async with open_model_server(Script([Reply(text="I am Demo One.")])) as model:
        chosen = {"models": {"large": OFFLINE, "small": OFFLINE}}
        config = {**model_config(model.url), **chosen}
        async with (
            open_flow(tmp_path, kind, config=config) as flow,
            attached(flow) as one,
            attached(flow) as other,
        ):
            assert await one.send_prompt("list the files")
            await until_turn_ended(one)
            assert model.requests == []

            await one.sessions.begin_new()
            listed = {p.text("id"): p for p in records(await one.api.call(13))}
            assert listed.keys() == {"offline", "demo"}
            (found,) = listed["demo"].records("models")
            assert (found.text("id"), found.text("name")) == ("demo-1", "Demo One")
            before = other.calls.workspace
            body = {"scope": 0, "model_type": "large", "model": DEMO}
            assert await one.calls.call_or_toast(49, body)
            assert await one.calls.call_or_toast(38, None)
            await other.until(lambda: other.calls.workspace is not before)
            assert "config_changed updated" in event_summaries(other)
            assert selected(other.calls.config) == {"large": DEMO, "small": OFFLINE}

            assert await one.send_prompt("who are you?")
            await one.until(lambda: finishes(one) == ["stop", "end_turn"])
            assert conversation(one)[-1] == ("assistant", "I am Demo One.", "end_turn")
            (seen,) = model.requests
            assert b'"model":"demo-1"' in seen.raw
            assert_no_errors(one, other)
