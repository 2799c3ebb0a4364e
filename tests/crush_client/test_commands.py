"""Processes of a Crush client: the agent's commands, the user's own, and `crush run`."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.permission.gate import HEADLESS_WAIT_S
from culm.testing.script import Reply
from culm.wire.workspaces import Process
from tests.crush_client.agents import (
    Agent,
    assert_no_errors,
    conversation,
    events_of,
    open_agent,
    open_attached,
    until_turn_ended,
)
from tests.crush_client.api import StatusError
from tests.crush_client.client import Tui
from tests.crush_client.run import RunResult, crush_run
from tests.crush_client.test_dialogs import calling, dialog, dialogs, writing
from tests.crush_client.types import part_type
from tests.flow.drive import until

METADATA = ("start_time", "end_time", "output", "description", "working_directory")


async def processes(agent: Agent, tui: Tui) -> list[Process]:
    return await agent.flow.workspace(tui.api.workspace_id).toolbox.processes()


async def test_allowed_command_runs_and_its_result_has_crush_metadata(
    tmp_path: Path,
) -> None:
    command = "echo here > made; cat made; exit 3"
    replies = calling("bash", "call_1", command=command, description="Make"), Reply(text="Made.")
    async with (
        open_agent(tmp_path, "unix", *replies, has_real_tools=True) as agent,
        open_attached(agent) as tui,
    ):
        assert await tui.send_prompt("make it")
        await dialog(tui, "call_1")
        assert await tui.answer_permission("allow")
        await until_turn_ended(tui)
        (result,) = [
            part
            for event in events_of(tui)
            if event.type == "message"
            for part in event.payload.records("parts")
            if part_type(part) == "tool_result"
        ]
        metadata = json.loads(result.text("metadata"))
        assert set(METADATA) <= metadata.keys()
        assert metadata["working_directory"] == str(tmp_path / "project")
        assert (metadata["description"], metadata["output"].rstrip()) == (
            "Make",
            "here\nExit code 3",
        )
        assert isinstance(metadata["start_time"], int)
        assert result.text("content").endswith("Exit code 3")
        assert (tmp_path / "project" / "made").read_text() == "here\n"
        assert_no_errors(tui)


async def test_user_command_needs_no_permission_and_is_kept_in_the_session(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(text="I see."), has_real_tools=True) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        command = "echo $COLUMNS >&2; echo o; exit 3"
        assert await tui.shell(command) == ("118\no\n", 3)
        (message,) = [event.payload for event in events_of(tui) if event.type == "message"]
        (part,) = [p for p in message.records("parts") if part_type(p) == "shell_command"]
        assert message.text("role") == "user"
        assert part.values == {"command": command, "output": "118\no\n", "exit_code": 3}
        assert await tui.sessions.load(tui.screen.session_id)
        assert [role for role, *_ in conversation(tui)] == ["user"]
        assert dialogs(tui) == []
        with pytest.raises(StatusError, match=r"^status code 400$"):
            await tui.shell(" ")
        assert await tui.send_prompt("what was that?")
        await until_turn_ended(tui)
        request = agent.model.requests[await agent.model_request() - 1]
        assert b"echo $COLUMNS" in request.raw
        assert_no_errors(tui)


async def test_user_command_ends_when_its_request_is_closed(tmp_path: Path) -> None:
    async with (
        open_agent(tmp_path, "unix", has_real_tools=True) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(tui.shell("mkfifo f; echo > begun; cat f"), name="shell")
            await until(lambda: (tmp_path / "project" / "begun").exists())
            (process,) = await processes(agent, tui)
            assert (process.kind, process.session_id) == ("shell", tui.screen.session_id)
            running.cancel()
        while await processes(agent, tui):
            await asyncio.sleep(0.001)
        assert [event for event in events_of(tui) if event.type == "message"] == []
        assert_no_errors(tui)


# --- `crush run`, which answers no dialogs


async def test_headless_run_is_denied_permission_and_continues(tmp_path: Path, kind: str) -> None:
    replies = writing(1), Reply(text="I may not.")
    async with (
        open_agent(tmp_path, kind, *replies, has_real_tools=True) as agent,
        open_attached(agent) as idle,  # It has no open session, so nobody can be asked there.
    ):
        ended = await crush_run("write it", agent.project, agent.startup)
        assert ended == RunResult("I may not.")
        last = agent.model.requests[-1].raw
        assert b"this needs a person's permission, and nobody can be asked" in last
        assert b'"name":"question"' not in last  # Nobody would answer.
        assert b'"name":"write"' in last
        assert dialogs(idle) == []
        assert list((tmp_path / "project").iterdir()) == []
        assert_no_errors(idle)


@pytest.mark.parametrize("action", ["allow", "deny", ""])
async def test_headless_run_with_an_attached_tui_waits_for_its_answer(
    tmp_path: Path, action: str
) -> None:
    replies = writing(1), Reply(text="Done.")
    async with (
        open_agent(tmp_path, "unix", *replies, has_real_tools=True) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        await tui.sessions.load(tui.screen.session_id)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(crush_run("write it", agent.project, agent.startup))
            await dialog(tui, "call_1")
            if action:
                assert await tui.answer_permission(action)
            else:
                agent.flow.clock.advance(HEADLESS_WAIT_S)
                await tui.until(lambda: tui.screen.permission is None)
        assert running.result() == RunResult("Done." if action == "allow" else "")
        assert (tmp_path / "project" / "x1").exists() is (action == "allow")
        closing = "granted call_1" if action == "allow" else "denied call_1"
        assert dialogs(tui) == ["waits call_1", "asks call_1", closing]
        assert_no_errors(tui)
