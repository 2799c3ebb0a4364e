"""The worker server as its host sees it, over a real socket and over memory."""

import asyncio
import logging
from collections.abc import Sequence

import pytest
from msgspec.json import decode

from culm.clock import LoopClock
from culm.fleet.executor import HostCallFailed, RunEnded
from culm.fleet.protocol.frames import (
    ApprovalReply,
    EventBatch,
    EventFrame,
    RunSpec,
    SteerFrame,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
)
from culm.fleet.protocol.worker import GRACE_S, STUCK
from culm.fleet.transport import memory
from culm.fleet.worker_server.connection import (
    ConnectTimeout,
    ServeInTurn,
    ServeMany,
    ServeOnce,
    serve_on,
)
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from culm.wire.codec import Json
from tests.fleet.fake_executors import (
    AskingExecutor,
    CancelIgnoringExecutor,
    CrashingExecutor,
    EmittingExecutor,
    HostCallExecutor,
    RepeatingExecutor,
    SteeredExecutor,
    UnstoppableExecutor,
    WaitingExecutor,
)
from tests.fleet.link_harness import (
    CANCEL,
    CANCELLED,
    KINDS,
    PANICKED,
    FakeParent,
    Kind,
    done,
    serving,
    tokens_of,
)
from tests.support import WAIT_S, FakeClock, contract

both = pytest.mark.parametrize("kind", KINDS)


# --- modes


@both
@contract("FLEET-1", "FLEET-21")
async def test_run_sends_its_events_and_then_one_terminal(kind: Kind) -> None:
    async with serving(kind, RepeatingExecutor(), ServeOnce()) as connect:
        parent = await connect()
        frames = await parent.run("one two")
        assert {type(frame) for frame in frames[:-1]} == {EventFrame}
        assert (tokens_of(frames), frames[-1]) == (["one ", "two "], done("echo: one two"))
        frames = await parent.run("three four", epoch=3)
        assert {type(frame) for frame in frames[:-1]} == {EventBatch}
        assert (tokens_of(frames), frames[-1]) == (["three ", "four "], done("echo: three four"))


@both
@contract("FLEET-2", "FLEET-28")
async def test_reusable_worker_serves_in_turn_and_ends_when_idle(
    kind: Kind,
) -> None:
    clock = FakeClock()
    async with serving(kind, WaitingExecutor(), ServeInTurn(idle_s=0.4), clock) as connect:
        first, second = await connect(), await connect()
        await first.send(RunSpec("first"))
        await second.send(RunSpec("second"))
        assert tokens_of([await first.receive() or CANCELLED]) == ["first"]
        clock.advance(60.0)  # A long run is not idle time.
        await first.link.close()
        assert tokens_of([await second.receive() or CANCELLED]) == ["second"]
        await second.send(CANCEL)
        assert await second.until_ended() == [CANCELLED]
        clock.advance(60.0)  # Nor is time with an open connection.
        third = await connect()
        await second.link.close()
        await third.link.send(b"{")
        await third.link.close()
        fourth = await connect()
        await fourth.send(RunSpec("fourth"), CANCEL)
        assert (await fourth.until_ended())[-1] == CANCELLED
        await fourth.link.close()
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(0.5)


@both
@contract("FLEET-6")
async def test_single_use_worker_ends_without_a_connection_in_time(kind: Kind) -> None:
    clock = FakeClock()
    with pytest.RaisesGroup(ConnectTimeout):
        async with serving(kind, RepeatingExecutor(), ServeOnce(accept_s=0.05), clock):
            while not clock.armed():
                await asyncio.sleep(0)
            clock.advance(0.06)


@both
@contract("FLEET-6")
async def test_connect_timeout_does_not_affect_an_established_connection(kind: Kind) -> None:
    clock = FakeClock()
    async with serving(kind, SteeredExecutor(), ServeOnce(accept_s=0.05), clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("wait"))
        await asyncio.sleep(0)
        clock.advance(60.0)
        await parent.send(SteerFrame("go on"))
        assert await parent.until_ended() == [done("steered: go on")]


@both
@contract("FLEET-5", "FLEET-29")
async def test_runs_of_two_connections_are_independent(kind: Kind) -> None:
    async with serving(kind, WaitingExecutor()) as connect:
        one, other = await connect(), await connect()
        await one.send(RunSpec("alpha"))
        await other.send(RunSpec("beta"))
        assert tokens_of([await one.receive() or CANCELLED]) == ["alpha"]
        assert tokens_of([await other.receive() or CANCELLED]) == ["beta"]
        await one.send(CANCEL)
        assert await one.until_ended() == [CANCELLED]
        await other.send(SteerFrame("nobody listens"))
        await one.link.close()
        await other.send(CANCEL)
        assert await other.until_ended() == [CANCELLED]


@both
async def test_connections_over_the_limit_wait_until_one_closes(kind: Kind) -> None:
    async with serving(kind, WaitingExecutor(), ServeMany(connections_max=2)) as connect:
        parents = [await connect() for _ in range(3)]
        for number, parent in enumerate(parents):
            await parent.send(RunSpec(str(number)))
        for number, parent in enumerate(parents[:2]):
            assert tokens_of([await parent.receive() or CANCELLED]) == [str(number)]
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(parents[2].receive())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not receiving.done()
            await parents[0].link.close()
            assert tokens_of([await receiving or CANCELLED]) == ["2"]


@contract("FLEET-28")
async def test_unexpected_connection_error_ends_only_that_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def carry(frame: bytes) -> Sequence[bytes]:
        if frame.startswith(b'{"kind":"terminal"'):
            raise ZeroDivisionError
        return [frame]

    settings = ServingSettings(LoopClock(), Ids(7))
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        listener = memory.MemoryListener("broken", carry)
        work = group.create_task(serve_on(listener, RepeatingExecutor(), ServeInTurn(), settings))
        for word in ("one", "two"):
            parent = FakeParent(listener.connect())
            await parent.send(RunSpec(word))
            assert tokens_of(await parent.until_closed()) == [f"{word} "]
        work.cancel()
    messages = [record.message for record in caplog.records if record.name.startswith("culm.")]
    assert messages == ["a connection failed"] * 2


# --- messages during a run


@both
@contract("FLEET-3", "FLEET-26")
async def test_message_reaches_the_active_run_and_garbage_is_ignored(kind: Kind) -> None:
    async with serving(kind, SteeredExecutor()) as connect:
        parent = await connect()
        await parent.send(SteerFrame("too early"), CANCEL)
        await parent.send(RunSpec("listen"))
        for garbage in (b"{", b'{"kind":"dance"}', b'{"kind":"message"}', b"[]", b"\xff", b""):
            await parent.link.send(garbage)
        await parent.link.send(b'{"kind":"message","text":"a","text":"b"}')
        await parent.send(SteerFrame("change course"))
        assert await parent.until_ended() == [done("steered: change course")]


@both
@contract("FLEET-4", "FLEET-27", "FLEET-P8")
async def test_ask_is_sent_with_a_deadline_and_the_first_answer_counts(kind: Kind) -> None:
    clock = FakeClock()
    executor = AskingExecutor(tool_name="Bash", resource="git push")
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("ask"))
        request = await parent.until_asked()
        assert request.id.startswith("sa-")
        assert decode(request.body) == {
            "tool_name": "Bash",
            "resource": "git push",
            "deadline": "2027-01-15T08:05:00.000Z",
        }
        await parent.send(ApprovalReply("sa-unknown", approved=False))
        await parent.send(ApprovalReply(request.id, approved=True))
        await parent.send(ApprovalReply(request.id, approved=False))
        assert await parent.until_ended() == [done("approved: true")]


@both
@contract("FLEET-P8", "FLEET-25")
async def test_unanswered_ask_is_refused_and_a_late_answer_is_logged(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    executor = AskingExecutor(deadline="2027-01-15T08:00:30Z")
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("ask"))
        request = await parent.until_asked()
        assert decode(request.body) == executor.body
        clock.advance(30.0)
        assert await parent.until_ended() == [done("approved: false")]
        await parent.send(ApprovalReply(request.id, approved=True))
        assert await parent.run("ask when it is too late") == [done("approved: false")]
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"an answer to no open ask was ignored: {request.id}"
    ]


@both
@contract("FLEET-27", "FLEET-30")
async def test_ask_is_refused_and_run_canceled_when_the_host_leaves(kind: Kind) -> None:
    asker, parked = AskingExecutor(), WaitingExecutor()
    async with serving(kind, asker) as connect:
        parent = await connect()
        await parent.send(RunSpec("ask"))
        await parent.until_asked()
        await parent.link.close()
        while not asker.answers:
            await asyncio.sleep(0)
        assert asker.answers == [False]
    async with serving(kind, parked) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await parent.receive()
        await parent.link.close()
        await parked.cancelled.wait()


@both
async def test_host_call_returns_the_hosts_result_or_its_error(kind: Kind) -> None:
    async with serving(kind, HostCallExecutor(op="list"), host_calls=True) as connect:
        parent = await connect()
        answers: list[tuple[Json, str]] = [
            ({"result": [1]}, "done: [1]"),
            ({"error": "no"}, "failed: no"),
            ([], "failed: the host's answer cannot be read"),
        ]
        for reply, result in answers:
            await parent.send(RunSpec("call"))
            call = await parent.receive()
            assert isinstance(call, SubAgentRequest)
            assert (call.tool_call_id, decode(call.args)) == ("call-1", {"op": "list"})
            await parent.send(SubAgentReply(call.id, reply))
            assert await parent.until_ended() == [done(result)]


@contract("FLEET-100")
async def test_host_call_is_refused_by_a_host_without_calls_or_at_max_depth() -> None:
    async with serving("memory", HostCallExecutor(op="list")) as connect:
        frames = await (await connect()).run("call")
        assert frames == [done("failed: this host does not accept calls")]
    async with serving("memory", HostCallExecutor(op="agent"), host_calls=True, depth=4) as connect:
        frames = await (await connect()).run("call")
        assert frames == [done("failed: agents nest at most 4 deep")]


# --- endings


@both
@contract("FLEET-7", "FLEET-P4")
async def test_second_run_supersedes_the_first_and_starts_after_its_end(kind: Kind) -> None:
    async with serving(kind, WaitingExecutor()) as connect:
        parent = await connect()
        await parent.send(RunSpec("one"))
        await parent.receive()
        await parent.send(RunSpec("two"), RunSpec("three"))
        assert await parent.until_ended() == [CANCELLED]
        assert await parent.until_ended() == [CANCELLED]
        assert tokens_of([await parent.receive() or CANCELLED]) == ["three"]
        await parent.send(CANCEL)
        assert await parent.until_ended() == [CANCELLED]


@both
@contract("FLEET-17", "FLEET-P5")
async def test_executor_ignoring_cancel_is_ended_after_the_grace_period(kind: Kind) -> None:
    clock, executor = FakeClock(), CancelIgnoringExecutor()
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await parent.receive()
        await parent.send(CANCEL)
        while not clock.armed():
            await asyncio.sleep(0)
        assert not executor.ended.is_set()
        clock.advance(GRACE_S)
        assert await parent.until_ended() == [CANCELLED]
        assert executor.ended.is_set()


@both
@contract("FLEET-18")
async def test_executor_ignoring_cancel_is_ended_after_its_host_leaves(
    kind: Kind,
) -> None:
    clock, executor = FakeClock(), CancelIgnoringExecutor()
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await parent.receive()
        await parent.link.close()
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(GRACE_S)
        await executor.ended.wait()
        executor.ended.clear()
        parent = await connect()
        await parent.send(RunSpec("go"))
        await parent.receive()
    assert executor.ended.is_set()  # Also when its worker is cancelled.


@both
@contract("FLEET-P4", "FLEET-P5")
async def test_run_that_cannot_be_ended_is_abandoned_and_blocks_new_runs(
    kind: Kind,
) -> None:
    clock, executor = FakeClock(), UnstoppableExecutor()
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await parent.receive()
        await parent.send(RunSpec("next"))
        for _ in range(2):
            while not clock.armed():
                await asyncio.sleep(0)
            clock.advance(GRACE_S)
        stuck = TerminalFrame("error", error=STUCK.error)
        assert await parent.until_ended() == [CANCELLED]
        assert await parent.until_ended() == [stuck]
        assert await parent.run("another") == [stuck]
        executor.may_end.set()
        while (frames := await parent.run("and now"))[-1] == stuck:
            pass
        assert frames[-1] == done("at last")


@both
@contract("FLEET-19")
@pytest.mark.parametrize("how", ["raise", "cancel"])
async def test_crashing_executor_ends_only_its_run(kind: Kind, how: str) -> None:
    async with serving(kind, CrashingExecutor()) as connect:
        parent = await connect()
        for _ in range(2):
            frames = await parent.run(how)
            assert (tokens_of(frames), frames[-1]) == (["go"], PANICKED)


@both
@contract("FLEET-P6")
async def test_run_over_its_time_limit_ends_with_an_error_naming_the_limit(
    kind: Kind,
) -> None:
    limit = TerminalFrame("error", error="limit:run_timeout: the run took longer than 20 s")
    for executor in (WaitingExecutor(), CancelIgnoringExecutor()):
        clock = FakeClock()
        async with serving(kind, executor, clock=clock, run_s=20.0) as connect:
            parent = await connect()
            await parent.send(RunSpec("go"))
            await parent.receive()
            clock.advance(20.0)
            clock.advance(GRACE_S)
            assert await parent.until_ended() == [limit]


@both
@contract("FLEET-25")
async def test_executor_cannot_emit_or_ask_after_its_run_returned(kind: Kind) -> None:
    executor = EmittingExecutor([])
    async with serving(kind, executor, host_calls=True) as connect:
        parent = await connect()
        assert await parent.run("go") == [done("told")]
        assert executor.sink is not None
        assert executor.host is not None
        with pytest.raises(RunEnded):
            await executor.sink.emit({"type": "token"})
        assert await executor.host.ask({}) is False
        with pytest.raises((RunEnded, HostCallFailed)):
            await executor.host.call({})
        assert await parent.run("again") == [done("told")]
