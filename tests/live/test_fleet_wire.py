"""The contract of a link, with the worker as a separate process."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from culm.clock import LoopClock
from culm.fleet.discovery.base import AgentRecord
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.protocol.frames import (
    ApprovalReply,
    ApprovalRequest,
    Cancel,
    ChildFrame,
    EventFrame,
    ParentFrame,
    RunSpec,
    SteerFrame,
    TerminalFrame,
    encode_frame,
    parse_child_frame,
)
from culm.fleet.provision import EchoKind, Identity, Provision, ProvisionLimits, encode_provision
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.websocket import connect_websocket
from tests.live.fleet_harness import BOUND_S, until
from tests.live.fleet_program import ASKED
from tests.live.harness import ProcessServer, open_process, run_process
from tests.support import contract

WORKER = ("-m", "culm", "worker", "--no-auth")
PROGRAM = ("-m", "tests.live.fleet_program")
CANCELLED = TerminalFrame("cancelled")


class Host:
    """One end of a link. Made by `open_host`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def send(self, *frames: ParentFrame) -> None:
        for frame in frames:
            await self._link.send(encode_frame(frame))

    async def receive(self) -> ChildFrame | None:
        """The next frame; None at the end of the link."""
        async with asyncio.timeout(BOUND_S):
            data = await self._link.receive()
        return None if data is None else parse_child_frame(data)

    async def end(self) -> tuple[list[str], TerminalFrame]:
        """The tokens of a run, and its end."""
        tokens: list[str] = []
        while True:
            match await self.receive():
                case EventFrame(event):
                    tokens.append(msgspec.json.decode(event).get("content", ""))
                case TerminalFrame() as terminal:
                    return tokens, terminal
                case other:
                    raise AssertionError(f"unexpected frame: {other}")


@asynccontextmanager
async def open_host(endpoint: str, token: str | None = None) -> AsyncGenerator[Host]:
    async with asyncio.timeout(BOUND_S):
        link = await connect_websocket(endpoint, token)
    try:
        yield Host(link)
    finally:
        await link.close()


def echoed(*parts: str) -> tuple[list[str], TerminalFrame]:
    tokens = [f"{part} " for part in parts]
    return [*tokens, ""], TerminalFrame("completed", result=f"echo: {' '.join(parts)}")


@asynccontextmanager
async def open_echo(
    folder: Path, *, reusable: bool, idle_s: float | None = None
) -> AsyncGenerator[tuple[ProcessServer, AgentRecord]]:
    """`culm worker`, and the record that it announced."""
    provision = Provision(
        2,
        Identity("child", role="echo"),
        EchoKind(),
        str(folder / "fabric"),
        limits=ProvisionLimits(idle_timeout_secs=idle_s),
        reusable=reusable,
    )
    async with open_process(folder, *WORKER) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.write(encode_provision(provision))
        worker.process.stdin.close()
        yield worker, await discovered(folder / "fabric", "echo")


async def discovered(fabric_dir: Path, role: str) -> AgentRecord:
    """Wait for the record of the only agent with that role."""
    discovery = FileDiscovery(fabric_dir, LoopClock())
    await until(lambda: bool(discovery.discover(role=role)), discovery.records)
    (record,) = discovery.discover(role=role)
    return record


@contract("FLEET-1", "FLEET-8")
async def test_single_use_worker_sends_events_and_one_terminal_frame_then_exits(
    folder: Path,
) -> None:
    async with open_echo(folder, reusable=False) as (worker, record):
        assert (record.agent_id, record.pid) == ("child", worker.process.pid)
        async with open_host(record.endpoint) as host:
            await host.send(RunSpec("one two"))
            assert await host.end() == echoed("one", "two")
        ended = await worker.wait(BOUND_S)
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
        assert [*(folder / "fabric").iterdir()] == []
        with pytest.raises(ConnectFailed):
            await connect_websocket(record.endpoint)


@contract("FLEET-2", "FLEET-9")
async def test_reusable_worker_serves_hosts_in_turn_and_exits_when_idle(
    folder: Path,
) -> None:
    # Longer than a busy machine needs to connect again.
    async with open_echo(folder, reusable=True, idle_s=1.5) as (worker, record):
        for word in ("first", "second"):
            async with open_host(record.endpoint) as host:
                await host.send(RunSpec(word))
                assert await host.end() == echoed(word)
            again = await discovered(folder / "fabric", "echo")
            assert (again.pid, again.endpoint) == (worker.process.pid, record.endpoint)
        ended = await worker.wait(BOUND_S)
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
        assert [*(folder / "fabric").iterdir()] == []


@contract("FLEET-3", "FLEET-4", "FLEET-7", "FLEET-29", "FLEET-P4")
async def test_steer_approval_and_superseding_work_with_a_user_program(
    folder: Path,
) -> None:
    async with open_process(folder, *PROGRAM, "service") as worker, AsyncExitStack() as stack:
        await worker.until(lambda: bool(worker.lines), BOUND_S)
        (endpoint,) = worker.lines
        with pytest.raises(ConnectFailed, match="token"):
            await connect_websocket(endpoint)
        listens, asks, parks = [
            await stack.enter_async_context(open_host(endpoint, "a-token")) for _ in range(3)
        ]
        await parks.send(RunSpec("park here"))
        first = await parks.receive()
        assert isinstance(first, EventFrame)
        assert msgspec.json.decode(first.event) == {"type": "token", "content": "park here"}

        await listens.send(RunSpec("listen"), SteerFrame("change course"))
        result = "steered: change course"
        assert await listens.end() == ([], TerminalFrame("completed", result=result))

        await asks.send(RunSpec("ask"))
        asked = await asks.receive()
        assert isinstance(asked, ApprovalRequest)
        assert msgspec.json.decode(asked.body, type=dict).items() >= ASKED.items()
        await listens.send(ApprovalReply(asked.id, approved=False))  # From the wrong connection.
        await asks.send(ApprovalReply("another", approved=False))
        await asks.send(ApprovalReply(asked.id, approved=True))
        assert await asks.end() == ([], TerminalFrame("completed", result="approved: True"))

        await parks.send(RunSpec("park there"))
        assert await parks.end() == ([], CANCELLED)
        await parks.send(Cancel())
        assert await parks.end() == (["park there"], CANCELLED)
        worker.process.send_signal(signal.SIGKILL)
        await worker.wait(BOUND_S)


@contract("FLEET-5", "FLEET-29")
async def test_connections_to_one_agent_service_are_isolated(
    folder: Path,
) -> None:
    data = ("--data-dir", str(folder / "data"))
    serve = ("-m", "culm", "agent", "serve", "--role", "echo", "--executor", "echo", "--no-auth")
    async with open_process(folder, *serve, *data) as agent:
        record = await discovered(folder / "data" / "fabric", "echo")
        async with open_host(record.endpoint) as one, open_host(record.endpoint) as two:
            await one.send(RunSpec("__sleep_ms:300 alpha only"))
            await two.send(RunSpec("beta only"))
            assert await two.end() == echoed("beta", "only")
            assert await one.end() == echoed("alpha", "only")
            await one.send(RunSpec("__sleep_ms:60000 gamma"))
            await two.send(Cancel(), RunSpec("delta"))
            assert await two.end() == echoed("delta")
            await one.send(Cancel())
            assert await one.end() == ([], CANCELLED)
        ended = await agent.end(wait_s=BOUND_S)
        assert (ended.status, ended.stdout) == (0, "")
        assert [*(folder / "data" / "fabric").iterdir()] == []


@contract("FLEET-6")
async def test_worker_without_a_connection_reports_it_and_exits(folder: Path) -> None:
    ended = await run_process(folder, *PROGRAM, "hasty")
    assert (ended.status, ended.stderr) == (1, "no host connected within 0.05 s")
