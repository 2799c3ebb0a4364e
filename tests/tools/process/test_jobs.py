"""Background jobs: reading, waiting, killing, and the events that end them."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.bash import BACKGROUND_LOOK_S, FOREGROUND_S
from culm.tools.files.paths import WorkspacePaths
from culm.tools.job_output import WAIT_S as JOB_WAIT_S
from culm.tools.process import jobs
from culm.tools.process.jobs import open_jobs
from tests.support import WAIT_S, FakeClock, contract
from tests.tools.command_harness import CommandHarness, make_command_harness, open_command_harness

SERVER = "echo begun; echo $$ > pid; while read line; do echo got $line; done <> fifo"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def harness(tmp_path: Path, clock: FakeClock) -> AsyncGenerator[CommandHarness]:
    async with open_command_harness(tmp_path, clock) as harness:
        yield harness


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/cwd").exists()


async def start_job(
    harness: CommandHarness, clock: FakeClock, session_id: str = "s1", **more: object
) -> CallResult:
    """Start a job that echoes what is written into `fifo`; return once it has begun."""
    fifo = harness.path / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    harness.live_output.clear()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            harness.call("bash", session_id, command=SERVER, description="Serve", **more)
        )
        await harness.wait_for_output("begun", clock)
        await harness.advance_until_done(call, clock, BACKGROUND_LOOK_S)
    return call.result()


async def output_of(harness: CommandHarness, *output: str, session_id: str = "s1") -> CallResult:
    """Wait until job-1 has printed all of `output`, then read it."""
    async with asyncio.timeout(WAIT_S):
        job = harness.jobs.find("job-1")
        assert job is not None
        while not all(word in job.output.text() for word in output):
            await asyncio.sleep(0.005)
    return await harness.call("job_output", session_id, shell_id="job-1")


async def test_a_job_is_started_read_and_killed(harness: CommandHarness, clock: FakeClock) -> None:
    result = await start_job(harness, clock, run_in_background=True)
    assert result.content == (
        "begun\nIt goes on in the background as job-1; job_output reads what it puts out, "
        "job_kill ends it."
    )
    about = msgspec.json.decode(result.metadata)
    assert (about["background"], about["shell_id"], about["output"]) == (True, "job-1", "begun")

    assert (await output_of(harness)).content == "(no output since you last looked)\nStill running"
    (harness.path / "fifo").write_text("a\nb\n")
    output = await output_of(harness, "got a", "got b")
    where = {"working_directory": str(harness.path), "done": False}
    job = {"shell_id": "job-1", "command": SERVER, "description": "Serve"}
    assert output.content == "got a\ngot b\nStill running"
    assert msgspec.json.decode(output.metadata) == {**job, **where}
    other = await output_of(harness, session_id="s2")
    assert other.content == "begun\ngot a\ngot b\nStill running"

    pid = int((harness.path / "pid").read_text())
    killed = await harness.call("job_kill", shell_id="job-1")
    assert killed.content == "job-1 was ended, and everything it had started."
    assert msgspec.json.decode(killed.metadata) == job
    assert not is_running(pid)
    ending = "Ended by signal 15 (SIGTERM)"
    again = await harness.call("job_kill", shell_id="job-1")
    assert again.content == f"job-1 had ended already.\n{ending}"
    last = await harness.call("job_output", shell_id="job-1", wait=True)
    assert last.content == f"(no output since you last looked)\n{ending}"
    assert msgspec.json.decode(last.metadata)["done"] is True


async def test_a_slow_command_becomes_a_job_that_can_be_waited_for(
    harness: CommandHarness, clock: FakeClock
) -> None:
    os.mkfifo(harness.path / "fifo")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        text = "echo begun; read line < fifo; echo $line; exit 4"
        call = tasks.create_task(harness.call("bash", command=text))
        await harness.wait_for_output("begun", clock)
        assert (await harness.advance_until_done(call, clock, FOREGROUND_S)).content.startswith(
            "begun\nIt has not ended yet. It goes on in the background as job-1; "
        )
        wait = tasks.create_task(harness.call("job_output", shell_id="job-1", wait=True))
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(JOB_WAIT_S)
        assert (await wait).content == "(no output since you last looked)\nStill running"
        wait = tasks.create_task(harness.call("job_output", shell_id="job-1", wait=True))
        (harness.path / "fifo").write_text("on\n")
        assert (await wait).content == "on\nExit code 4"


async def test_a_background_command_that_ends_at_once_returns_its_result(
    harness: CommandHarness,
) -> None:
    result = await harness.call("bash", command="echo no; exit 1", run_in_background=True)
    assert result.content == "no\nExit code 1"
    assert "shell_id" not in msgspec.json.decode(result.metadata)


async def test_an_unknown_job_id_is_answered_with_the_list_of_jobs(
    harness: CommandHarness, clock: FakeClock
) -> None:
    none = CallResult("There is no job job-9. There are no background jobs.", is_error=True)
    assert await harness.call("job_output", shell_id="job-9") == none
    await start_job(harness, clock, run_in_background=True)
    some = CallResult(
        "There is no job job-9. The jobs of this workspace:\n"
        "job-1 (running): echo begun; echo $$ > pid; while read line; do echo got $lin…",
        is_error=True,
    )
    assert await harness.call("job_kill", shell_id="job-9") == some


async def test_killing_a_job_of_another_session_needs_approval(
    harness: CommandHarness, clock: FakeClock
) -> None:
    await start_job(harness, clock, run_in_background=True)
    own = await harness.plan("job_kill", shell_id="job-1")
    other = await harness.plan("job_kill", "s2", shell_id="job-1")
    assert isinstance(own, CallPlan)
    assert isinstance(other, CallPlan)
    assert other.action == ResolvedAction(
        "job_kill",
        "kill",
        description=f"End the background job job-1: {SERVER}",
        path=str(harness.path),
        params={"shell_id": "job-1", "command": SERVER},
        resolved={"shell_id": "job-1", "command": SERVER, "session": "s1"},
        is_free=False,
        coverage=("kill:job-1",),
        why="The job belongs to another session.",
    )
    assert own.action.is_free


async def test_jobs_end_with_their_session_and_their_workspace(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with open_command_harness(tmp_path, clock) as harness:
        pids: list[int] = []
        for session_id in ("s1", "s2"):
            await start_job(harness, clock, session_id, run_in_background=True)
            pids.append(int((harness.path / "pid").read_text()))
        await harness.jobs.end_sessions({"s1"})
        assert list(map(is_running, pids)) == [False, True]
    assert not any(map(is_running, pids))


@contract("EXC-19")
async def test_closing_a_workspace_leaves_the_jobs_of_another_running(
    harness: CommandHarness, clock: FakeClock, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    (harness.path / "sub").mkdir()
    async with open_jobs() as other_jobs:
        context = replace(harness.context, workspace_id="w2", paths=WorkspacePaths(other))
        second = make_command_harness(context, other_jobs, harness.env)
        await start_job(second, clock, run_in_background=True)
        await start_job(harness, clock, run_in_background=True)
        await second.bash("cd sub")
        assert await harness.bash("pwd") == str(harness.path)
        assert await second.bash("pwd") == str(other / "sub")
    pids = [int((path / "pid").read_text()) for path in (other, harness.path)]
    assert list(map(is_running, pids)) == [False, True]
    assert await harness.context.processes.end_all("w2") == []
    assert (await output_of(harness)).content.endswith("Still running")


async def test_running_and_finished_jobs_are_limited(
    harness: CommandHarness, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RUNNING_MAX", 1)
    monkeypatch.setattr(jobs, "FINISHED_MAX", 1)
    await start_job(harness, clock, run_in_background=True)
    refused = await harness.call("bash", command="sleep 60", run_in_background=True)
    assert refused.is_error
    assert refused.content.endswith("background jobs are running; end one with job_kill first.")
    await harness.call("job_kill", shell_id="job-1")
    await start_job(harness, clock, run_in_background=True)
    await harness.call("job_kill", shell_id="job-2")
    assert harness.jobs.find("job-1") is None
    assert harness.jobs.find("job-2") is not None
    await harness.jobs.end_sessions({"s1"})
    assert harness.jobs.find("job-2") is None
