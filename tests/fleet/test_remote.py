"""Remote workers: only a link is made to them, and only with the right token."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import LoopClock
from culm.fleet.executor import completed
from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.caller import DenyAll, RunControl
from culm.fleet.host.dispatch import open_fleet
from culm.fleet.host.remote import ConnectLauncher
from culm.fleet.host.run_driver import RunResult, drive
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import (
    LocalPlacement,
    Placement,
    Provision,
    RemotePlacement,
    SchedulablePlacement,
    Secrets,
)
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.tls import ServerTls
from culm.fleet.transport.websocket import connect_websocket, listen_websocket
from culm.fleet.worker.executors.echo import EchoExecutor
from culm.fleet.worker_server.connection import Mode, ServeInTurn, ServeMany, ServeOnce, serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from tests.certificates import make_certificate
from tests.fleet.host_harness import FakeLauncher, in_time, provision
from tests.support import WAIT_S, FakeClock, contract

TOKEN = "a token"


@asynccontextmanager
async def open_resident(mode: Mode, tls: ServerTls | None = None) -> AsyncGenerator[str]:
    """Serve a worker that exists before any launch; yield its endpoint."""
    clock = LoopClock()
    settings = ServingSettings(clock, Ids(1))
    async with asyncio.TaskGroup() as tasks, listen_websocket(token=TOKEN, tls=tls) as listener:
        serving = tasks.create_task(serve_on(listener, EchoExecutor(clock), mode, settings))
        try:
            yield listener.endpoint
        finally:
            serving.cancel()


def at(placement: Placement, token: str | None = TOKEN) -> Provision:
    return replace(provision("far"), placement=placement, secrets=Secrets(worker_auth_token=token))


async def echo(link: Link, text: str) -> RunResult:
    try:
        return await in_time(drive(link, RunSpec(text), DenyAll(), RunControl(), FakeClock()))
    finally:
        await link.close()


def echoed(text: str) -> RunResult:
    return RunResult(completed(f"echo: {text}"), began=True, is_from_worker=True)


@contract("FLEET-10")
@pytest.mark.parametrize("mode", [ServeInTurn(), ServeMany()])
async def test_resident_worker_is_connected_and_outlives_its_handle(mode: Mode) -> None:
    async with open_resident(mode) as endpoint:
        worker = await in_time(ConnectLauncher().launch(at(RemotePlacement(endpoint))))
        assert (worker.id, worker.endpoint, worker.pid) == ("far", endpoint, None)
        assert await echo(await in_time(worker.connect()), "one") == echoed("one")
        await worker.kill()
        assert worker.is_alive
        assert await worker.stderr_tail() == ""
        assert await echo(await in_time(worker.connect()), "two") == echoed("two")


async def test_link_from_the_launch_check_is_used_or_closed() -> None:
    async with open_resident(ServeOnce()) as endpoint:
        worker = await in_time(ConnectLauncher().launch(at(RemotePlacement(endpoint))))
        assert await echo(await in_time(worker.connect()), "only once") == echoed("only once")
    async with open_resident(ServeInTurn()) as endpoint:
        worker = await in_time(ConnectLauncher().launch(at(RemotePlacement(endpoint))))
        await in_time(worker.kill())
        assert await echo(await in_time(worker.connect()), "again") == echoed("again")


@contract("FLEET-11", "FLEET-12")
@pytest.mark.parametrize("token", [None, "another"])
async def test_launch_without_the_right_token_fails(token: str | None) -> None:
    async with open_resident(ServeMany()) as endpoint:
        with pytest.raises(LaunchFailed, match="the token was refused"):
            await in_time(ConnectLauncher().launch(at(RemotePlacement(endpoint), token)))
        with pytest.raises(ConnectFailed, match="the token was refused"):
            await in_time(connect_websocket(endpoint, token))


@contract("FLEET-56")
@pytest.mark.parametrize("placement", [LocalPlacement(), SchedulablePlacement("pool")])
async def test_placement_that_is_not_remote_is_refused(placement: Placement) -> None:
    with pytest.raises(LaunchFailed, match="the placement is not remote"):
        await ConnectLauncher().launch(at(placement))


@contract("FLEET-13")
async def test_pinned_certificate_is_trusted_only_at_its_endpoint(
    tmp_path: Path,
) -> None:
    cert, key = await make_certificate(tmp_path, "IP:127.0.0.1", WAIT_S)
    async with open_resident(ServeMany(), ServerTls(cert, key)) as endpoint:
        assert endpoint.startswith("wss://")
        worker = await in_time(
            ConnectLauncher({endpoint: cert}).launch(at(RemotePlacement(endpoint)))
        )
        assert await echo(await in_time(worker.connect()), "tls hello") == echoed("tls hello")
        with pytest.raises(LaunchFailed):
            await in_time(ConnectLauncher().launch(at(RemotePlacement(endpoint))))


@contract("FLEET-10")
async def test_fleet_sends_a_remote_run_and_starts_nothing_locally() -> None:
    async with open_resident(ServeInTurn()) as endpoint, asyncio.TaskGroup() as tasks:
        launcher = FakeLauncher(tasks)
        async with open_fleet(launcher, FakeClock()) as fleet:
            for text in ("one", "two"):
                run = fleet.run(
                    at(RemotePlacement(endpoint)), RunSpec(text), DenyAll(), RunControl()
                )
                assert await in_time(run) == echoed(text)
        assert launcher.workers == []
