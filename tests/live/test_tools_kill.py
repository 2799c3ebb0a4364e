"""Real tools of a real server, and `kill -9`: nothing is left running, and the record is true."""

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
from culm.tools.process.exit_text import exit_text
from culm.tools.process.output import FILE_BYTES_MAX
from culm.wire.agent import Prompt
from culm.wire.asks import Ask, PermissionGrant, PermissionRef, PermissionRequest, Resolved
from culm.wire.codec import Json
from culm.wire.messages import ToolResult, ToolResultPart
from culm.wire.processes import Process
from tests.live.harness import RESUME_S, ProcessServer, make_directory
from tests.live.run_drive import Watch, open_agent, open_watch, outcomes, questions, script
from tests.processes.test_escapes import DAEMON, parent_of
from tests.processes.yard import gone, is_alive
from tests.support import contract

# Each has a child of its own, which leaves its session and does not hear SIGTERM.
ESCAPING = "setsid sh -c 'trap \"\" TERM; sleep 100' & "
JOB = {"command": f"{ESCAPING} echo job; sleep 100", "run_in_background": True}
CALL = {"command": f"{ESCAPING} echo call; sleep 100"}
DEAF = f"trap '' TERM; python3 -c '{DAEMON}' > daemon; while :; do sleep 100; done"
GROWTH_BYTES_MAX = FILE_BYTES_MAX // 2  # Not even what the file keeps is in memory.


def bash(call_id: str, /, **arguments: Json) -> ScriptedCall:
    return ScriptedCall(name="bash", id=call_id, input=arguments)


@dataclass(frozen=True, slots=True)
class Desk:
    """A client at a server, with one session."""

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
        said = [(one.run_id, one.error) for one in self.watch.completes()]
        assert said == [(run_id, "")], self.server.said()

    async def processes(self) -> list[Process]:
        return await self.remote.client.ask("GET", self.remote.path("/processes"), list[Process])

    async def running(self, wanted: Mapping[str, int]) -> dict[str, Process]:
        """Wait until each of these calls has so many processes; returns them by call."""
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
        """What each call came to, by its id; each has one."""
        messages = await self.remote.messages(self.session_id)
        found = [p.data for m in messages for p in m.parts if isinstance(p, ToolResultPart)]
        by_id = {result.tool_call_id: result for result in found}
        assert len(by_id) == len(found)
        return by_id


@asynccontextmanager
async def open_desk(
    folder: Path, model: ModelServer, session_id: SessionId | None = None, cursor: str = ""
) -> AsyncGenerator[Desk]:
    async with open_agent(folder, model) as (server, client):
        remote = await client.open_workspace(make_directory(folder))
        session_id = session_id or (await remote.create_session("s")).id
        async with open_watch(remote, cursor) as watch:
            yield Desk(server, remote, session_id, watch)


def all_pids(*processes: Process) -> set[int]:
    """What runs, and who watches it: the warden of each, and the keeper of all."""
    watching = {parent_of(process.pid) for process in processes}
    return watching | set(map(parent_of, watching)) | {p for one in processes for p in one.pids}


async def number_in(file: Path) -> int:
    """Wait until a command has written a number."""
    async with asyncio.timeout(RESUME_S):
        while not file.exists() or not file.read_text().endswith("\n"):
            await asyncio.sleep(0.02)
    return int(file.read_text())


@contract("EXC-9")
async def test_what_tools_had_started_ends_with_a_killed_server_and_the_record_says_so(
    folder: Path,
) -> None:
    play = script(Reply(calls=[bash("job", **JOB), bash("call", **CALL)]), Reply(text="I see."))
    async with open_model_server(play) as model:
        async with open_desk(folder, model) as desk:
            await desk.prompt("killed")
            found = await desk.running({"job": 4, "call": 4})
            assert {one.kind for one in found.values()} == {"job", "call"}
            pids = all_pids(*found.values())
            assert len(pids) == 4 + 4 + 2 + 1
            await desk.server.kill()
            await gone(*pids)

        async with open_desk(folder, model, desk.session_id) as again:
            assert await outcomes(again.remote, ["killed"]) == ["interrupted"]
            assert await again.processes() == []
            await again.prompt("next")
            await again.end("next")
            results = await again.results()
        assert "It goes on in the background as job-1;" in results["job"].content
        assert results["call"].content == interrupted_call_text("started", "ask")
        assert {name: result.is_error for name, result in results.items()} == {
            "job": False, "call": True,
        }  # fmt: skip
        read = {m.tool_call_id: m.content for m in questions(model)[-1].messages if m.tool_call_id}
        assert read == {name: result.content for name, result in results.items()}


async def test_a_killed_keeper_costs_what_it_held_and_nothing_else(folder: Path) -> None:
    after = [
        ScriptedCall(name="job_output", id="output", input={"shell_id": "job-1", "wait": True}),
        bash("next", command="echo on"),
    ]
    play = script(
        Reply(calls=[bash("job", **JOB), bash("call", **CALL)]),
        Reply(calls=after),
        Reply(text="I see."),
    )
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        await desk.prompt("run")
        found = await desk.running({"job": 4, "call": 4})
        pids = all_pids(*found.values())
        os.kill(parent_of(parent_of(found["call"].pid)), signal.SIGKILL)
        await desk.end("run")
        await gone(*pids)
        assert await outcomes(desk.remote, ["run"]) == ["end_turn"]
        assert await desk.processes() == []
        results = await desk.results()
    lost = exit_text(ProcessExit(None, lost=True))
    assert "died" in lost
    assert [results[name].content.endswith(lost) for name in ("call", "output")] == [True, True]
    assert results["next"].content == "on"
    assert [results[name].is_error for name in ("job", "call", "next")] == [False, True, False]


async def test_the_result_of_a_killed_command_names_the_signal(folder: Path) -> None:
    play = script(Reply(calls=[bash("call", command="echo up; sleep 100")]), Reply(text="I see."))
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        await desk.prompt("run")
        (process,) = (await desk.running({"call": 2})).values()
        os.kill(process.pid, signal.SIGKILL)
        await desk.end("run")
        await gone(*process.pids)
        (result,) = (await desk.results()).values()
    words = f"up\n{exit_text(ProcessExit(None, signal.SIGKILL, swept=1))}\n{LEFT_HINT}"
    assert "SIGKILL" in words
    assert (result.content, result.is_error) == (words, False)


@contract("EXC-5", "EXC-9", "EXC-16")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
async def test_what_was_asked_before_the_server_ended_is_answered_after_by_another_and_done_once(
    folder: Path, number: signal.Signals
) -> None:
    job = bash("job", command="sleep 100", run_in_background=True)
    call = bash("call", command="echo done >> effects")
    play = script(Reply(calls=[job, call]), Reply(text="So."))
    effects = make_directory(folder) / "effects"
    async with open_model_server(play) as model:
        async with open_desk(folder, model) as desk:
            start = (await desk.remote.snapshot()).cursor
            await desk.prompt(
                "waiting", [{"tool": "bash", "command": "sleep *", "decision": "allow"}]
            )
            await desk.watch.until(lambda: "ask_changed" in [t.type for t in desk.watch.told])
            (asked,) = await desk.asks()
            (running,) = await desk.processes()
            pids = all_pids(running)
            await desk.server.end(number)
            await gone(*pids)
        assert not effects.exists()

        async with open_desk(folder, model, desk.session_id, start) as again:
            (listed,) = await again.asks()
            assert listed == asked
            by = again.remote.client.id
            assert by != desk.remote.client.id
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


async def test_a_cancel_ends_what_does_not_want_to_end_and_what_got_away(folder: Path) -> None:
    play = script(Reply(calls=[bash("call", command=DEAF)]))
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        await desk.prompt("run")
        daemon = await number_in(make_directory(folder) / "daemon")
        (process,) = (await desk.running({"call": 3})).values()
        assert daemon in process.pids
        assert (process.kind, process.session_id, process.run_id) == (
            "call", desk.session_id, "run",
        )  # fmt: skip
        assert process.command == DEAF
        assert process.age_s > 0
        assert process.rss_bytes > 1 << 20
        await desk.remote.cancel(desk.session_id)
        await desk.watch.until_complete("run", wait_s=RESUME_S)
        assert [pid for pid in process.pids if is_alive(pid)] == []
        assert await desk.processes() == []
        assert await outcomes(desk.remote, ["run"]) == ["canceled"]


def memory_bytes(pid: int, field: str) -> int:
    """A size from what the system says of a process."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


async def test_a_gigabyte_of_output_costs_the_server_little_memory_and_is_kept_in_a_file(
    folder: Path,
) -> None:
    block = "b'y\\n' * (1 << 19)"
    flood = f'python3 -c "import os; [os.write(1, {block}) for _ in range(1 << 10)]"; echo end'
    play = script(Reply(calls=[bash("call", command=flood)]), Reply(text="So."))
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        pid = desk.server.process.pid
        before = memory_bytes(pid, "VmRSS")
        await desk.prompt("run")
        await desk.end("run")
        assert memory_bytes(pid, "VmHWM") - before < GROWTH_BYTES_MAX
        (result,) = (await desk.results()).values()
        assert result.content.endswith("y\nend")
        assert len(result.content) < 40_000
        named = re.search(
            rf"first {FILE_BYTES_MAX:,} bytes of the output are in (\S+) …\]", result.content
        )
        assert named is not None
        assert Path(named[1]).stat().st_size == FILE_BYTES_MAX
