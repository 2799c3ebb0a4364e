"""Launching: a provision becomes a ready worker, or an error with nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from culm.clock import LoopClock
from culm.fleet.discovery.base import AgentRecord, OwnerProcess, ProcessPlace, renewed
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.host.base import Launcher, LaunchFailed, NotReady
from culm.fleet.host.local import LaunchSettings, end_leftover_workers, open_foreign_launcher
from culm.fleet.host.startup import WORKER, make_stamp, open_document, python_argv, stamped
from culm.fleet.protocol.frames import TerminalFrame
from culm.fleet.provision import parse_provision
from culm.fleet.tail import KEPT_BYTES
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.processes.linux import descendants_of, find_stat, read_table, read_world_id
from tests.fleet.launch_harness import (
    BOUND_S,
    FAKE_WORKER,
    NO_ZYGOTE,
    make_provision,
    open_launcher,
    run_assignment,
)
from tests.processes.process_harness import is_alive, name_of, wait_until_gone
from tests.processes.test_escapes import open_descriptors, parent_of
from tests.support import contract


@asynccontextmanager
async def open_foreign(
    folder: Path, *argv: str, launch_s: float = BOUND_S
) -> AsyncGenerator[Launcher]:
    clock = LoopClock()
    (folder / "fabric").mkdir()
    async with (
        asyncio.timeout(BOUND_S),
        open_processes(folder, clock, Ids()) as processes,
        open_foreign_launcher(argv, processes, clock, launch_s) as launcher,
    ):
        yield launcher


@asynccontextmanager
async def open_launcher_kind(folder: Path, kind: str) -> AsyncGenerator[Launcher]:
    match kind:
        case "forked":
            async with open_launcher(folder) as launcher:
                yield launcher
        case "spawned":
            settings = LaunchSettings(zygote="sys.exit(1)")
            async with open_launcher(folder, settings) as launcher:
                yield launcher
        case _:
            async with open_foreign(folder, *python_argv(WORKER)) as launcher:
                yield launcher


def ticks_of(pid: int) -> int:
    stat = find_stat(pid)
    assert stat is not None
    return stat.start_ticks


def workers_below() -> int:
    """Count workers by exclusion: a spawned worker has the name of its interpreter."""
    others = {"culm-supervisor", "culm-zygote", "culm-prefork", "culm-shim"}
    below = descendants_of(os.getpid(), read_table())
    return sum(stat.is_alive and stat.comm not in others for stat in below)


@contract("FLEET-8", "FLEET-9")
@pytest.mark.parametrize(
    ("kind", "above"),
    [
        ("forked", "culm-zygote"),
        ("spawned", "culm-shim"),
        ("found by its record", "culm-shim"),
    ],
)
async def test_launched_worker_registers_and_runs_several_assignments(
    tmp_path: Path, kind: str, above: str
) -> None:
    discovery = FileDiscovery(tmp_path / "fabric", LoopClock())
    async with open_launcher_kind(tmp_path, kind) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "child"))
        assert worker.pid is not None
        assert name_of(parent_of(worker.pid)) == above
        for text in ("hello world", "once more"):
            events, end = await run_assignment(worker, text)
            tokens = [f'{{"type":"token","content":"{word} "}}' for word in text.split()]
            assert events == [*tokens, '{"type":"complete"}']
            assert end == TerminalFrame("completed", result=f"echo: {text}")
            while (record := discovery.resolve("child")) is None:
                await asyncio.sleep(0.005)  # With a control socket it is ready first.
            assert (record.agent_id, record.endpoint, record.pid) == (
                "child",
                worker.endpoint,
                worker.pid,
            )
            assert worker.endpoint.startswith("ws://127.0.0.1:")
            assert worker.is_alive
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(worker.kill())
        assert (worker.is_alive, is_alive(worker.pid)) == (False, False)
        assert discovery.records() == []


@contract("FLEET-53")
async def test_owner_and_token_are_stamped_on_a_copy_of_the_provision(
    tmp_path: Path,
) -> None:
    provision = make_provision(tmp_path, "child")
    before = msgspec.json.encode(provision)
    one, two = (stamped(provision, make_stamp(now_s), 3) for now_s in (1.5, 2.5))
    document = open_document(one)
    assert parse_provision(os.read(document, 1 << 20)) == one
    os.close(document)
    assert msgspec.json.encode(provision) == before
    assert (one.owner, two.owner) == (make_stamp(1.5), make_stamp(2.5))
    stamp = make_stamp(1.5)
    assert (stamp.process_id, stamp.process_start_id) == (os.getpid(), ticks_of(os.getpid()))
    assert stamp.instance_id == make_stamp(99).instance_id
    tokens = {given.secrets.worker_auth_token for given in (provision, one, two)}
    assert (len(tokens), one.culm.control_fd) == (3, 3)
    with_own = msgspec.structs.replace(provision, secrets=one.secrets)
    assert stamped(with_own, stamp, None).secrets == one.secrets


@contract("FLEET-55")
@pytest.mark.parametrize("settings", [FAKE_WORKER, NO_ZYGOTE], ids=["forked", "spawned"])
async def test_worker_that_fails_to_become_ready_is_reported_and_ended(
    tmp_path: Path, settings: LaunchSettings
) -> None:
    before = open_descriptors()
    ended = "the worker ended before it was ready:"
    reasons = {
        "refuse": (LaunchFailed, f"{ended} exit status 2\nculm worker: no such thing"),
        "crash": (NotReady, f"{ended} ended by SIGKILL"),
        "let go": (LaunchFailed, f"{ended} it closed its control socket"),
    }

    async def reason(launcher: Launcher, role: str) -> tuple[type[LaunchFailed], str]:
        with pytest.raises(LaunchFailed) as failure:
            await launcher.launch(make_provision(tmp_path, role.replace(" ", "-"), role))
        return type(failure.value), str(failure.value)

    async with open_launcher(tmp_path, settings) as launcher:
        assert (await launcher.launch(make_provision(tmp_path, "fine"))).is_alive
        async with asyncio.TaskGroup() as group:
            tasks = {role: group.create_task(reason(launcher, role)) for role in reasons}
        assert {role: task.result() for role, task in tasks.items()} == reasons
        assert workers_below() == 1
    assert open_descriptors() == before
    assert descendants_of(os.getpid(), read_table()) == []


@contract("FLEET-55")
async def test_worker_that_hangs_before_ready_is_ended_at_the_deadline(
    tmp_path: Path,
) -> None:
    async with open_launcher(tmp_path, replace(FAKE_WORKER, launch_s=1.0)) as launcher:
        output = ""
        while not output:  # On a busy machine the deadline may pass before the worker starts.
            with pytest.raises(NotReady) as failure:
                await launcher.launch(make_provision(tmp_path, "child", "hang"))
            first, _, output = str(failure.value).partition("\n")
            assert first == "the worker was not ready within 1 s and was killed"
            assert workers_below() == 0
        assert output == "about to hang"


@contract("FLEET-55")
async def test_foreign_worker_needs_a_live_record_and_its_exit_is_reported(
    tmp_path: Path,
) -> None:
    expired = AgentRecord(
        agent_id="child",
        role="",
        endpoint="ws://127.0.0.1:9",
        pid=1,
        started_at="2020-01-01T00:00:00Z",
        lease_expires_at="2020-01-01T00:01:00Z",
    )
    (tmp_path / "record").write_bytes(msgspec.json.encode(expired))
    copy = f"cp {tmp_path}/record {tmp_path}/fabric/child.json; echo here >&2; exec sleep 100"
    async with open_foreign(tmp_path, "sh", "-c", copy, launch_s=2.0) as launcher:
        with pytest.raises(LaunchFailed, match=r"not ready within 2 s and was killed\nhere"):
            await launcher.launch(make_provision(tmp_path, "child"))
        assert not (tmp_path / "fabric/child.json").exists()
    (tmp_path / "fabric").rmdir()
    script = "read -r line; echo got ${#line} >&2; exit 7"
    # The record of an earlier worker with the same name is not taken for this one.
    async with open_foreign(tmp_path, "bash", "-c", script) as launcher:
        FileDiscovery(tmp_path / "fabric", LoopClock()).publish(
            renewed(expired, LoopClock().now_s())
        )
        with pytest.raises(LaunchFailed, match=r"exit status 7\ngot [1-9]"):
            await launcher.launch(make_provision(tmp_path, "child"))
    assert descendants_of(os.getpid(), read_table()) == []


async def test_stderr_flood_does_not_block_and_only_its_tail_is_kept(tmp_path: Path) -> None:
    async with open_launcher(tmp_path, FAKE_WORKER) as launcher:
        worker = await launcher.launch(make_provision(tmp_path, "child", "flood"))
        await worker.kill()
        text = await worker.stderr_tail()
        assert (len(text), text[-10:]) == (KEPT_BYTES, "xxxthe end")


async def test_launch_canceled_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    async with open_launcher(tmp_path, FAKE_WORKER) as launcher:
        await (await launcher.launch(make_provision(tmp_path, "first"))).kill()
        before = open_descriptors()
        for turns in range(14):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(launcher.launch(make_provision(tmp_path, "child", "hang")))
                for _ in range(turns):
                    await asyncio.sleep(turns * 0.0005)
                task.cancel()
            assert task.cancelled()
        assert workers_below() == 0
        assert open_descriptors() == before


@pytest.mark.live
@contract("FLEET-57", "FLEET-P11")
async def test_workers_end_when_their_owner_is_killed(
    tmp_path: Path,
) -> None:
    command = (sys.executable, "-m", "tests.fleet.owner_process", str(tmp_path))
    async with asyncio.timeout(BOUND_S):
        owner = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert owner.stdout is not None
        try:
            pids = json.loads(await owner.stdout.readline())
            others = [stat.pid for stat in descendants_of(owner.pid, read_table())]
            assert [name for name, pid in pids.items() if not is_alive(pid)] == []
        finally:
            owner.kill()
            await owner.wait()
        await wait_until_gone(*pids.values(), *others)
        assert FileDiscovery(tmp_path / "fabric", LoopClock()).records() == []


def test_only_orphaned_workers_are_ended_at_the_next_start(
    tmp_path: Path,
) -> None:
    discovery = FileDiscovery(tmp_path, LoopClock())
    here, own = read_world_id(), os.getpid()
    alive = OwnerProcess(own, ticks_of(own))
    dead = OwnerProcess(own, ticks_of(own) + 1)  # Another process has its pid now.
    cases = {
        "left": (here, dead, False),
        "owned": (here, alive, True),
        "by-hand": (here, None, True),
        "elsewhere": ("another world", dead, True),
        "elsewhere-long-ago": ("another world", dead, True),
        "reused": (here, dead, True),
        "foreign": (None, None, True),
    }
    processes = {name: subprocess.Popen(["sleep", "100"], start_new_session=True) for name in cases}
    try:
        os.kill(processes["left"].pid, signal.SIGSTOP)
        for name, (world, owner, _) in cases.items():
            pid = processes[name].pid
            ticks = ticks_of(pid) + (name == "reused")
            record = AgentRecord(
                agent_id=name,
                role="",
                endpoint="ws://127.0.0.1:9",
                pid=pid,
                started_at="2020-01-01T00:00:00Z",
                lease_expires_at=f"{2020 if name != 'elsewhere' else 2999}-01-01T00:01:00Z",
                culm=None if world is None else ProcessPlace(ticks, world, owner),
            )
            discovery.publish(record)
        end_leftover_workers(tmp_path, LoopClock())
        lives = {name: is_alive(process.pid) for name, process in processes.items()}
        assert lives == {name: stays for name, (_, _, stays) in cases.items()}
        left = [record.agent_id for record in discovery.records()]
        assert left == ["by-hand", "elsewhere", "foreign", "owned"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
