"""Real tools of a real server, and `kill -9`: no process is left, and results are correct."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.processes.base import ProcessExit
from culm.run.rules import interrupted_call_text
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.tools.bash import LEFT_HINT
from culm.tools.process.output import FILE_BYTES_MAX
from culm.tools.process.running import exit_text
from culm.wire.asks import Ask, PermissionGrant, PermissionRef, PermissionRequest, Resolved
from culm.wire.codec import Json
from culm.wire.messages import ToolResult, ToolResultPart
from culm.wire.runs import Prompt
from culm.wire.workspaces import Process
from tests.live.harness import RESUME_S, ProcessServer, make_directory
from tests.live.run_harness import Watch, open_agent, open_watch, outcomes, questions, script
from tests.processes.process_harness import is_alive, wait_until_gone
from tests.processes.test_escapes import DAEMON, parent_of
from tests.support import contract

# Each has a child that leaves its session and ignores SIGTERM.
ESCAPING = "setsid sh -c 'trap \"\" TERM; sleep 100' & "
JOB = {"command": f"{ESCAPING} echo job; sleep 100", "run_in_background": True}
CALL = {"command": f"{ESCAPING} echo call; sleep 100"}
UNKILLABLE = f"trap '' TERM; python3 -c '{DAEMON}' > daemon; while :; do sleep 100; done"
GROWTH_BYTES_MAX = FILE_BYTES_MAX // 2  # Not even the part that the file keeps is in memory.


def bash(call_id: str, /, **arguments: Json) -> ScriptedCall:
    return ScriptedCall(name="bash", id=call_id, input=arguments)


@dataclass(frozen=True, slots=True)
class ToolsHarness:
    """A client of a server, with one session."""

    server: ProcessServer
    remote: RemoteWorkspace
    session_id: SessionId
    watch: Watch

    async def prompt(self, run_id: str, approve: Json = "allow") -> None:
        body = Prompt(self.session_id, "Go.", run_id, interactive=True, approve=approve)
        await self.remote.client.request("POST", self.remote.path("/agent"), body)

    async def end(self, run_id: str) -> None:
        """Wait for a good end of a run."""
        await self.watch.until_complete(run_id, wait_s=RESUME_S)
        errors = [(one.run_id, one.error) for one in self.watch.completes()]
        assert errors == [(run_id, "")], self.server.output()

    async def processes(self) -> list[Process]:
        return await self.remote.client.ask("GET", self.remote.path("/processes"), list[Process])

    async def running(self, wanted: Mapping[str, int]) -> dict[str, Process]:
        """Wait until each of these calls has so many processes; return them by call."""
        async with asyncio.timeout(RESUME_S):
            while True:
                found = {process.tool_call_id: process for process in await self.processes()}
                if {call_id: len(one.pids) for call_id, one in found.items()} == wanted:
                    return found
                await asyncio.sleep(0.02)

    async def asks(self, state: str = "open") -> list[Ask[PermissionRequest]]:
        path = self.remote.path(f"/permissions/asks?state={state}")
        return await self.remote.client.ask("GET", path, list[Ask[PermissionRequest]])

    async def results(self) -> dict[str, ToolResult]:
        """Return the result of each call by its id, and assert that there is only one."""
        messages = await self.remote.messages(self.session_id)
        found = [p.data for m in messages for p in m.parts if isinstance(p, ToolResultPart)]
        by_id = {result.tool_call_id: result for result in found}
        assert len(by_id) == len(found)
        return by_id


@asynccontextmanager
async def open_tools_harness(
    folder: Path, model: ModelServer, session_id: SessionId | None = None, cursor: str = ""
) -> AsyncGenerator[ToolsHarness]:
    async with open_agent(folder, model) as (server, client):
        remote = await client.open_workspace(make_directory(folder))
        session_id = session_id or (await remote.create_session("s")).id
        async with open_watch(remote, cursor) as watch:
            yield ToolsHarness(server, remote, session_id, watch)


def all_pids(*processes: Process) -> set[int]:
    """Return the pids of processes, of their shims and of the supervisor."""
    watching = {parent_of(process.pid) for process in processes}
    return watching | set(map(parent_of, watching)) | {p for one in processes for p in one.pids}


async def number_in(file: Path) -> int:
    """Wait until a command has written a number."""
    async with asyncio.timeout(RESUME_S):
        while not file.exists() or not file.read_text().endswith("\n"):
            await asyncio.sleep(0.02)
    return int(file.read_text())


@contract("EXC-9")
async def test_commands_of_a_killed_server_end_and_are_recorded_as_interrupted(
    folder: Path,
) -> None:
    play = script(Reply(calls=[bash("job", **JOB), bash("call", **CALL)]), Reply(text="I see."))
    async with open_model_server(play) as model:
        async with open_tools_harness(folder, model) as harness:
            await harness.prompt("killed")
            found = await harness.running({"job": 4, "call": 4})
            assert {one.kind for one in found.values()} == {"job", "call"}
            pids = all_pids(*found.values())
            assert len(pids) == 4 + 4 + 2 + 1
            await harness.server.kill()
            await wait_until_gone(*pids)

        async with open_tools_harness(folder, model, harness.session_id) as again:
            assert await outcomes(again.remote, ["killed"]) == ["interrupted"]
            assert await again.processes() == []
            await again.prompt("next")
            await again.end("next")
            results = await again.results()
        assert "It goes on in the background as job-1;" in results["job"].content
        # Its output may have been shown just before the kill.
        reason = results["call"].content.removeprefix("call\n")
        assert reason == interrupted_call_text("started", "ask")
        assert {name: result.is_error for name, result in results.items()} == {
            "job": False, "call": True,
        }  # fmt: skip
        read = {m.tool_call_id: m.content for m in questions(model)[-1].messages if m.tool_call_id}
        assert read == {name: result.content for name, result in results.items()}


@contract("EXC-26")
async def test_output_shown_before_a_kill_is_in_the_result(folder: Path) -> None:
    count = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.03; done"
    play = script(Reply(calls=[bash("call", command=count)]), Reply(text="I see."))
    async with open_model_server(play) as model:
        async with open_tools_harness(folder, model) as harness:
            await harness.prompt("killed")
            await harness.watch.until(lambda: "line 20\n" in harness.watch.output_of("call"))
            await harness.server.kill()
        async with open_tools_harness(folder, model, harness.session_id) as again:
            assert await outcomes(again.remote, ["killed"]) == ["interrupted"]
            result = (await again.results())["call"]
            await again.prompt("next")
            await again.end("next")
    shown = harness.watch.output_of("call")
    assert result.is_error
    assert result.content.startswith(shown)
    printed, _, reason = result.content.partition("Interrupted")
    assert "Interrupted" + reason == interrupted_call_text("started", "ask")
    assert printed == "".join(f"line {n}\n" for n in range(1, printed.count("\n") + 1))
    read = {m.tool_call_id: m.content for m in questions(model)[-1].messages if m.tool_call_id}
    assert read == {"call": result.content}


async def test_killed_supervisor_loses_only_its_running_commands(folder: Path) -> None:
    after = [
        ScriptedCall(name="job_output", id="output", input={"shell_id": "job-1", "wait": True}),
        bash("next", command="echo on"),
    ]
    play = script(
        Reply(calls=[bash("job", **JOB), bash("call", **CALL)]),
        Reply(calls=after),
        Reply(text="I see."),
    )
    async with open_model_server(play) as model, open_tools_harness(folder, model) as harness:
        await harness.prompt("run")
        found = await harness.running({"job": 4, "call": 4})
        pids = all_pids(*found.values())
        os.kill(parent_of(parent_of(found["call"].pid)), signal.SIGKILL)
        await harness.end("run")
        await wait_until_gone(*pids)
        assert await outcomes(harness.remote, ["run"]) == ["end_turn"]
        assert await harness.processes() == []
        results = await harness.results()
    lost = exit_text(ProcessExit(None, lost=True))
    assert "died" in lost
    assert [results[name].content.endswith(lost) for name in ("call", "output")] == [True, True]
    assert results["next"].content == "on"
    assert [results[name].is_error for name in ("job", "call", "next")] == [False, True, False]


async def test_result_of_a_killed_command_names_the_signal(folder: Path) -> None:
    play = script(Reply(calls=[bash("call", command="echo up; sleep 100")]), Reply(text="I see."))
    async with open_model_server(play) as model, open_tools_harness(folder, model) as harness:
        await harness.prompt("run")
        (process,) = (await harness.running({"call": 2})).values()
        os.kill(process.pid, signal.SIGKILL)
        await harness.end("run")
        await wait_until_gone(*process.pids)
        (result,) = (await harness.results()).values()
    text = f"up\n{exit_text(ProcessExit(None, signal.SIGKILL, swept=1))}\n{LEFT_HINT}"
    assert "SIGKILL" in text
    assert (result.content, result.is_error) == (text, False)


@contract("EXC-5", "EXC-9", "EXC-16")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
async def test_ask_open_at_a_server_end_is_answered_later_and_done_once(
    folder: Path, number: signal.Signals
) -> None:
    job = bash("job", command="sleep 100", run_in_background=True)
    call = bash("call", command="echo done >> effects")
    play = script(Reply(calls=[job, call]), Reply(text="So."))
    effects = make_directory(folder) / "effects"
    async with open_model_server(play) as model:
        async with open_tools_harness(folder, model) as harness:
            start = (await harness.remote.snapshot()).cursor
            await harness.prompt(
                "waiting", [{"tool": "bash", "command": "sleep *", "decision": "allow"}]
            )
            await harness.watch.until(
                lambda: "ask_changed" in [t.type for t in harness.watch.events]
            )
            (asked,) = await harness.asks()
            (running,) = await harness.processes()
            pids = all_pids(running)
            await harness.server.end(number)
            await wait_until_gone(*pids)
        assert not effects.exists()

        async with open_tools_harness(folder, model, harness.session_id, start) as again:
            (listed,) = await again.asks()
            assert listed == asked
            by = again.remote.client.id
            assert by != harness.remote.client.id
            path = again.remote.path(f"/permissions/grant?client_id={by}")
            grant = PermissionGrant(PermissionRef(asked.request.id), "allow", asked.digest)
            answers = [
                await again.remote.client.ask("POST", path, Resolved, grant) for _ in range(2)
            ]
            assert [answer.resolved for answer in answers] == [True, False]
            await again.end("waiting")
            assert await outcomes(again.remote, ["waiting"]) == ["end_turn"]
            (answered,) = await again.asks("all")
            assert (answered.request.id, answered.state, answered.by) == (
                asked.request.id, "allowed", by,
            )  # fmt: skip
            results = await again.results()
        assert effects.read_text() == "done\n"
        assert "It goes on in the background as job-1;" in results["job"].content
        assert (results["call"].content, results["call"].is_error) == ("(no output)", False)


async def test_cancel_ends_commands_that_ignore_sigterm_or_daemonize(folder: Path) -> None:
    play = script(Reply(calls=[bash("call", command=UNKILLABLE)]))
    async with open_model_server(play) as model, open_tools_harness(folder, model) as harness:
        await harness.prompt("run")
        daemon = await number_in(make_directory(folder) / "daemon")
        (process,) = (await harness.running({"call": 3})).values()
        assert daemon in process.pids
        assert (process.kind, process.session_id, process.run_id) == (
            "call", harness.session_id, "run",
        )  # fmt: skip
        assert process.command == UNKILLABLE
        assert process.age_s > 0
        assert process.rss_bytes > 1 << 20
        await harness.remote.cancel(harness.session_id)
        await harness.watch.until_complete("run", wait_s=RESUME_S)
        assert [pid for pid in process.pids if is_alive(pid)] == []
        assert await harness.processes() == []
        assert await outcomes(harness.remote, ["run"]) == ["canceled"]


def memory_bytes(pid: int, field: str) -> int:
    """Return a size from the status of a process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


async def test_gigabyte_of_output_uses_little_memory_and_is_kept_in_a_file(
    folder: Path,
) -> None:
    block = "b'y\\n' * (1 << 19)"
    flood = f'python3 -c "import os; [os.write(1, {block}) for _ in range(1 << 10)]"; echo end'
    play = script(Reply(calls=[bash("call", command=flood)]), Reply(text="So."))
    async with open_model_server(play) as model, open_tools_harness(folder, model) as harness:
        pid = harness.server.process.pid
        before = memory_bytes(pid, "VmRSS")
        await harness.prompt("run")
        await harness.end("run")
        assert memory_bytes(pid, "VmHWM") - before < GROWTH_BYTES_MAX
        (result,) = (await harness.results()).values()
        assert result.content.endswith("y\nend")
        assert len(result.content) < 40_000
        named = re.search(
            rf"first {FILE_BYTES_MAX:,} bytes of the output are in (\S+) …\]", result.content
        )
        assert named is not None
        assert Path(named[1]).stat().st_size == FILE_BYTES_MAX
