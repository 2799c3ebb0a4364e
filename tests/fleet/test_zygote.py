"""Workers forked from a warm zygote: their state, and recovery from dead processes."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from culm.clock import LoopClock
from culm.fleet.host.base import Worker
from culm.fleet.host.local import LaunchSettings, open_local_launcher
from culm.processes.base import ProcessExit
from culm.processes.direct import open_direct_processes
from culm.processes.linux import descendants_of, read_table
from culm.wire.codec import Json
from tests.fleet.launch_harness import (
    BOUND_S,
    FAKE_WORKER,
    NO_ZYGOTE,
    THREADED,
    make_provision,
    open_launcher,
)
from tests.processes.process_harness import PipeReader, is_alive, name_of, wait_until_gone
from tests.processes.test_escapes import open_descriptors, parent_of
from tests.support import contract


def read_report(folder: Path, child_id: str) -> Mapping[str, Json]:
    return json.loads((folder / child_id).read_text())


async def prefork_of(worker: Worker) -> int:
    """The pid of the prefork of the worker's zygote."""
    assert worker.pid is not None
    zygote = parent_of(worker.pid)
    while True:
        for stat in read_table().values():
            if (stat.parent, stat.comm) == (zygote, "culm-prefork"):
                return stat.pid
        await asyncio.sleep(0.005)


@contract("FLEET-54")
@pytest.mark.parametrize("start", ["forked", "forked ahead", "spawned"])
async def test_worker_starts_with_clean_descriptors_signals_and_random_state(
    tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-of-the-server")
    children = "a-child-with-a-name", "another-one"
    settings = NO_ZYGOTE if start == "spawned" else FAKE_WORKER
    async with open_launcher(tmp_path, settings) as launcher:
        before = await launcher.launch(make_provision(tmp_path, "the-first"))
        for child_id in children:
            prefork = await prefork_of(before) if start == "forked ahead" else None
            worker = await launcher.launch(make_provision(tmp_path, child_id))
            assert prefork in (worker.pid, None)
        reports = [read_report(tmp_path, child_id) for child_id in children]
        for report in reports:
            signals = cast("dict[str, str]", report["signals"])
            # 32 and 33 belong to the C library: its posix_spawn makes the child ignore them.
            ignored = int(signals["SigIgn"], 16) & ~0x180000000
            assert (signals["SigBlk"], ignored) == ("0" * 16, 0x1001000)
            assert signals["SigCgt"] == "0000000000000002"  # Python's own handler of SIGINT.
            seen = {name: report[name] for name in ("descriptors", "stdout", "leads", "wakeup")}
            assert seen == {
                "descriptors": [0, 1, 2, 3],
                "stdout": "/dev/null",
                "leads": True,
                "wakeup": -1,
            }
            assert (report["name"] == "culm-worker") == (start != "spawned")
            for secret in (*children, str(tmp_path), "sk-of-the-server"):
                assert secret not in f"{report['argv']}{report['environ']}"
        assert reports[0]["chance"] != reports[1]["chance"]
        assert reports[0]["argv"] == reports[1]["argv"]


async def test_dead_prefork_is_replaced(tmp_path: Path) -> None:
    async with open_launcher(tmp_path, FAKE_WORKER) as launcher:
        first = await launcher.launch(make_provision(tmp_path, "first"))
        dead = await prefork_of(first)
        os.kill(dead, signal.SIGKILL)
        await wait_until_gone(dead)
        second = await launcher.launch(make_provision(tmp_path, "second"))
        assert second.pid is not None
        assert first.pid is not None
        assert (second.pid == dead, parent_of(second.pid)) == (False, parent_of(first.pid))


@pytest.mark.parametrize("settings", [NO_ZYGOTE, THREADED], ids=["ends at once", "has threads"])
async def test_without_a_zygote_workers_are_spawned(
    tmp_path: Path, settings: LaunchSettings
) -> None:
    async with open_launcher(tmp_path, settings) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "a"))
        assert worker.pid is not None
        assert name_of(parent_of(worker.pid)) == "culm-shim"
    assert descendants_of(os.getpid(), read_table()) == []


async def test_without_a_supervisor_workers_are_spawned_with_direct_processes(
    tmp_path: Path,
) -> None:
    clock = LoopClock()
    async with (
        asyncio.timeout(BOUND_S),
        open_direct_processes(clock) as processes,
        open_local_launcher(processes, tmp_path / "fabric", clock, FAKE_WORKER) as launcher,
    ):
        await launcher.launch(make_provision(tmp_path, "a"))
        assert read_report(tmp_path, "a")["descriptors"] == [0, 1, 2, 3]
        worker = await launcher.launch(make_provision(tmp_path, "b", "ask"))
        assert await worker.stderr_tail() == "there is no supervisor on this platform"
    assert descendants_of(os.getpid(), read_table()) == []


async def test_workers_outlive_their_zygote_and_the_next_is_forked_anew(
    tmp_path: Path,
) -> None:
    before = open_descriptors()
    async with open_launcher(tmp_path, replace(FAKE_WORKER, fork_s=0.2)) as launcher:
        launcher.warm_nowait()
        one = await launcher.launch(make_provision(tmp_path, "one"))
        assert one.pid is not None
        zygote = parent_of(one.pid)
        supervisor = parent_of(zygote)
        assert (name_of(zygote), name_of(supervisor)) == ("culm-zygote", "culm-supervisor")
        os.kill(zygote, signal.SIGKILL)
        two = await launcher.launch(make_provision(tmp_path, "two"))
        assert two.pid is not None
        second = parent_of(two.pid)
        assert (name_of(second), second == zygote) == ("culm-zygote", False)
        assert (one.is_alive, parent_of(one.pid)) == (True, supervisor)
        # A zygote that hangs is treated as dead.
        os.kill(second, signal.SIGSTOP)
        three = await launcher.launch(make_provision(tmp_path, "three"))
        assert three.pid is not None
        assert (is_alive(second), name_of(parent_of(three.pid))) == (False, "culm-zygote")
        # A worker forked by a dead zygote is ended and reaped like any other.
        await one.kill()
        assert (one.is_alive, two.is_alive, is_alive(one.pid)) == (False, True, False)
    assert descendants_of(os.getpid(), read_table()) == []
    assert open_descriptors() == before


async def test_workers_outlive_the_supervisor_but_their_commands_do_not(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "one")
    output = PipeReader(os.open(tmp_path / "one", os.O_RDONLY | os.O_NONBLOCK))
    async with open_launcher(tmp_path, FAKE_WORKER) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "one", "command"))
        assert worker.pid is not None
        first = await output.pid()
        supervisor = parent_of(parent_of(worker.pid))
        assert parent_of(parent_of(first)) == supervisor
        os.kill(supervisor, signal.SIGKILL)
        assert await output.line() == str(ProcessExit(None, lost=True))
        assert not is_alive(first)
        second = await output.pid()
        assert (worker.is_alive, is_alive(second)) == (True, True)
        assert parent_of(worker.pid) == os.getpid()
        # A new zygote belongs to the new supervisor; the old one died with its own.
        other = await launcher.launch(make_provision(tmp_path, "two"))
        assert other.pid is not None
        assert parent_of(parent_of(other.pid)) == parent_of(parent_of(second))
        await worker.kill()
        assert (is_alive(worker.pid), is_alive(second)) == (False, False)
        await wait_until_gone(worker.pid)
        assert worker.pid not in read_table()
    output.close()
    assert descendants_of(os.getpid(), read_table()) == []
