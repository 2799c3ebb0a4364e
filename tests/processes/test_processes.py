"""What custody promises of a process, with a keeper, with another's keeper, and without one."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.processes.base import ProcessExit, ProcessInfo, ProcessRequest, ProcessStartFailed
from culm.processes.direct import open_direct_processes
from tests.processes.yard import (
    ENV,
    OWNER,
    WORKSPACE,
    Yard,
    is_alive,
    make_order,
    open_remote_yard,
    open_yard,
)
from tests.support import WAIT_S


@pytest.fixture(params=["keeper", "remote", "direct"])
async def yard(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Yard]:
    if request.param == "keeper":
        async with open_yard(tmp_path) as yard:
            yield yard
    elif request.param == "remote":
        async with open_yard(tmp_path) as server, open_remote_yard(server.processes) as yard:
            yield yard
    else:
        with heard_signals():
            async with asyncio.timeout(WAIT_S), open_direct_processes(LoopClock()) as processes:
                yield Yard(processes)


@contextmanager
def heard_signals() -> Generator[None]:
    """Whoever runs the tests in the background has some ignored, which a process inherits."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


async def test_how_a_process_ends_is_told_to_everyone_who_waits(yard: Yard) -> None:
    for script, exit_ in (
        ("true", ProcessExit(0)),
        ("exit 3", ProcessExit(3)),
        ("kill -9 $$", ProcessExit(None, signal.SIGKILL)),
        ("exec >&- 2>&- <&-; exit 4", ProcessExit(4)),
    ):
        running = await yard.bash(script)
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(running.held.wait()) for _ in range(3)]
        assert [task.result() for task in waiters] == [exit_] * 3
        assert await running.kill() == exit_
    assert await yard.processes.processes(WORKSPACE) == []


async def test_a_waiter_that_is_cancelled_takes_nobody_with_it(yard: Yard) -> None:
    running = await yard.bash("exec sleep 100")
    async with asyncio.TaskGroup() as group:
        patient = group.create_task(running.held.wait())
        impatient = group.create_task(running.held.wait())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.sleep(0)
        assert await running.kill() == ProcessExit(None, signal.SIGTERM)
    assert patient.result() == ProcessExit(None, signal.SIGTERM)


async def test_further_descriptors_arrive_in_their_order_whatever_their_numbers_were(
    yard: Yard,
) -> None:
    pipes = [os.pipe() for _ in range(3)]
    null = os.open(os.devnull, os.O_RDWR)
    mouths = [mouth for _, mouth in reversed(pipes)]  # The highest number comes first.
    script = "echo three >&3; echo four >&4; echo five >&5; ! echo six >&6"
    order = make_order("bash", "-c", script, descriptors=(null, null, null, *mouths))
    held = await yard.processes.start(order)
    for descriptor in (null, *mouths):
        os.close(descriptor)
    assert await held.wait() == ProcessExit(0)
    assert [os.read(ear, 100) for ear, _ in reversed(pipes)] == [b"three\n", b"four\n", b"five\n"]
    for ear, _ in pipes:
        os.close(ear)


async def test_a_process_gets_its_descriptors_environment_and_directory_and_nothing_else(
    yard: Yard, tmp_path: Path
) -> None:
    big = {**ENV, "BIG": "ä" * 60_000, "BIGGER": "x" * 100_000, "ODD": "\udcff"}
    ear, mouth = os.pipe()
    argv = [sys.executable, "-I", "-S", "-c", LOOK_AROUND]
    held = await yard.processes.start(
        ProcessRequest(argv, str(tmp_path), big, OWNER, (mouth, mouth))
    )
    os.close(mouth)
    assert await held.wait() == ProcessExit(0)
    said = json.loads(os.read(ear, 1 << 16))
    os.close(ear)
    assert said == {
        "cwd": str(tmp_path),
        "env": {name: len(os.fsencode(big[name])) for name in sorted(big)},
        "descriptors": ["0", "1", "2", "3"],  # The last is the one by which it looks.
        "leads": True,
        "ignored": "0000000000000000",
        "blocked": "0000000000000000",
    }


LOOK_AROUND = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
ours = ("CULM_PROCESS_TOKEN", "LC_CTYPE")
print(json.dumps({
    "cwd": os.getcwd(),
    "env": {n: len(os.environb[n.encode()]) for n in sorted(os.environ) if n not in ours},
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "leads": os.getsid(0) == os.getpid(),
    # But for the two signals that Python itself ignores, and 32 and 33, which belong to the C
    # library: who is started by its posix_spawn ignores them, and nobody can change that.
    "ignored": hex(int(status["SigIgn"], 16) & ~0x1001000 & ~0x180000000)[2:].zfill(16),
    "blocked": status["SigBlk"].strip(),
}), flush=True)
"""


FAILURES: Mapping[str, tuple[list[str], str]] = {
    "unknown": (["no-such-command"], "`no-such-command` was not found in PATH"),
    "missing": (["./gone"], "`./gone` was not found"),
    "plain file": (
        ["./plain"],
        "`./plain` cannot be executed: permission denied, or it is not executable",
    ),
    "no interpreter": (
        ["./orphan"],
        "`./orphan` cannot be executed: the interpreter it names is missing",
    ),
    "no program": (
        ["./empty"],
        "`./empty` cannot be executed: it is no program and names no interpreter",
    ),
    "too long": (
        ["true", *["x" * 100_000] * 60],
        "`true` cannot be executed: its arguments and environment are too long",
    ),
    "NUL": (["true", "a\0b"], "an argument holds a NUL, which no process can be given"),
    "lone surrogate": (["true", "\ud800"], "an argument holds what cannot be encoded"),
    "nothing": ([], "there is no command to start"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_what_cannot_be_started_is_said_in_words(
    yard: Yard, tmp_path: Path, case: str
) -> None:
    argv, words = FAILURES[case]
    (tmp_path / "plain").write_text("")
    (tmp_path / "orphan").write_text("#!/no/such/interpreter\n")
    (tmp_path / "empty").write_text("text")
    (tmp_path / "orphan").chmod(0o700)
    (tmp_path / "empty").chmod(0o700)
    with pytest.raises(ProcessStartFailed) as failure:
        await yard.processes.start(make_order(*argv, cwd=str(tmp_path)))
    assert str(failure.value) == words
    assert await yard.processes.processes(WORKSPACE) == []


async def test_a_directory_or_variable_that_cannot_be_is_said_in_words(
    yard: Yard, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    gone = tmp_path / "gone"
    orders = {
        f"the working directory {gone} does not exist": make_order("true", cwd=str(gone)),
        f"{tmp_path / 'file'} is no directory": make_order("true", cwd=str(tmp_path / "file")),
        "'a=b' is no name of an environment variable": replace(make_order("true"), env={"a=b": ""}),
    }
    for words, order in orders.items():
        with pytest.raises(ProcessStartFailed) as failure:
            await yard.processes.start(order)
        assert str(failure.value) == words


async def test_a_process_that_ignores_requests_is_ended_with_its_children(yard: Yard) -> None:
    running = await yard.bash("trap '' TERM; sleep 100 & echo $!; while :; do sleep 100; done")
    child = await running.pid()
    assert await running.kill(0.05) == ProcessExit(None, signal.SIGKILL)
    assert not is_alive(running.held.pid)
    assert not is_alive(child)


async def test_a_process_may_tidy_up_when_it_is_asked_to_end(yard: Yard) -> None:
    running = await yard.bash("trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    assert await running.line() == "up"
    assert await running.held.kill() == ProcessExit(7)
    assert await running.rest() == "bye\n"


async def test_a_start_that_is_cancelled_leaves_no_process(yard: Yard, tmp_path: Path) -> None:
    for turns in range(6):
        ear, mouth = os.pipe()
        order = make_order("sleep", "100", descriptors=(mouth,))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(yard.processes.start(order))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        if not task.cancelled():
            await task.result().kill(0)
        os.close(mouth)
        # Nobody has it open any more.
        assert os.read(ear, 1) == b""
        os.close(ear)
    assert await yard.processes.processes(WORKSPACE) == []


async def test_the_list_shows_what_runs_for_a_workspace_and_ending_all_ends_it(
    yard: Yard, tmp_path: Path
) -> None:
    mine = await yard.processes.start(make_order("sleep", "100", title="a long rest"))
    other = await yard.processes.start(
        replace(make_order("sleep", "100"), owner=replace(OWNER, workspace_id="other"))
    )
    (shown,) = await yard.processes.processes(WORKSPACE)
    expected = ProcessInfo(
        mine.pid, "a long rest", OWNER, shown.age_s, shown.rss_bytes, (mine.pid,), stopping=False
    )
    assert shown == expected
    assert await yard.processes.end_all(WORKSPACE) == []
    assert (is_alive(mine.pid), is_alive(other.pid)) == (False, True)
    assert await mine.wait() == ProcessExit(None, signal.SIGTERM)
    assert await yard.processes.processes(WORKSPACE) == []
    assert [each.title for each in await yard.processes.processes("other")] == ["sleep 100"]


async def test_what_a_command_leaves_in_the_background_is_ended_with_it(yard: Yard) -> None:
    running = await yard.bash("trap '' HUP; nohup sleep 100 >/dev/null & echo $!")
    child = await running.pid()
    assert await running.wait() == ProcessExit(0, swept=1)
    assert not is_alive(child)


async def test_what_is_about_to_end_by_itself_may_do_so(yard: Yard) -> None:
    running = await yard.bash("(sleep 0.01; echo last) & exit 0")
    assert await running.held.wait() == ProcessExit(0)
    assert await running.rest() == "last\n"
