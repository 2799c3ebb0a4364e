"""A worker serves: what a parent sees of runs, over a real socket and over its twin."""

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
from culm.fleet.worker_server.base import (
    ConnectTimeout,
    ServeInTurn,
    ServeMany,
    ServeOnce,
    ServingSettings,
)
from culm.fleet.worker_server.modes import serve_on
from culm.ids import Ids
from culm.wire.codec import Json
from tests.fleet.links import (
    CANCEL,
    CANCELLED,
    KINDS,
    PANICKED,
    Kind,
    Parent,
    done,
    serving,
    tokens_of,
)
from tests.fleet.players import (
    Asks,
    Calls,
    Crashes,
    Deaf,
    Listens,
    Parks,
    Repeats,
    Stubborn,
    Tells,
)
from tests.support import WAIT_S, FakeClock, contract

both = pytest.mark.parametrize("kind", KINDS)


# --- modes


@both
@contract("FLEET-1", "FLEET-21")
async def test_a_run_gives_its_events_and_then_one_ending(kind: Kind) -> None:
    async with serving(kind, Repeats(), ServeOnce()) as connect:
        parent = await connect()
        frames = await parent.run("one two")
        assert {type(frame) for frame in frames[:-1]} == {EventFrame}
        assert (tokens_of(frames), frames[-1]) == (["one ", "two "], done("echo: one two"))
        frames = await parent.run("three four", epoch=3)
        assert {type(frame) for frame in frames[:-1]} == {EventBatch}
        assert (tokens_of(frames), frames[-1]) == (["three ", "four "], done("echo: three four"))


@both
@contract("FLEET-2", "FLEET-28")
async def test_a_reusable_worker_serves_one_after_the_other_and_ends_when_idle(
    kind: Kind,
) -> None:
    clock = FakeClock()
    async with serving(kind, Parks(), ServeInTurn(idle_s=0.4), clock) as connect:
        first, second = await connect(), await connect()
        await first.say(RunSpec("first"))
        await second.say(RunSpec("second"))
        assert tokens_of([await first.hear() or CANCELLED]) == ["first"]
        clock.advance(60.0)  # It is not idle, however long a run takes.
        await first.link.close()
        assert tokens_of([await second.hear() or CANCELLED]) == ["second"]
        await second.say(CANCEL)
        assert await second.until_ended() == [CANCELLED]
        clock.advance(60.0)  # Nor is it while somebody is connected.
        third = await connect()
        await second.link.close()
        await third.link.send(b"{")
        await third.link.close()
        fourth = await connect()
        await fourth.say(RunSpec("fourth"), CANCEL)
        assert (await fourth.until_ended())[-1] == CANCELLED
        await fourth.link.close()
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(0.5)


@both
@contract("FLEET-6")
async def test_a_worker_for_one_gives_up_when_nobody_comes_in_time(kind: Kind) -> None:
    clock = FakeClock()
    with pytest.RaisesGroup(ConnectTimeout):
        async with serving(kind, Repeats(), ServeOnce(accept_s=0.05), clock):
            while not clock.armed():
                await asyncio.sleep(0)
            clock.advance(0.06)


@both
@contract("FLEET-6")
async def test_the_time_to_connect_does_not_cut_who_has_connected(kind: Kind) -> None:
    clock = FakeClock()
    async with serving(kind, Listens(), ServeOnce(accept_s=0.05), clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("wait"))
        await asyncio.sleep(0)
        clock.advance(60.0)
        await parent.say(SteerFrame("go on"))
        assert await parent.until_ended() == [done("steered: go on")]


@both
@contract("FLEET-5", "FLEET-29")
async def test_runs_of_two_connections_do_not_hear_of_each_other(kind: Kind) -> None:
    async with serving(kind, Parks()) as connect:
        one, other = await connect(), await connect()
        await one.say(RunSpec("alpha"))
        await other.say(RunSpec("beta"))
        assert tokens_of([await one.hear() or CANCELLED]) == ["alpha"]
        assert tokens_of([await other.hear() or CANCELLED]) == ["beta"]
        await one.say(CANCEL)
        assert await one.until_ended() == [CANCELLED]
        await other.say(SteerFrame("nobody listens"))
        await one.link.close()
        await other.say(CANCEL)
        assert await other.until_ended() == [CANCELLED]


@both
async def test_a_service_takes_no_more_at_once_than_it_may_and_the_rest_later(kind: Kind) -> None:
    async with serving(kind, Parks(), ServeMany(connections_max=2)) as connect:
        parents = [await connect() for _ in range(3)]
        for number, parent in enumerate(parents):
            await parent.say(RunSpec(str(number)))
        for number, parent in enumerate(parents[:2]):
            assert tokens_of([await parent.hear() or CANCELLED]) == [str(number)]
        async with asyncio.TaskGroup() as group:
            hearing = group.create_task(parents[2].hear())
            for _ in range(20):
                await asyncio.sleep(0)
            assert not hearing.done()
            await parents[0].link.close()
            assert tokens_of([await hearing or CANCELLED]) == ["2"]


@contract("FLEET-28")
async def test_a_connection_that_fails_in_an_unforeseen_way_ends_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def carry(frame: bytes) -> Sequence[bytes]:
        if frame.startswith(b'{"kind":"terminal"'):
            raise ZeroDivisionError
        return [frame]

    terms = ServingSettings(LoopClock(), Ids(7))
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        listener = memory.MemoryListener("broken", carry)
        work = group.create_task(serve_on(listener, Repeats(), ServeInTurn(), terms))
        for word in ("one", "two"):
            parent = Parent(listener.connect())
            await parent.say(RunSpec(word))
            assert tokens_of(await parent.until_closed()) == [f"{word} "]
        work.cancel()
    said = [record.message for record in caplog.records if record.name.startswith("culm.")]
    assert said == ["a connection failed"] * 2


# --- what is said in the middle of a run


@both
@contract("FLEET-3", "FLEET-26")
async def test_a_message_reaches_the_active_run_and_garbage_changes_nothing(kind: Kind) -> None:
    async with serving(kind, Listens()) as connect:
        parent = await connect()
        await parent.say(SteerFrame("too early"), CANCEL)
        await parent.say(RunSpec("listen"))
        for garbage in (b"{", b'{"kind":"dance"}', b'{"kind":"message"}', b"[]", b"\xff", b""):
            await parent.link.send(garbage)
        await parent.link.send(b'{"kind":"message","text":"a","text":"b"}')
        await parent.say(SteerFrame("change course"))
        assert await parent.until_ended() == [done("steered: change course")]


@both
@contract("FLEET-4", "FLEET-27", "FLEET-P8")
async def test_an_ask_goes_up_with_its_deadline_and_the_first_answer_counts(kind: Kind) -> None:
    clock = FakeClock()
    executor = Asks(tool_name="Bash", resource="git push")
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("ask"))
        request = await parent.until_asked()
        assert request.id.startswith("sa-")
        assert decode(request.body) == {
            "tool_name": "Bash",
            "resource": "git push",
            "deadline": "2027-01-15T08:05:00.000Z",
        }
        await parent.say(ApprovalReply("sa-unknown", approved=False))
        await parent.say(ApprovalReply(request.id, approved=True))
        await parent.say(ApprovalReply(request.id, approved=False))
        assert await parent.until_ended() == [done("approved: true")]


@both
@contract("FLEET-P8", "FLEET-25")
async def test_an_ask_that_nobody_answers_in_time_is_refused_and_a_late_answer_is_logged(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    executor = Asks(deadline="2027-01-15T08:00:30Z")
    async with serving(kind, executor, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("ask"))
        request = await parent.until_asked()
        assert decode(request.body) == executor.body
        clock.advance(30.0)
        assert await parent.until_ended() == [done("approved: false")]
        await parent.say(ApprovalReply(request.id, approved=True))
        assert await parent.run("ask when it is too late") == [done("approved: false")]
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"an answer to no open ask was ignored: {request.id}"
    ]


@both
@contract("FLEET-27", "FLEET-30")
async def test_an_ask_of_a_host_that_left_is_refused_and_its_run_is_cancelled(kind: Kind) -> None:
    asking, parked = Asks(), Parks()
    async with serving(kind, asking) as connect:
        parent = await connect()
        await parent.say(RunSpec("ask"))
        await parent.until_asked()
        await parent.link.close()
        while not asking.answers:
            await asyncio.sleep(0)
        assert asking.answers == [False]
    async with serving(kind, parked) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await parent.hear()
        await parent.link.close()
        await parked.cancelled.wait()


@both
async def test_a_host_call_gives_the_hosts_result_or_its_reason(kind: Kind) -> None:
    async with serving(kind, Calls(op="list"), host_calls=True) as connect:
        parent = await connect()
        answers: list[tuple[Json, str]] = [
            ({"result": [1]}, "done: [1]"),
            ({"error": "no"}, "failed: no"),
            ([], "failed: the host's answer cannot be read"),
        ]
        for reply, result in answers:
            await parent.say(RunSpec("call"))
            call = await parent.hear()
            assert isinstance(call, SubAgentRequest)
            assert (call.tool_call_id, decode(call.args)) == ("call-1", {"op": "list"})
            await parent.say(SubAgentReply(call.id, reply))
            assert await parent.until_ended() == [done(result)]


@contract("FLEET-100")
async def test_a_host_call_is_refused_if_the_host_takes_none_or_the_tree_is_too_deep() -> None:
    async with serving("memory", Calls(op="list")) as connect:
        frames = await (await connect()).run("call")
        assert frames == [done("failed: this host takes no calls")]
    async with serving("memory", Calls(op="agent"), host_calls=True, depth=4) as connect:
        frames = await (await connect()).run("call")
        assert frames == [done("failed: agents nest at most 4 deep")]


# --- how runs end


@both
@contract("FLEET-7", "FLEET-P4")
async def test_a_second_run_supersedes_the_first_and_begins_after_its_ending(kind: Kind) -> None:
    async with serving(kind, Parks()) as connect:
        parent = await connect()
        await parent.say(RunSpec("one"))
        await parent.hear()
        await parent.say(RunSpec("two"), RunSpec("three"))
        assert await parent.until_ended() == [CANCELLED]
        assert await parent.until_ended() == [CANCELLED]
        assert tokens_of([await parent.hear() or CANCELLED]) == ["three"]
        await parent.say(CANCEL)
        assert await parent.until_ended() == [CANCELLED]


@both
@contract("FLEET-17", "FLEET-P5")
async def test_an_executor_that_hears_of_no_cancel_is_ended_after_the_grace(kind: Kind) -> None:
    clock, deaf = FakeClock(), Deaf()
    async with serving(kind, deaf, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await parent.hear()
        await parent.say(CANCEL)
        while not clock.armed():
            await asyncio.sleep(0)
        assert not deaf.ended.is_set()
        clock.advance(GRACE_S)
        assert await parent.until_ended() == [CANCELLED]
        assert deaf.ended.is_set()


@both
@contract("FLEET-18")
async def test_an_executor_that_hears_of_no_cancel_is_ended_when_its_host_is_gone(
    kind: Kind,
) -> None:
    clock, deaf = FakeClock(), Deaf()
    async with serving(kind, deaf, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await parent.hear()
        await parent.link.close()
        while not clock.armed():
            await asyncio.sleep(0)
        clock.advance(GRACE_S)
        await deaf.ended.wait()
        deaf.ended.clear()
        parent = await connect()
        await parent.say(RunSpec("go"))
        await parent.hear()
    assert deaf.ended.is_set()  # So it is when its worker is cancelled.


@both
@contract("FLEET-P4", "FLEET-P5")
async def test_a_run_that_cannot_be_ended_is_given_up_and_no_other_begins_beside_it(
    kind: Kind,
) -> None:
    clock, stubborn = FakeClock(), Stubborn()
    async with serving(kind, stubborn, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await parent.hear()
        await parent.say(RunSpec("next"))
        for _ in range(2):
            while not clock.armed():
                await asyncio.sleep(0)
            clock.advance(GRACE_S)
        stuck = TerminalFrame("error", error=STUCK.error)
        assert await parent.until_ended() == [CANCELLED]
        assert await parent.until_ended() == [stuck]
        assert await parent.run("another") == [stuck]
        stubborn.may_end.set()
        while (frames := await parent.run("and now"))[-1] == stuck:
            pass
        assert frames[-1] == done("at last")


@both
@contract("FLEET-19")
@pytest.mark.parametrize("how", ["raise", "cancel"])
async def test_an_executor_that_crashes_ends_its_run_and_nothing_else(kind: Kind, how: str) -> None:
    async with serving(kind, Crashes()) as connect:
        parent = await connect()
        for _ in range(2):
            frames = await parent.run(how)
            assert (tokens_of(frames), frames[-1]) == (["go"], PANICKED)


@both
@contract("FLEET-P6")
async def test_a_run_that_takes_too_long_ends_with_an_error_that_names_the_limit(
    kind: Kind,
) -> None:
    limit = TerminalFrame("error", error="limit:run_timeout: the run took longer than 20 s")
    for executor in (Parks(), Deaf()):
        clock = FakeClock()
        async with serving(kind, executor, clock=clock, run_s=20.0) as connect:
            parent = await connect()
            await parent.say(RunSpec("go"))
            await parent.hear()
            clock.advance(20.0)
            clock.advance(GRACE_S)
            assert await parent.until_ended() == [limit]


@both
@contract("FLEET-25")
async def test_after_its_run_returned_an_executor_can_say_and_ask_nothing(kind: Kind) -> None:
    tells = Tells([])
    async with serving(kind, tells, host_calls=True) as connect:
        parent = await connect()
        assert await parent.run("go") == [done("told")]
        assert tells.kept is not None
        assert tells.host is not None
        with pytest.raises(RunEnded):
            await tells.kept.emit({"type": "token"})
        assert await tells.host.ask({}) is False
        with pytest.raises((RunEnded, HostCallFailed)):
            await tells.host.call({})
        assert await parent.run("again") == [done("told")]
