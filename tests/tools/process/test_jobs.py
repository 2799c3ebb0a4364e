"""Background jobs: read, waited for, ended; and what ends them."""

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.bash import BACKGROUND_LOOK_S, FOREGROUND_S
from culm.tools.files.paths import WorkspacePaths
from culm.tools.job_output import WAIT_S as JOB_WAIT_S
from culm.tools.process import jobs
from culm.tools.process.jobs import open_jobs
from tests.support import WAIT_S, FakeClock, contract
from tests.tools.bench import Bench, make_bench, open_bench

SERVER = "echo begun; echo $$ > pid; while read line; do echo got $line; done <> fifo"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def bench(tmp_path: Path, clock: FakeClock) -> AsyncGenerator[Bench]:
    async with open_bench(tmp_path, clock) as bench:
        yield bench


def is_left(pid: int) -> bool:
    return Path(f"/proc/{pid}/cwd").exists()


async def started(
    bench: Bench, clock: FakeClock, session_id: str = "s1", **more: object
) -> CallResult:
    """A job that answers to what is written into `fifo`; told of once it has begun."""
    fifo = bench.path / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    bench.watched.clear()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            bench.call("bash", session_id, command=SERVER, description="Serve", **more)
        )
        await bench.heard("begun", clock)
        await bench.ended(call, clock, BACKGROUND_LOOK_S)
    return call.result()


async def output_of(bench: Bench, *said: str, session_id: str = "s1") -> CallResult:
    """Look at job-1 until it has said something new."""
    async with asyncio.timeout(WAIT_S):
        job = bench.jobs.find("job-1")
        assert job is not None
        while not all(word in job.output.text() for word in said):
            await asyncio.sleep(0.005)
    return await bench.call("job_output", session_id, shell_id="job-1")


async def test_a_job_is_started_read_and_killed(bench: Bench, clock: FakeClock) -> None:
    result = await started(bench, clock, run_in_background=True)
    assert result.content == (
        "begun\nIt goes on in the background as job-1; job_output reads what it puts out, "
        "job_kill ends it."
    )
    about = msgspec.json.decode(result.metadata)
    assert (about["background"], about["shell_id"], about["output"]) == (True, "job-1", "begun")

    assert (await output_of(bench)).content == "(no output since you last looked)\nStill running"
    (bench.path / "fifo").write_text("a\nb\n")
    said = await output_of(bench, "got a", "got b")
    where = {"working_directory": str(bench.path), "done": False}
    job = {"shell_id": "job-1", "command": SERVER, "description": "Serve"}
    assert said.content == "got a\ngot b\nStill running"
    assert msgspec.json.decode(said.metadata) == {**job, **where}
    other = await output_of(bench, session_id="s2")
    assert other.content == "begun\ngot a\ngot b\nStill running"

    pid = int((bench.path / "pid").read_text())
    killed = await bench.call("job_kill", shell_id="job-1")
    assert killed.content == "job-1 was ended, and everything it had started."
    assert msgspec.json.decode(killed.metadata) == job
    assert not is_left(pid)
    ending = "Ended by signal 15 (SIGTERM)"
    again = await bench.call("job_kill", shell_id="job-1")
    assert again.content == f"job-1 had ended already.\n{ending}"
    last = await bench.call("job_output", shell_id="job-1", wait=True)
    assert last.content == f"(no output since you last looked)\n{ending}"
    assert msgspec.json.decode(last.metadata)["done"] is True


async def test_a_command_that_takes_long_becomes_a_job_and_can_be_waited_for(
    bench: Bench, clock: FakeClock
) -> None:
    os.mkfifo(bench.path / "fifo")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        text = "echo begun; read line < fifo; echo $line; exit 4"
        call = tasks.create_task(bench.call("bash", command=text))
        await bench.heard("begun", clock)
        assert (await bench.ended(call, clock, FOREGROUND_S)).content.startswith(
            "begun\nIt has not ended yet. It goes on in the background as job-1; "
        )
        wait = tasks.create_task(bench.call("job_output", shell_id="job-1", wait=True))
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(JOB_WAIT_S)
        assert (await wait).content == "(no output since you last looked)\nStill running"
        wait = tasks.create_task(bench.call("job_output", shell_id="job-1", wait=True))
        (bench.path / "fifo").write_text("on\n")
        assert (await wait).content == "on\nExit code 4"


async def test_a_job_that_ends_at_once_is_told_of_at_once(bench: Bench) -> None:
    result = await bench.call("bash", command="echo no; exit 1", run_in_background=True)
    assert result.content == "no\nExit code 1"
    assert "shell_id" not in msgspec.json.decode(result.metadata)


async def test_an_unknown_job_is_answered_with_those_there_are(
    bench: Bench, clock: FakeClock
) -> None:
    none = CallResult("There is no job job-9. There are no background jobs.", is_error=True)
    assert await bench.call("job_output", shell_id="job-9") == none
    await started(bench, clock, run_in_background=True)
    some = CallResult(
        "There is no job job-9. The jobs of this workspace:\n"
        "job-1 (running): echo begun; echo $$ > pid; while read line; do echo got $lin…",
        is_error=True,
    )
    assert await bench.call("job_kill", shell_id="job-9") == some


async def test_a_session_ends_its_own_jobs_unasked_and_those_of_another_only_asked(
    bench: Bench, clock: FakeClock
) -> None:
    await started(bench, clock, run_in_background=True)
    own = await bench.plan("job_kill", shell_id="job-1")
    other = await bench.plan("job_kill", "s2", shell_id="job-1")
    assert isinstance(own, CallPlan)
    assert isinstance(other, CallPlan)
    assert other.action == ResolvedAction(
        "job_kill",
        "kill",
        description=f"End the background job job-1: {SERVER}",
        path=str(bench.path),
        params={"shell_id": "job-1", "command": SERVER},
        resolved={"shell_id": "job-1", "command": SERVER, "session": "s1"},
        is_free=False,
        coverage=("kill:job-1",),
        why="The job belongs to another session.",
    )
    assert own.action.is_free


async def test_jobs_end_with_their_session_and_with_their_workspace(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with open_bench(tmp_path, clock) as bench:
        pids: list[int] = []
        for session_id in ("s1", "s2"):
            await started(bench, clock, session_id, run_in_background=True)
            pids.append(int((bench.path / "pid").read_text()))
        await bench.jobs.end_session("s1")
        assert list(map(is_left, pids)) == [False, True]
    assert not any(map(is_left, pids))


@contract("EXC-19")
async def test_the_end_of_a_workspace_touches_no_job_and_no_directory_of_another(
    bench: Bench, clock: FakeClock, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    (bench.path / "sub").mkdir()
    async with open_jobs() as other_jobs:
        context = replace(bench.context, workspace_id="w2", inside=WorkspacePaths(other))
        second = make_bench(context, other_jobs, bench.env)
        await started(second, clock, run_in_background=True)
        await started(bench, clock, run_in_background=True)
        await second.bash("cd sub")
        assert await bench.bash("pwd") == str(bench.path)
        assert await second.bash("pwd") == str(other / "sub")
    pids = [int((path / "pid").read_text()) for path in (other, bench.path)]
    assert list(map(is_left, pids)) == [False, True]
    assert await bench.context.processes.end_all("w2") == []
    assert (await output_of(bench)).content.endswith("Still running")


async def test_there_are_only_so_many_jobs_at_once_and_only_so_many_are_remembered(
    bench: Bench, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RUNNING_MAX", 1)
    monkeypatch.setattr(jobs, "FINISHED_MAX", 1)
    await started(bench, clock, run_in_background=True)
    refused = await bench.call("bash", command="sleep 60", run_in_background=True)
    assert refused.is_error
    assert refused.content.endswith("background jobs are running; end one with job_kill first.")
    await bench.jobs.end_session("s1")
    await started(bench, clock, run_in_background=True)
    await bench.jobs.end_session("s1")
    assert bench.jobs.find("job-1") is None
    assert bench.jobs.find("job-2") is not None
