"""The promises of a link once more, with the worker a process of its own."""

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
from tests.live.fleet_desk import BOUND_S, until
from tests.live.fleet_program import ASKED
from tests.live.harness import ProcessServer, open_process, run_process
from tests.support import contract

WORKER = ("-m", "culm", "worker", "--no-auth")
PROGRAM = ("-m", "tests.live.fleet_program")
CANCELLED = TerminalFrame("cancelled")


class Parent:
    """One end of a link. Made by `open_parent`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def say(self, *frames: ParentFrame) -> None:
        for frame in frames:
            await self._link.send(encode_frame(frame))

    async def hear(self) -> ChildFrame | None:
        """The next frame; None at the end of the link."""
        async with asyncio.timeout(BOUND_S):
            data = await self._link.receive()
        return None if data is None else parse_child_frame(data)

    async def end(self) -> tuple[list[str], TerminalFrame]:
        """The tokens of a run, and its end."""
        tokens: list[str] = []
        while True:
            match await self.hear():
                case EventFrame(event):
                    tokens.append(msgspec.json.decode(event).get("content", ""))
                case TerminalFrame() as terminal:
                    return tokens, terminal
                case other:
                    raise AssertionError(f"nobody expected {other}")


@asynccontextmanager
async def open_parent(endpoint: str, token: str | None = None) -> AsyncGenerator[Parent]:
    async with asyncio.timeout(BOUND_S):
        link = await connect_websocket(endpoint, token)
    try:
        yield Parent(link)
    finally:
        await link.close()


def echoed(*words: str) -> tuple[list[str], TerminalFrame]:
    said = [f"{word} " for word in words]
    return [*said, ""], TerminalFrame("completed", result=f"echo: {' '.join(words)}")


@asynccontextmanager
async def open_echo(
    folder: Path, *, reusable: bool, idle_s: float | None = None
) -> AsyncGenerator[tuple[ProcessServer, AgentRecord]]:
    """`culm worker`, and where it said it is."""
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
        yield worker, await found(folder / "fabric", "echo")


async def found(fabric_dir: Path, role: str) -> AgentRecord:
    """Wait for the record of the only agent with that role."""
    discovery = FileDiscovery(fabric_dir, LoopClock())
    await until(lambda: bool(discovery.discover(role=role)), discovery.records)
    (record,) = discovery.discover(role=role)
    return record


@contract("FLEET-1", "FLEET-8")
async def test_a_worker_that_serves_one_sends_events_and_one_ending_and_is_gone(
    folder: Path,
) -> None:
    async with open_echo(folder, reusable=False) as (worker, record):
        assert (record.agent_id, record.pid) == ("child", worker.process.pid)
        async with open_parent(record.endpoint) as parent:
            await parent.say(RunSpec("one two"))
            assert await parent.end() == echoed("one", "two")
        ended = await worker.wait(BOUND_S)
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
        assert [*(folder / "fabric").iterdir()] == []
        with pytest.raises(ConnectFailed):
            await connect_websocket(record.endpoint)


@contract("FLEET-2", "FLEET-9")
async def test_a_reusable_worker_serves_one_after_the_other_and_leaves_when_nobody_comes(
    folder: Path,
) -> None:
    # A busy machine needs less to connect once more.
    async with open_echo(folder, reusable=True, idle_s=1.5) as (worker, record):
        for word in ("first", "second"):
            async with open_parent(record.endpoint) as parent:
                await parent.say(RunSpec(word))
                assert await parent.end() == echoed(word)
            again = await found(folder / "fabric", "echo")
            assert (again.pid, again.endpoint) == (worker.process.pid, record.endpoint)
        ended = await worker.wait(BOUND_S)
        assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")
        assert [*(folder / "fabric").iterdir()] == []


@contract("FLEET-3", "FLEET-4", "FLEET-7", "FLEET-29", "FLEET-P4")
async def test_steering_asking_and_superseding_work_with_a_program_of_ones_own(
    folder: Path,
) -> None:
    async with open_process(folder, *PROGRAM, "service") as worker, AsyncExitStack() as stack:
        await worker.until(lambda: bool(worker.lines), BOUND_S)
        (endpoint,) = worker.lines
        with pytest.raises(ConnectFailed, match="token"):
            await connect_websocket(endpoint)
        listens, asks, parks = [
            await stack.enter_async_context(open_parent(endpoint, "a-token")) for _ in range(3)
        ]
        await parks.say(RunSpec("park here"))
        first = await parks.hear()
        assert isinstance(first, EventFrame)
        assert msgspec.json.decode(first.event) == {"type": "token", "content": "park here"}

        await listens.say(RunSpec("listen"), SteerFrame("change course"))
        result = "steered: change course"
        assert await listens.end() == ([], TerminalFrame("completed", result=result))

        await asks.say(RunSpec("ask"))
        asked = await asks.hear()
        assert isinstance(asked, ApprovalRequest)
        assert msgspec.json.decode(asked.body, type=dict).items() >= ASKED.items()
        await listens.say(ApprovalReply(asked.id, approved=False))  # It is not theirs to answer.
        await asks.say(ApprovalReply("another", approved=False))
        await asks.say(ApprovalReply(asked.id, approved=True))
        assert await asks.end() == ([], TerminalFrame("completed", result="approved: True"))

        await parks.say(RunSpec("park there"))
        assert await parks.end() == ([], CANCELLED)
        await parks.say(Cancel())
        assert await parks.end() == (["park there"], CANCELLED)
        worker.process.send_signal(signal.SIGKILL)
        await worker.wait(BOUND_S)


@contract("FLEET-5", "FLEET-29")
async def test_connections_to_a_service_of_its_own_process_see_nothing_of_each_other(
    folder: Path,
) -> None:
    data = ("--data-dir", str(folder / "data"))
    serve = ("-m", "culm", "agent", "serve", "--role", "echo", "--executor", "echo", "--no-auth")
    async with open_process(folder, *serve, *data) as agent:
        record = await found(folder / "data" / "fabric", "echo")
        async with open_parent(record.endpoint) as one, open_parent(record.endpoint) as two:
            await one.say(RunSpec("__sleep_ms:300 alpha only"))
            await two.say(RunSpec("beta only"))
            assert await two.end() == echoed("beta", "only")
            assert await one.end() == echoed("alpha", "only")
            await one.say(RunSpec("__sleep_ms:60000 gamma"))
            await two.say(Cancel(), RunSpec("delta"))
            assert await two.end() == echoed("delta")
            await one.say(Cancel())
            assert await one.end() == ([], CANCELLED)
        ended = await agent.end(wait_s=BOUND_S)
        assert (ended.status, ended.stdout) == (0, "")
        assert [*(folder / "data" / "fabric").iterdir()] == []


@contract("FLEET-6")
async def test_a_worker_to_which_nobody_connects_says_so_and_is_gone(folder: Path) -> None:
    ended = await run_process(folder, *PROGRAM, "hasty")
    assert (ended.status, ended.stderr) == (1, "nobody connected within 0.05 s")
