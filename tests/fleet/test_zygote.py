"""Workers are forked from a warm zygote: what a fork is given, and who may die without harm."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from culm.clock import LoopClock
from culm.fleet.host.base import Worker
from culm.fleet.host.local import LaunchSettings, open_local_launcher
from culm.processes.base import ProcessExit
from culm.processes.direct import open_direct_processes
from culm.processes.linux import read_table
from culm.processes.tree import descendants_of
from culm.wire.codec import Json
from tests.fleet.nursery import (
    BOUND_S,
    NO_ZYGOTE,
    STAND_IN,
    THREADED,
    make_provision,
    open_launcher,
)
from tests.processes.test_escapes import open_descriptors, parent_of
from tests.processes.yard import Ear, gone, is_alive, name_of
from tests.support import contract


def told(folder: Path, child_id: str) -> Mapping[str, Json]:
    return json.loads((folder / child_id).read_text())


async def prefork_of(worker: Worker) -> int:
    """The fork that its zygote has made ahead by now."""
    assert worker.pid is not None
    zygote = parent_of(worker.pid)
    while True:
        for stat in read_table().values():
            if (stat.parent, stat.comm) == (zygote, "culm-bud"):
                return stat.pid
        await asyncio.sleep(0.005)


@contract("FLEET-54")
@pytest.mark.parametrize("way", ["forked", "forked ahead", "spawned"])
async def test_a_worker_has_its_descriptors_fresh_chance_clean_signals_and_nothing_else(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-of-the-server")
    children = "a-child-with-a-name", "another-one"
    terms = NO_ZYGOTE if way == "spawned" else STAND_IN
    async with open_launcher(tmp_path, terms) as launcher:
        before = await launcher.launch(make_provision(tmp_path, "the-first"))
        for child_id in children:
            prefork = await prefork_of(before) if way == "forked ahead" else None
            worker = await launcher.launch(make_provision(tmp_path, child_id))
            assert prefork in (worker.pid, None)
        found = [told(tmp_path, child_id) for child_id in children]
        for said in found:
            signals = cast("dict[str, str]", said["signals"])  # As the stand-in tells them.
            # 32 and 33 belong to the C library: who is started by its posix_spawn ignores them.
            ignored = int(signals["SigIgn"], 16) & ~0x180000000
            assert (signals["SigBlk"], ignored) == ("0" * 16, 0x1001000)
            assert signals["SigCgt"] == "0000000000000002"  # That of Python itself, on SIGINT.
            seen = {name: said[name] for name in ("descriptors", "stdout", "leads", "wakeup")}
            assert seen == {
                "descriptors": [0, 1, 2, 3],
                "stdout": "/dev/null",
                "leads": True,
                "wakeup": -1,
            }
            assert (said["name"] == "culm-worker") == (way != "spawned")
            for secret in (*children, str(tmp_path), "sk-of-the-server"):
                assert secret not in f"{said['argv']}{said['environ']}"
        assert found[0]["chance"] != found[1]["chance"]
        assert found[0]["argv"] == found[1]["argv"]


async def test_a_fork_made_ahead_that_died_is_not_missed(tmp_path: Path) -> None:
    async with open_launcher(tmp_path, STAND_IN) as launcher:
        first = await launcher.launch(make_provision(tmp_path, "first"))
        dead = await prefork_of(first)
        os.kill(dead, signal.SIGKILL)
        await gone(dead)
        second = await launcher.launch(make_provision(tmp_path, "second"))
        assert second.pid is not None
        assert first.pid is not None
        assert (second.pid == dead, parent_of(second.pid)) == (False, parent_of(first.pid))


@pytest.mark.parametrize("terms", [NO_ZYGOTE, THREADED], ids=["ends at once", "has threads"])
async def test_without_a_zygote_workers_are_spawned(tmp_path: Path, terms: LaunchSettings) -> None:
    async with open_launcher(tmp_path, terms) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "a"))
        assert worker.pid is not None
        assert name_of(parent_of(worker.pid)) == "culm-warden"
    assert descendants_of(os.getpid(), read_table()) == []


async def test_without_a_keeper_workers_are_spawned_and_hold_their_commands_themselves(
    tmp_path: Path,
) -> None:
    clock = LoopClock()
    async with (
        asyncio.timeout(BOUND_S),
        open_direct_processes(clock) as processes,
        open_local_launcher(processes, tmp_path / "fabric", clock, STAND_IN) as launcher,
    ):
        await launcher.launch(make_provision(tmp_path, "a"))
        assert told(tmp_path, "a")["descriptors"] == [0, 1, 2, 3]
        worker = await launcher.launch(make_provision(tmp_path, "b", "ask"))
        assert await worker.stderr_tail() == "there is no keeper here"
    assert descendants_of(os.getpid(), read_table()) == []


async def test_workers_outlive_their_zygote_and_the_next_one_is_forked_from_another(
    tmp_path: Path,
) -> None:
    before = open_descriptors()
    async with open_launcher(tmp_path, replace(STAND_IN, fork_s=0.2)) as launcher:
        launcher.warm_nowait()
        one = await launcher.launch(make_provision(tmp_path, "one"))
        assert one.pid is not None
        zygote = parent_of(one.pid)
        supervisor = parent_of(zygote)
        assert (name_of(zygote), name_of(supervisor)) == ("culm-zygote", "culm-keeper")
        os.kill(zygote, signal.SIGKILL)
        two = await launcher.launch(make_provision(tmp_path, "two"))
        assert two.pid is not None
        second = parent_of(two.pid)
        assert (name_of(second), second == zygote) == ("culm-zygote", False)
        assert (one.is_alive, parent_of(one.pid)) == (True, supervisor)
        # One that hangs is as good as dead.
        os.kill(second, signal.SIGSTOP)
        three = await launcher.launch(make_provision(tmp_path, "three"))
        assert three.pid is not None
        assert (is_alive(second), name_of(parent_of(three.pid))) == (False, "culm-zygote")
        # Whoever was forked by one that died is ended and collected as all others are.
        await one.kill()
        assert (one.is_alive, two.is_alive, is_alive(one.pid)) == (False, True, False)
    assert descendants_of(os.getpid(), read_table()) == []
    assert open_descriptors() == before


async def test_workers_outlive_the_keeper_their_commands_do_not_and_the_next_command_runs(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "one")
    said = Ear(os.open(tmp_path / "one", os.O_RDONLY | os.O_NONBLOCK))
    async with open_launcher(tmp_path, STAND_IN) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "one", "command"))
        assert worker.pid is not None
        first = await said.pid()
        supervisor = parent_of(parent_of(worker.pid))
        assert parent_of(parent_of(first)) == supervisor
        os.kill(supervisor, signal.SIGKILL)
        assert await said.line() == str(ProcessExit(None, lost=True))
        assert not is_alive(first)
        second = await said.pid()
        assert (worker.is_alive, is_alive(second)) == (True, True)
        assert parent_of(worker.pid) == os.getpid()
        # A new zygote hangs on the new keeper; the old one died with its own.
        other = await launcher.launch(make_provision(tmp_path, "two"))
        assert other.pid is not None
        assert parent_of(parent_of(other.pid)) == parent_of(parent_of(second))
        await worker.kill()
        assert (is_alive(worker.pid), is_alive(second)) == (False, False)
        await gone(worker.pid)
        assert worker.pid not in read_table()
    said.close()
    assert descendants_of(os.getpid(), read_table()) == []
