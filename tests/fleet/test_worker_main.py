"""The worker process: refusals, discovery, and cleanup."""

import asyncio
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.fleet.discovery.base import LEASE_S, RENEW_S, AgentRecord, OwnerProcess, ProcessPlace
from culm.fleet.discovery.memory import MemoryDiscovery
from culm.fleet.executor import limit_error
from culm.fleet.provision import (
    PROVISION_BYTES_MAX,
    BadProvision,
    Capabilities,
    CliKind,
    CulmExtension,
    Identity,
    OwnerStamp,
    Provision,
    ProvisionLimits,
    Secrets,
    WorkerLimits,
    encode_provision,
    limits_of,
    storage_of,
)
from culm.fleet.transport.base import ConnectFailed
from culm.fleet.transport.websocket import connect_websocket
from culm.fleet.worker.lifecycle import (
    SETTLE_S,
    STORAGE_KEPT_S,
    make_record,
    mode_of,
    open_registration,
    remove_storage,
    work,
)
from culm.fleet.worker.main import run_worker
from culm.fleet.worker_server.connection import ServeInTurn, ServeOnce
from culm.processes.linux import find_stat
from tests.fleet.worker_harness import (
    assign,
    discovery_in,
    echoed,
    make_provision,
    open_descriptors,
    open_running_worker,
    receive,
    run,
    wait_for_record,
)
from tests.support import WAIT_S, FakeClock, contract

NO_TOKEN = b'{"version":2,"identity":{"child_id":"w"},"executor":{"kind":"echo"},"fabric_dir":"/f"}'


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "there is no provision on standard input"),
        (b"{", "the provision is not valid JSON"),
        (b"x" * (PROVISION_BYTES_MAX + 5), "the provision has more than 8 MiB"),
        (NO_TOKEN.replace(b"echo", b"warp"), "this worker knows echo, bamboo_runtime, cli_adapter"),
        (NO_TOKEN, "there is no secrets.worker_auth_token; `culm worker --no-auth` serves"),
    ],
)
def test_invalid_provision_exits_with_status_2_and_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], document: bytes, message: str
) -> None:
    file = tmp_path / "provision"
    file.write_bytes(document)
    descriptor = os.open(file, os.O_RDONLY)
    assert run_worker(descriptor) == 2
    assert os.read(descriptor, 1) == b""  # The document was consumed.
    os.close(descriptor)
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), err.startswith("culm worker: ")) == ("", 1, True)
    assert message in err


def test_unreadable_stdin_exits_with_status_2_and_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_worker(4000) == 2
    expected = "culm worker: standard input cannot be read: Bad file descriptor\n"
    assert capfd.readouterr() == ("", expected)


@asynccontextmanager
async def open_process(provision: Provision) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run `culm worker`; kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm", "worker"), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    process.stdin.write(encode_provision(provision))
    process.stdin.close()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contract("FLEET-8", "FLEET-9", "FLEET-54")
async def test_worker_process_serves_runs_and_withdraws_on_sigterm(
    tmp_path: Path,
) -> None:
    async with open_process(make_provision(tmp_path)) as process:
        record = await wait_for_record(tmp_path)
        assert (record.pid, record.role) == (process.pid, "tester")
        assert record.endpoint.startswith("ws://127.0.0.1:")
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        shown += Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"w1" not in shown.split(b"\0")
        assert b"worker-token" not in shown
        assert await run(record.endpoint, "hello world") == echoed("hello", "world")
        assert (await wait_for_record(tmp_path)).pid == process.pid
        assert await run(record.endpoint, "again") == echoed("again")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await process.communicate() == (b"", b"")
        assert process.returncode == 0
        assert [*(tmp_path / "fabric").iterdir()] == []


@contract("FLEET-12", "FLEET-49")
async def test_worker_is_found_by_its_record_and_requires_its_token(
    tmp_path: Path,
) -> None:
    before = open_descriptors()
    async with open_running_worker(make_provision(tmp_path)) as running:
        record = discovery_in(tmp_path).resolve("w1")
        stat = find_stat(os.getpid())
        assert stat is not None
        assert record is not None
        assert (record.endpoint, record.pid) == (running.endpoint, os.getpid())
        assert record.culm is not None
        assert (record.culm.start_ticks, record.culm.owner) == (stat.start_ticks, None)
        assert "token" not in (tmp_path / "fabric" / "w1.json").read_text()
        for token in (None, "wrong"):
            with pytest.raises(ConnectFailed, match="token"):
                await connect_websocket(running.endpoint, token)
        assert await run(running.endpoint, "hi") == echoed("hi")
        running.stop.set()
        await running.ended()
    assert discovery_in(tmp_path).resolve("w1") is None
    assert open_descriptors() <= before + 3  # The loop of a test keeps a few of its own.


@contract("FLEET-57", "FLEET-P11")
@pytest.mark.parametrize("mid_run", [False, True])
@pytest.mark.parametrize("by_socket", [False, True])
async def test_worker_ends_with_its_owner_idle_or_during_a_run(
    tmp_path: Path, *, by_socket: bool, mid_run: bool
) -> None:
    provision = make_provision(tmp_path)
    owner = await asyncio.create_subprocess_exec("sleep", "600")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if by_socket:
        provision = replace(provision, culm=CulmExtension(control_fd=theirs.detach()))
    else:
        theirs.close()
        stat = find_stat(owner.pid)
        assert stat is not None
        stamp = OwnerStamp(owner.pid, "i", "2026-11-16T00:00:00Z", stat.start_ticks)
        provision = replace(provision, owner=stamp)
    with ours:
        async with open_running_worker(provision) as running:
            if by_socket:
                assert ours.recv(4096) == f"ready {running.endpoint}".encode()
            record = await wait_for_record(tmp_path)
            link = await connect_websocket(running.endpoint, "worker-token")
            if mid_run:
                await assign(link, "__sleep_ms:600000 never")
            else:
                await link.close()
            owner.kill()
            ours.close()
            async with asyncio.timeout(WAIT_S):
                while mid_run and await link.receive() is not None:
                    pass
            await running.ended()
            await link.close()
        await owner.wait()
    assert record.culm is not None
    assert (record.culm.owner is None) == by_socket
    assert [*(tmp_path / "fabric").iterdir()] == []


async def test_worker_storage_is_removed_unless_its_place_was_given(tmp_path: Path) -> None:
    provision = make_provision(tmp_path, CliKind("true"))
    given = replace(provision, storage_dir=str(tmp_path / "given"))
    assert storage_of(provision) == tmp_path / "workers" / "w1"
    for one in (provision, given):
        async with open_running_worker(one) as running:
            assert not storage_of(one).exists()
            ended = {"kind": "terminal", "status": "completed", "result": ""}
            assert (await run(running.endpoint, ""))[-1] == ended
            assert storage_of(one).stat().st_mode & 0o777 == 0o700
    assert not storage_of(provision).exists()
    assert storage_of(given).exists()


def test_old_storage_of_killed_workers_is_removed(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    discovery = MemoryDiscovery(clock)
    discovery.publish(replace(own_record(clock), agent_id="living"))
    workers = tmp_path / "workers"
    for name in ("w1", "young", "living", "dead"):
        (workers / name / "inner").mkdir(parents=True)
    (workers / "link").symlink_to(tmp_path)
    (workers / "file").touch()
    old_s = clock.now_s() - STORAGE_KEPT_S - 1
    for name, at_s in (("young", old_s + 2), ("living", old_s), ("dead", old_s), ("file", old_s)):
        os.utime(workers / name, (at_s, at_s))
    remove_storage(make_provision(tmp_path), discovery, clock.now_s())
    assert sorted(one.name for one in workers.iterdir()) == ["file", "link", "living", "young"]


async def test_unsupported_provision_is_refused_before_registration(
    tmp_path: Path,
) -> None:
    read_only = Capabilities(read_only=True)
    provision = replace(make_provision(tmp_path, CliKind("true")), capabilities=read_only)
    with pytest.raises(BadProvision, match="read_only is refused"):
        await work(provision, asyncio.Event())
    closed = replace(make_provision(tmp_path), culm=CulmExtension(control_fd=4000))
    with pytest.raises(
        BadProvision, match="control_fd is not a control socket: Bad file descriptor"
    ):
        await work(closed, asyncio.Event())
    assert [*tmp_path.iterdir()] == []


# --- registration


class SlowDiscovery(MemoryDiscovery):
    """A discovery whose `publish` blocks until the test allows it."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.begun, self.may_write = threading.Event(), threading.Event()

    def publish(self, record: AgentRecord) -> None:
        self.begun.set()
        assert self.may_write.wait(WAIT_S)
        super().publish(record)


def own_record(clock: FakeClock) -> AgentRecord:
    return make_record(Identity("w1", role="r"), ["x"], "ws://e", None, clock.now_s())


def record_factory(clock: FakeClock) -> Callable[[], AgentRecord]:
    return lambda: own_record(clock)


async def test_record_written_late_does_not_survive_withdrawal() -> None:
    clock = FakeClock()
    discovery = SlowDiscovery(clock)

    async def let_it_write() -> None:
        for _ in range(20):  # By then the withdrawal has begun.
            await asyncio.sleep(0)
        discovery.may_write.set()

    async with (
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as group,
        open_registration(discovery, record_factory(clock), clock, at_once=False),
    ):
        await _until_armed(clock)
        clock.advance(SETTLE_S)
        await asyncio.to_thread(discovery.begun.wait)
        group.create_task(let_it_write())
    assert discovery.discover() == []


async def test_lease_is_renewed_while_a_worker_serves() -> None:
    clock = FakeClock()
    discovery = MemoryDiscovery(clock)
    async with open_registration(discovery, record_factory(clock), clock, at_once=True):
        first = discovery.resolve("w1")
        for _ in range(5):
            await _until_armed(clock)
            clock.advance(RENEW_S)
        await _until_armed(clock)
        later = discovery.resolve("w1")
    assert first is not None
    assert later is not None
    assert later == replace(first, lease_expires_at=later.lease_expires_at)
    assert (5 * RENEW_S > LEASE_S, discovery.discover()) == (True, [])


async def _until_armed(clock: FakeClock) -> None:
    async with asyncio.timeout(WAIT_S):
        while not clock.armed():
            await asyncio.sleep(0)


async def test_record_of_another_process_with_the_same_id_is_not_withdrawn() -> None:
    clock = FakeClock()
    discovery = MemoryDiscovery(clock)
    successor = replace(own_record(clock), pid=1)
    async with open_registration(discovery, record_factory(clock), clock, at_once=True):
        discovery.publish(successor)
    assert discovery.discover() == [successor]


def test_record_identifies_its_process_and_owner() -> None:
    stat = find_stat(os.getpid())
    assert stat is not None
    stamp = OwnerStamp(7, "i", "2026-11-16T00:00:00Z", 8)
    record = make_record(Identity("w1", role="r"), [], "ws://e", stamp, 0.0)
    assert isinstance(record.culm, ProcessPlace)
    assert (record.pid, record.culm.start_ticks, record.culm.owner) == (
        os.getpid(),
        stat.start_ticks,
        OwnerProcess(7, 8),
    )
    assert (record.started_at, record.lease_expires_at) == (
        "1970-01-01T00:00:00.000Z",
        "1970-01-01T00:01:00.000Z",
    )


# --- limits


@contract("FLEET-P6")
def test_worker_limits_come_from_its_provision(tmp_path: Path) -> None:
    plain = replace(make_provision(tmp_path), reusable=False, secrets=Secrets())
    assert (mode_of(plain), mode_of(replace(plain, reusable=True))) == (
        ServeOnce(120.0),
        ServeInTurn(300.0),
    )
    assert limits_of(plain) == WorkerLimits(depth=0, depth_max=4)
    limited = replace(
        plain,
        reusable=True,
        identity=Identity("w1", depth=2),
        limits=ProvisionLimits(1e300, 0.5),
        capabilities=Capabilities(max_spawn_depth=3),
        culm=CulmExtension(host_calls=True),
    )
    assert mode_of(limited) == ServeInTurn(0.5)
    ten_years_s = 315_360_000.0
    assert limits_of(limited) == WorkerLimits(
        host_calls=True, depth=2, depth_max=3, run_s=ten_years_s
    )
    assert limit_error("max_rounds", "8 rounds") == "limit:max_rounds: 8 rounds"


@contract("FLEET-P6")
async def test_run_over_its_time_limit_ends_in_a_machine_readable_error(
    tmp_path: Path,
) -> None:
    provision = replace(make_provision(tmp_path), limits=ProvisionLimits(run_timeout_secs=0.01))
    async with open_running_worker(provision) as running:
        link = await connect_websocket(running.endpoint, "worker-token")
        await assign(link, "__sleep_ms:600000 never")
        terminal = await receive(link)
        await link.close()
    assert (terminal["kind"], terminal["status"]) == ("terminal", "error")
    assert terminal["error"].startswith("limit:run_timeout: ")


@contract("FLEET-2")
async def test_idle_worker_leaves_after_its_timeout(tmp_path: Path) -> None:
    provision = replace(make_provision(tmp_path), limits=ProvisionLimits(idle_timeout_secs=0.01))
    async with open_running_worker(provision) as running:
        await running.ended()
        assert not running.stop.is_set()
    assert [*(tmp_path / "fabric").iterdir()] == []
