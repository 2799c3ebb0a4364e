"""Processes under our own supervisor, under a remote one, and without one."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import LoopClock
from culm.processes.base import ProcessExit, ProcessInfo, ProcessRequest, ProcessStartFailed
from culm.processes.direct import open_direct_processes
from tests.processes.process_harness import (
    ENV,
    OWNER,
    WORKSPACE,
    ProcessHarness,
    is_alive,
    make_request,
    open_process_harness,
    open_remote_harness,
)
from tests.support import WAIT_S


@pytest.fixture(params=["supervisor", "remote", "direct"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[ProcessHarness]:
    if request.param == "supervisor":
        async with open_process_harness(tmp_path) as harness:
            yield harness
    elif request.param == "remote":
        async with (
            open_process_harness(tmp_path) as server,
            open_remote_harness(server.processes) as harness,
        ):
            yield harness
    else:
        with default_signals():
            async with asyncio.timeout(WAIT_S), open_direct_processes(LoopClock()) as processes:
                yield ProcessHarness(processes)


@contextmanager
def default_signals() -> Generator[None]:
    """Restore signals that a background shell ignores: a process would inherit that."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


async def test_exit_of_a_process_is_reported_to_every_waiter(harness: ProcessHarness) -> None:
    for script, exit_ in (
        ("true", ProcessExit(0)),
        ("exit 3", ProcessExit(3)),
        ("kill -9 $$", ProcessExit(None, signal.SIGKILL)),
        ("exec >&- 2>&- <&-; exit 4", ProcessExit(4)),
    ):
        running = await harness.bash(script)
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(running.handle.wait()) for _ in range(3)]
        assert [task.result() for task in waiters] == [exit_] * 3
        assert await running.kill() == exit_
    assert await harness.processes.processes(WORKSPACE) == []


async def test_canceled_waiter_does_not_affect_others(harness: ProcessHarness) -> None:
    running = await harness.bash("exec sleep 100")
    async with asyncio.TaskGroup() as group:
        patient = group.create_task(running.handle.wait())
        impatient = group.create_task(running.handle.wait())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.sleep(0)
        assert await running.kill() == ProcessExit(None, signal.SIGTERM)
    assert patient.result() == ProcessExit(None, signal.SIGTERM)


async def test_extra_descriptors_arrive_in_order(
    harness: ProcessHarness,
) -> None:
    pipes = [os.pipe() for _ in range(3)]
    null = os.open(os.devnull, os.O_RDWR)
    write_fds = [write_fd for _, write_fd in reversed(pipes)]  # The highest number comes first.
    script = "echo three >&3; echo four >&4; echo five >&5; ! echo six >&6"
    process_request = make_request("bash", "-c", script, descriptors=(null, null, null, *write_fds))
    handle = await harness.processes.start(process_request)
    for descriptor in (null, *write_fds):
        os.close(descriptor)
    assert await handle.wait() == ProcessExit(0)
    assert [os.read(read_fd, 100) for read_fd, _ in reversed(pipes)] == [
        b"three\n",
        b"four\n",
        b"five\n",
    ]
    for read_fd, _ in pipes:
        os.close(read_fd)


async def test_process_gets_only_its_descriptors_environment_and_directory(
    harness: ProcessHarness, tmp_path: Path
) -> None:
    big = {**ENV, "BIG": "ä" * 60_000, "BIGGER": "x" * 100_000, "ODD": "\udcff"}
    read_fd, write_fd = os.pipe()
    argv = [sys.executable, "-I", "-S", "-c", LOOK_AROUND]
    handle = await harness.processes.start(
        ProcessRequest(argv, str(tmp_path), big, OWNER, (write_fd, write_fd))
    )
    os.close(write_fd)
    assert await handle.wait() == ProcessExit(0)
    report = json.loads(os.read(read_fd, 1 << 16))
    os.close(read_fd)
    assert report == {
        "cwd": str(tmp_path),
        "env": {name: len(os.fsencode(big[name])) for name in sorted(big)},
        "descriptors": ["0", "1", "2", "3"],  # The last one lists the folder.
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
    # library: its posix_spawn makes the child ignore them, and nothing can change that.
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
        "`./empty` cannot be executed: it is not a program and names no interpreter",
    ),
    "too long": (
        ["true", *["x" * 100_000] * 60],
        "`true` cannot be executed: its arguments and environment are too long",
    ),
    "NUL": (["true", "a\0b"], "an argument contains a NUL character"),
    "lone surrogate": (["true", "\ud800"], "an argument cannot be encoded"),
    "nothing": ([], "the command is empty"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_start_failure_has_a_readable_message(
    harness: ProcessHarness, tmp_path: Path, case: str
) -> None:
    argv, message = FAILURES[case]
    (tmp_path / "plain").write_text("")
    (tmp_path / "orphan").write_text("#!/no/such/interpreter\n")
    (tmp_path / "empty").write_text("text")
    (tmp_path / "orphan").chmod(0o700)
    (tmp_path / "empty").chmod(0o700)
    with pytest.raises(ProcessStartFailed) as failure:
        await harness.processes.start(make_request(*argv, cwd=str(tmp_path)))
    assert str(failure.value) == message
    assert await harness.processes.processes(WORKSPACE) == []


async def test_invalid_directory_or_variable_has_a_readable_message(
    harness: ProcessHarness, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    gone = tmp_path / "gone"
    requests = {
        f"the working directory {gone} does not exist": make_request("true", cwd=str(gone)),
        f"{tmp_path / 'file'} is not a directory": make_request("true", cwd=str(tmp_path / "file")),
        "invalid environment variable name: 'a=b'": replace(make_request("true"), env={"a=b": ""}),
    }
    for message, process_request in requests.items():
        with pytest.raises(ProcessStartFailed) as failure:
            await harness.processes.start(process_request)
        assert str(failure.value) == message


async def test_process_ignoring_sigterm_is_killed_with_its_children(
    harness: ProcessHarness,
) -> None:
    running = await harness.bash("trap '' TERM; sleep 100 & echo $!; while :; do sleep 100; done")
    child = await running.pid()
    assert await running.kill(0.05) == ProcessExit(None, signal.SIGKILL)
    assert not is_alive(running.handle.pid)
    assert not is_alive(child)


async def test_process_may_clean_up_on_sigterm(harness: ProcessHarness) -> None:
    running = await harness.bash(
        "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done"
    )
    assert await running.line() == "up"
    assert await running.handle.kill() == ProcessExit(7)
    assert await running.rest() == "bye\n"


async def test_canceled_start_leaves_no_process(harness: ProcessHarness, tmp_path: Path) -> None:
    for turns in range(6):
        read_fd, write_fd = os.pipe()
        process_request = make_request("sleep", "100", descriptors=(write_fd,))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(harness.processes.start(process_request))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        if not task.cancelled():
            await task.result().kill(0)
        os.close(write_fd)
        # No process has it open any more.
        assert os.read(read_fd, 1) == b""
        os.close(read_fd)
    assert await harness.processes.processes(WORKSPACE) == []


async def test_list_shows_a_workspaces_processes_and_end_all_ends_them(
    harness: ProcessHarness, tmp_path: Path
) -> None:
    mine = await harness.processes.start(make_request("sleep", "100", title="a long rest"))
    other = await harness.processes.start(
        replace(make_request("sleep", "100"), owner=replace(OWNER, workspace_id="other"))
    )
    (shown,) = await harness.processes.processes(WORKSPACE)
    expected = ProcessInfo(
        mine.pid, "a long rest", OWNER, shown.age_s, shown.rss_bytes, (mine.pid,), stopping=False
    )
    assert shown == expected
    assert await harness.processes.end_all(WORKSPACE) == []
    assert (is_alive(mine.pid), is_alive(other.pid)) == (False, True)
    assert await mine.wait() == ProcessExit(None, signal.SIGTERM)
    assert await harness.processes.processes(WORKSPACE) == []
    assert [each.title for each in await harness.processes.processes("other")] == ["sleep 100"]


async def test_background_processes_of_a_command_end_with_it(harness: ProcessHarness) -> None:
    running = await harness.bash("trap '' HUP; nohup sleep 100 >/dev/null & echo $!")
    child = await running.pid()
    assert await running.wait() == ProcessExit(0, swept=1)
    assert not is_alive(child)


async def test_process_about_to_exit_by_itself_may_finish(harness: ProcessHarness) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            running = await harness.bash("(sleep 0.01; echo last) & exit 0")
            ended = await running.handle.wait()
            if not ended.swept:
                break  # On a busy machine it may need longer than it is given.
    assert (ended, await running.rest()) == (ProcessExit(0), "last\n")
