"""`bash` with real processes: what a model reads, and what is left when it has."""

import asyncio
import os
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.bash import COMMAND_BYTES_MAX
from culm.tools.process.output import FILE_BYTES_MAX, MODEL_BYTES_MAX
from culm.wire.codec import Json
from tests.support import WAIT_S, FakeClock
from tests.tools.bench import Bench, open_bench

NOW_S = 1_800_000_000.0


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(tmp_path) as bench:
        yield bench


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_left(file: Path) -> bool:
    """Whether the process whose pid is in a file lives; an empty one was not written in time."""
    text = file.read_text()
    return bool(text) and Path(f"/proc/{int(text)}/cwd").exists()


SAID = {
    "echo out; echo err >&2": "out\nerr",
    "true": "(no output)",
    " \n": "(no output: the command is empty)",
    "exit 3": "(no output)\nExit code 3",
    "echo a; nosuchcommand 2> /dev/null": "a\nExit code 127",
    "echo a\n\nfi": (
        "a\nbash: -c: line 3: syntax error near unexpected token `fi'\n"
        "bash: -c: line 3: `fi'\nExit code 2"
    ),
    "echo 'open": ("bash: -c: line 1: unexpected EOF while looking for matching `''\nExit code 2"),
    "kill -KILL $$": "(no output)\nEnded by signal 9 (SIGKILL)",
    "printf 'a\\0\\377\\33[31mb\\33[0m'": "a\ufffdb",
    "printf '1%%\\r2%%\\r3%%\\n'": "3%",
    "cat": "(no output)",
    "tty": "not a tty\nExit code 1",
    "set -eu; false; echo never": "(no output)\nExit code 1",
    "trap 'echo bye' EXIT; echo $#$LINENO": "01\nbye",
    "echo $TERM $PAGER ${CULM_TOKEN-none} ${CULM_BASH_ENV-none} $MINE": "dumb cat none none yes",
    "bash -c 'echo ${BASH_ENV-none}; trap -p'": "none",
    "cat <<X\n$((1 + 1))\nX": "2",
}


async def test_a_model_reads_what_a_command_puts_out_and_how_it_ended(bench: Bench) -> None:
    bench.env.update(CULM_TOKEN="secret", MINE="yes", PAGER="less")
    assert {command: await bench.bash(command) for command in SAID} == SAID


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "bash: Object missing required field `command`"),
        ({"command": 5}, "bash: Expected `str`, got `int` - command: What to run."),
        ({"command": "a\0b"}, "bash: command: it has a NUL character, which no shell takes"),
        (
            {"command": "x" * (COMMAND_BYTES_MAX + 1)},
            "bash: command: it has 120,001 bytes, more than 120,000; write a script first",
        ),
        ({"command": "true", "timeout": -1}, "bash: Expected `int` >= 0"),
        ({"command": "true", "working_dir": "gone"}, "There is no gone in the workspace."),
        ({"command": "true", "working_dir": "file"}, "file is no directory to work in."),
    ],
)
async def test_a_call_that_cannot_be_carried_out_is_told_why(
    tmp_path: Path, arguments: dict[str, Json], problem: str
) -> None:
    async with open_bench(tmp_path) as bench:
        (bench.path / "file").touch()
        result = await bench.call("bash", **arguments)
        assert result.is_error
        assert result.content.startswith(problem)


async def test_a_plan_shows_the_command_as_it_will_run_and_the_result_tells_when(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path, FakeClock(NOW_S)) as bench:
        (bench.path / "sub").mkdir()
        (tmp_path / "link").symlink_to(bench.path / "sub")
        given = {"command": "touch a\ntouch b", "description": "Touch", "working_dir": "../link"}
        plan = await bench.plan("bash", **given)
        assert isinstance(plan, CallPlan)
        sub = str(bench.path / "sub")
        assert plan.action == ResolvedAction(
            "bash",
            "execute",
            description="Execute command: touch a\\ntouch b",
            path=sub,
            params={**given, "run_in_background": False, "auto_background_after": 0},
            resolved={"command": given["command"], "cwd": sub, "background": False},
            is_free=False,
            paths=plan.action.paths,
            commands=("touch a", "touch b"),
            seen=("touch a", "touch b"),
            coverage=plan.action.coverage,
            why=plan.action.why,
        )
        assert all(grain.endswith(f" @ {sub}") for grain in plan.action.coverage)
        again = await bench.plan("bash", **given)
        assert isinstance(again, CallPlan)
        assert again.action.digest == plan.action.digest
        result = await plan.run(bench.watched.append)
        assert (result.content, result.is_error) == ("(no output)", False)
        assert msgspec.json.decode(result.metadata) == {
            "start_time": NOW_S * 1000,
            "end_time": NOW_S * 1000,
            "output": "",
            "description": "Touch",
            "working_directory": sub,
        }
        assert sorted(file.name for file in Path(sub).iterdir()) == ["a", "b"]
        Path(sub).rename(bench.path / "other")
        Path(sub).symlink_to("/")
        assert await plan.run(bench.watched.append) == CallResult(
            "sub is not the directory any more that it was; nothing was run.", is_error=True
        )


async def test_a_session_goes_on_where_its_last_command_ended(bench: Bench, tmp_path: Path) -> None:
    sub = bench.path / "sub"
    (sub / "deep").mkdir(parents=True)
    assert await bench.bash("cd sub/deep; exit 1") == (
        f"(no output)\nThe next one starts in {sub}/deep.\nExit code 1"
    )
    assert await bench.bash("pwd", "other session") == str(bench.path)
    assert await bench.bash("pwd", working_dir="..") == str(sub)
    assert await bench.bash("(cd /); pwd") == f"{sub}/deep"
    (sub / "deep").rmdir()
    assert await bench.bash("pwd") == str(bench.path)
    await bench.bash("cd sub")
    assert await bench.bash(f"cd {tmp_path}") == (
        f"(no output)\nIt ended in {tmp_path}, outside the workspace; the next one starts inside "
        "again."
    )
    assert await bench.bash("pwd") == str(bench.path)
    plan = await bench.plan("bash", command="ls", working_dir="../..")
    assert isinstance(plan, CallPlan)
    assert (plan.action.is_free, plan.action.path) == (False, str(tmp_path.parent))


async def test_what_a_command_leaves_behind_is_ended_and_the_result_says_so(bench: Bench) -> None:
    said = await bench.bash(
        "setsid sleep 60 & echo $! > one; (trap '' TERM; nohup sleep 60 & echo $! > two) & wait %2"
    )
    assert said == (
        "(no output)\n2 processes it left behind were ended with it.\n"
        "What shall go on running needs run_in_background."
    )
    assert not any(is_left(bench.path / name) for name in ("one", "two"))


async def test_a_command_that_takes_too_long_is_killed_though_it_ignores_it(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        open_bench(tmp_path, clock) as bench,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as tasks,
    ):
        stubborn = "trap '' TERM; echo $$ > pid; echo begun; while :; do sleep 60; done"
        call = tasks.create_task(bench.call("bash", command=stubborn, timeout=600))
        await bench.heard("begun", clock)
        result = await bench.ended(call, clock, 600)
        assert result.is_error
        assert result.content == (
            "begun\nIt did not end within 600 s and was killed.\nEnded by signal 9 (SIGKILL)"
        )
        assert not is_left(bench.path / "pid")


async def test_a_cancelled_call_leaves_no_process_and_no_descriptor(bench: Bench) -> None:
    await bench.bash("true")
    before = descriptors()
    async with asyncio.timeout(WAIT_S):
        for steps in (None, *range(12)):
            async with asyncio.TaskGroup() as tasks:
                text = "setsid sleep 60 & echo $! > pid; echo begun; wait"
                task = tasks.create_task(bench.call("bash", command=text))
                if steps is None:
                    await bench.heard("begun")
                for _ in range(steps or 0):
                    await asyncio.sleep(0)
                task.cancel()
            assert not is_left(bench.path / "pid")
        while descriptors() > before or await bench.context.processes.processes("w1"):
            await asyncio.sleep(0.01)  # The wardens are about to go.


async def test_much_output_is_taken_quickly_and_little_of_it_is_kept(bench: Bench) -> None:
    tracemalloc.start()
    try:
        said = await bench.bash("echo begin; head -c 100000000 /dev/zero; echo; echo the end")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (file,) = bench.context.outputs.iterdir()
    left_out = 100_000_015 - MODEL_BYTES_MAX
    assert said == (
        f"begin\n\ufffd\n[… {left_out:,} bytes are left out here; the first "
        f"{FILE_BYTES_MAX:,} bytes of the output are in {file} …]\n\ufffd\nthe end"
    )
    assert file.stat().st_size == FILE_BYTES_MAX
    assert sum(map(len, bench.watched)) < 300_000
    assert peak < 8 << 20


async def test_a_command_whose_keeper_is_killed_ends_and_nobody_claims_to_know_how(
    bench: Bench,
) -> None:
    async with asyncio.timeout(WAIT_S):
        # The parent of a command is who keeps it.
        command = "echo begun; setsid sleep 60 & echo $! > pid; sleep 0.1; kill -KILL $PPID; wait"
        result = await bench.call("bash", command=command)
        assert result.is_error
        assert result.content.startswith("begun\n")
        assert result.content.endswith(
            "The command was ended because the process that kept it died. What it had done until "
            "then is not known: look before you repeat it."
        )
        assert not is_left(bench.path / "pid")
        assert await bench.bash("echo on") == "on"


async def test_output_is_seen_while_a_command_runs(bench: Bench) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        command = "printf 'gr\\303'; printf '\\274n \\33[1mx\\33[0m\\n'; read <> fifo; echo on"
        os.mkfifo(bench.path / "fifo")
        call = tasks.create_task(bench.call("bash", command=command))
        await bench.heard("grün x")
        (bench.path / "fifo").write_text("go\n")
        result = await call
    assert result.content == "grün x\non"
    assert "".join(bench.watched) == "grün x\non\n"


async def test_without_bash_another_shell_does_it_and_nothing_is_free(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    bench.env["PATH"] = str(tmp_path / "bin")
    (bench.path / "sub").mkdir()
    assert await bench.bash("echo 'a  b'; cd sub; exit 3") == (
        f"a  b\nThe next one starts in {bench.path}/sub.\nExit code 3"
    )
    plan = await bench.plan("bash", command="pwd")
    assert isinstance(plan, CallPlan)
    assert not plan.action.is_free
    assert len(plan.action.coverage) == 1
