"""`bash` with real processes: the text a model reads, and that no process is left."""

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
from tests.tools.command_harness import CommandHarness, open_command_harness

NOW_S = 1_800_000_000.0


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[CommandHarness]:
    async with open_command_harness(tmp_path) as harness:
        yield harness


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_running(file: Path) -> bool:
    """Tell if the process whose pid is in `file` runs; an empty file means it never started."""
    text = file.read_text()
    return bool(text) and Path(f"/proc/{int(text)}/cwd").exists()


OUTPUTS = {
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


async def test_a_model_reads_the_output_and_the_exit_of_a_command(harness: CommandHarness) -> None:
    harness.env.update(CULM_TOKEN="secret", MINE="yes", PAGER="less")
    assert {command: await harness.bash(command) for command in OUTPUTS} == OUTPUTS


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "bash: Object missing required field `command`"),
        ({"command": 5}, "bash: Expected `str`, got `int` - command: The command to run."),
        ({"command": "a\0b"}, "bash: command: it contains a NUL character, which no shell accepts"),
        (
            {"command": "x" * (COMMAND_BYTES_MAX + 1)},
            "bash: command: it has 120,001 bytes, more than 120,000; write a script first",
        ),
        ({"command": "true", "timeout": -1}, "bash: Expected `int` >= 0"),
        ({"command": "true", "working_dir": "gone"}, "There is no gone in the workspace."),
        ({"command": "true", "working_dir": "file"}, "file is not a directory."),
    ],
)
async def test_an_impossible_call_is_refused_with_the_reason(
    tmp_path: Path, arguments: dict[str, Json], problem: str
) -> None:
    async with open_command_harness(tmp_path) as harness:
        (harness.path / "file").touch()
        result = await harness.call("bash", **arguments)
        assert result.is_error
        assert result.content.startswith(problem)


async def test_a_plan_shows_the_exact_command_and_the_result_its_times(
    tmp_path: Path,
) -> None:
    async with open_command_harness(tmp_path, FakeClock(NOW_S)) as harness:
        (harness.path / "sub").mkdir()
        (tmp_path / "link").symlink_to(harness.path / "sub")
        given = {"command": "touch a\ntouch b", "description": "Touch", "working_dir": "../link"}
        plan = await harness.plan("bash", **given)
        assert isinstance(plan, CallPlan)
        sub = str(harness.path / "sub")
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
        assert all(item.endswith(f" @ {sub}") for item in plan.action.coverage)
        again = await harness.plan("bash", **given)
        assert isinstance(again, CallPlan)
        assert again.action.digest == plan.action.digest
        result = await plan.run(harness.live_output.append)
        assert (result.content, result.is_error) == ("(no output)", False)
        assert msgspec.json.decode(result.metadata) == {
            "start_time": NOW_S * 1000,
            "end_time": NOW_S * 1000,
            "output": "",
            "description": "Touch",
            "working_directory": sub,
        }
        assert sorted(file.name for file in Path(sub).iterdir()) == ["a", "b"]
        Path(sub).rename(harness.path / "other")
        Path(sub).symlink_to("/")
        assert await plan.run(harness.live_output.append) == CallResult(
            "sub is no longer the same directory; nothing was run.", is_error=True
        )


async def test_a_session_continues_in_the_directory_of_its_last_command(
    harness: CommandHarness, tmp_path: Path
) -> None:
    sub = harness.path / "sub"
    (sub / "deep").mkdir(parents=True)
    assert await harness.bash("cd sub/deep; exit 1") == (
        f"(no output)\nThe next one starts in {sub}/deep.\nExit code 1"
    )
    assert await harness.bash("pwd", "other session") == str(harness.path)
    assert await harness.bash("pwd", working_dir="..") == str(sub)
    assert await harness.bash("(cd /); pwd") == f"{sub}/deep"
    (sub / "deep").rmdir()
    assert await harness.bash("pwd") == str(harness.path)
    await harness.bash("cd sub")
    assert await harness.bash(f"cd {tmp_path}") == (
        f"(no output)\nIt ended in {tmp_path}, outside the workspace; the next one starts inside "
        "again."
    )
    assert await harness.bash("pwd") == str(harness.path)
    plan = await harness.plan("bash", command="ls", working_dir="../..")
    assert isinstance(plan, CallPlan)
    assert (plan.action.is_free, plan.action.path) == (False, str(tmp_path.parent))


async def test_processes_left_behind_are_ended_and_the_result_says_so(
    harness: CommandHarness,
) -> None:
    output = await harness.bash(
        "setsid sleep 60 & echo $! > one; (trap '' TERM; nohup sleep 60 & echo $! > two) & wait %2"
    )
    assert output == (
        "(no output)\n2 processes it left behind were ended with it.\n"
        "Use run_in_background for a process that must keep running."
    )
    assert not any(is_running(harness.path / name) for name in ("one", "two"))


async def test_a_command_past_its_timeout_is_killed_even_if_it_ignores_sigterm(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with (
        open_command_harness(tmp_path, clock) as harness,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as tasks,
    ):
        stubborn = "trap '' TERM; echo $$ > pid; echo begun; while :; do sleep 60; done"
        call = tasks.create_task(harness.call("bash", command=stubborn, timeout=600))
        await harness.wait_for_output("begun", clock)
        result = await harness.advance_until_done(call, clock, 600)
        assert result.is_error
        assert result.content == (
            "begun\nIt did not end within 600 s and was killed.\nEnded by signal 9 (SIGKILL)"
        )
        assert not is_running(harness.path / "pid")


async def test_a_canceled_call_leaves_no_process_and_no_descriptor(harness: CommandHarness) -> None:
    await harness.bash("true")
    before = descriptors()
    async with asyncio.timeout(WAIT_S):
        for steps in (None, *range(12)):
            async with asyncio.TaskGroup() as tasks:
                text = "setsid sleep 60 & echo $! > pid; echo begun; wait"
                task = tasks.create_task(harness.call("bash", command=text))
                if steps is None:
                    await harness.wait_for_output("begun")
                for _ in range(steps or 0):
                    await asyncio.sleep(0)
                task.cancel()
            assert not is_running(harness.path / "pid")
        while descriptors() > before or await harness.context.processes.processes("w1"):
            await asyncio.sleep(0.01)  # The shims are about to exit.


async def test_huge_output_is_read_with_bounded_memory(harness: CommandHarness) -> None:
    tracemalloc.start()
    try:
        output = await harness.bash("echo begin; head -c 100000000 /dev/zero; echo; echo the end")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (file,) = harness.context.outputs.iterdir()
    left_out = 100_000_015 - MODEL_BYTES_MAX
    assert output == (
        f"begin\n\ufffd\n[… {left_out:,} bytes are left out here; the first "
        f"{FILE_BYTES_MAX:,} bytes of the output are in {file} …]\n\ufffd\nthe end"
    )
    assert file.stat().st_size == FILE_BYTES_MAX
    assert sum(map(len, harness.live_output)) < 300_000
    assert peak < 8 << 20


async def test_a_command_whose_shim_is_killed_ends_with_an_unknown_effect(
    harness: CommandHarness,
) -> None:
    async with asyncio.timeout(WAIT_S):
        # The parent of a command is its shim.
        command = "echo begun; setsid sleep 60 & echo $! > pid; sleep 0.1; kill -KILL $PPID; wait"
        result = await harness.call("bash", command=command)
        assert result.is_error
        assert result.content.startswith("begun\n")
        assert result.content.endswith(
            "The command was ended because its supervisor died. Its effect until then is unknown: "
            "check before you repeat it."
        )
        assert not is_running(harness.path / "pid")
        assert await harness.bash("echo on") == "on"


async def test_output_is_streamed_while_a_command_runs(harness: CommandHarness) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        command = "printf 'gr\\303'; printf '\\274n \\33[1mx\\33[0m\\n'; read <> fifo; echo on"
        os.mkfifo(harness.path / "fifo")
        call = tasks.create_task(harness.call("bash", command=command))
        await harness.wait_for_output("grün x")
        (harness.path / "fifo").write_text("go\n")
        result = await call
    assert result.content == "grün x\non"
    assert "".join(harness.live_output) == "grün x\non\n"


async def test_without_bash_another_shell_runs_and_every_command_needs_approval(
    harness: CommandHarness, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    harness.env["PATH"] = str(tmp_path / "bin")
    (harness.path / "sub").mkdir()
    assert await harness.bash("echo 'a  b'; cd sub; exit 3") == (
        f"a  b\nThe next one starts in {harness.path}/sub.\nExit code 3"
    )
    plan = await harness.plan("bash", command="pwd")
    assert isinstance(plan, CallPlan)
    assert not plan.action.is_free
    assert len(plan.action.coverage) == 1
