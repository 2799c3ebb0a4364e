"""One run over its link: steering its worker, and ending a run by cancel or timeout."""

import asyncio

import pytest
from msgspec import Raw
from msgspec.structs import replace

from culm.errors import LimitExceeded, TooLarge
from culm.fleet.executor import CANCELLED, Outcome, SteerMessage, completed, failed
from culm.fleet.host.caller import STEER_CHARS_MAX, STEERS_MAX, DenyAll, RunControl
from culm.fleet.host.run_driver import (
    CANCEL_S,
    FIRST_FRAME_S,
    LAST_FRAMES_S,
    OVERTIME_S,
    RunResult,
    drive,
)
from culm.fleet.protocol.frames import (
    ApprovalRequest,
    Cancel,
    ChildFrame,
    EventFrame,
    RunSpec,
    SteerFrame,
    TerminalFrame,
    encode_frame,
)
from culm.fleet.provision import WorkerLimits
from culm.fleet.transport.base import LinkLost
from culm.fleet.transport.memory import FRAMES_MAX, MemoryLink, memory_pair
from tests.fleet.host_harness import (
    CLEAN,
    DONE,
    OURS,
    RUN,
    RecordingCallbacks,
    batch,
    in_time,
    never,
    open_drive_harness,
    raw,
    run_pending,
    token,
)
from tests.support import FakeClock, contract


def admitted(steer_id: str) -> EventFrame:
    return EventFrame(Raw(b'{"type":"message_admitted","id":"%s"}' % steer_id.encode()))


# --- steering


async def test_steer_messages_before_and_during_the_run_arrive_in_order() -> None:
    controls = RunControl()
    assert controls.steer("one", id="1")
    async with open_drive_harness(DenyAll(), controls, OURS) as harness:
        assert [await harness.receive(), await harness.receive()] == [RUN, SteerFrame("one", "1")]
        assert controls.steer("two", id="2")
        assert controls.steer("three \ud800")
        assert [await harness.receive(), await harness.receive()] == [
            SteerFrame("two", "2"),
            SteerFrame("three \ufffd"),
        ]
        await harness.send(admitted("1"), DONE)
        result = await harness.end()
    assert result == replace(CLEAN, unadmitted=(SteerMessage("two", "2"),))
    assert controls.unadmitted == result.unadmitted
    assert not controls.steer("four")
    controls.cancel()
    assert not controls.is_cancelled


async def test_messages_to_a_worker_that_never_began_go_to_the_next_one() -> None:
    controls = RunControl()
    controls.steer("one")
    async with open_drive_harness(DenyAll(), controls) as harness:
        assert [await harness.receive(), await harness.receive()] == [RUN, SteerFrame("one")]
        controls.steer("two")
        assert await harness.receive() == SteerFrame("two")
        await harness.link.close()
        assert (await harness.end()).began is False
    controls.steer("three")
    async with open_drive_harness(DenyAll(), controls) as harness:
        received = [await harness.receive() for _ in range(4)]
    assert received == [RUN, SteerFrame("one"), SteerFrame("two"), SteerFrame("three")]


async def test_admitted_message_is_not_returned() -> None:
    async with open_drive_harness(DenyAll(), limits=OURS) as harness:
        await harness.receive()
        harness.controls.steer("one", id="1")
        await harness.receive()
        await harness.send(admitted("1"), DONE)
        assert await harness.end() == CLEAN


async def test_message_counts_as_admitted_only_after_the_callback_ran() -> None:
    callbacks, controls = RecordingCallbacks(), RunControl()
    spec = RunSpec("do it", execution_epoch=1)
    both = batch(1, "durable", b'{"type":"tool_start"}', bytes(admitted("1").event))
    async with open_drive_harness(callbacks, controls, OURS, spec) as harness:
        await harness.receive()
        controls.steer("one", id="1")
        await harness.receive()
        callbacks.may_continue.clear()
        await harness.send(both)
        await run_pending()
        harness.task.cancel()
        await asyncio.wait({harness.task})
    assert controls.unadmitted == (SteerMessage("one", "1"),)
    assert controls.has_begun


@pytest.mark.parametrize("has_begun_first", [True, False])
async def test_unadmitted_messages_are_limited(*, has_begun_first: bool) -> None:
    controls = RunControl()
    async with open_drive_harness(DenyAll(), controls, OURS) as harness:
        await harness.receive()
        if has_begun_first:
            await harness.send(token("a"))
        for n in range(STEERS_MAX):
            assert controls.steer("x", id=str(n))
            assert await harness.receive() == SteerFrame("x", str(n))
        for n in range(STEERS_MAX):
            assert controls.steer("y", id=f"later {n}")
        await harness.assert_nothing_sent()
        with pytest.raises(LimitExceeded):
            controls.steer("one more")
        await harness.send(admitted("0"), admitted("1"))
        assert await harness.receive() == SteerFrame("y", "later 0")
        await harness.send(DONE)
        assert len((await harness.end()).unadmitted) == 2 * STEERS_MAX - 2


def test_queued_messages_are_limited() -> None:
    controls = RunControl()
    with pytest.raises(TooLarge):
        controls.steer("x" * (STEER_CHARS_MAX + 1))
    for n in range(STEERS_MAX):
        assert controls.steer(str(n))
    with pytest.raises(LimitExceeded):
        controls.steer("one more")
    assert len(controls.close()) == STEERS_MAX


# --- ending it


@contract("FLEET-P5")
@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([token("a"), TerminalFrame("cancelled")], CANCELLED),
        ([DONE], completed("done")),
        ([], CANCELLED),
        ([token("a")], CANCELLED),
    ],
)
async def test_canceled_run_ends_in_bounded_time_with_or_without_a_terminal(
    answers: list[ChildFrame], outcome: Outcome
) -> None:
    callbacks = RecordingCallbacks()
    callbacks.decide = never
    async with open_drive_harness(callbacks) as harness:
        await harness.receive()
        await harness.send(ApprovalRequest("1", raw({})))
        await run_pending()
        harness.controls.steer("never mind")
        harness.controls.cancel()
        harness.controls.cancel()
        assert await harness.receive() == Cancel()
        assert callbacks.withdrawn == 1
        await harness.send(ApprovalRequest("2", raw({})), *answers)
        await run_pending()
        assert harness.task.done() == (answers[-1:] in ([DONE], [TerminalFrame("cancelled")]))
        harness.clock.advance(CANCEL_S)
        result = await harness.end()
    assert result.outcome == outcome
    assert result.unadmitted == (SteerMessage("never mind"),)
    assert len(callbacks.asked) == 1


async def test_cancel_is_sent_before_queued_frames() -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        await harness.send(*(ApprovalRequest(str(n), raw({})) for n in range(FRAMES_MAX + 10)))
        await run_pending()
        harness.controls.cancel()
        received = [await harness.receive() for _ in range(FRAMES_MAX + 11)]
    assert received.index(Cancel()) == FRAMES_MAX + 1


async def test_run_canceled_before_it_began_is_never_sent() -> None:
    controls = RunControl()
    controls.cancel()
    async with open_drive_harness(DenyAll(), controls) as harness:
        assert await harness.end() == RunResult(CANCELLED)
        await harness.assert_nothing_sent()


async def test_canceled_run_whose_link_is_lost_is_canceled() -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        harness.controls.cancel()
        await harness.receive()
        harness.link.cut()
        assert (await harness.end()).outcome == CANCELLED


async def test_worker_flooding_after_a_cancel_is_abandoned_in_time() -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        harness.controls.cancel()
        await harness.send(*(token("x") for _ in range(500)))
        harness.clock.advance(CANCEL_S)
        assert (await harness.end()).outcome == CANCELLED


async def test_timeout_never_interrupts_a_callback() -> None:
    callbacks = RecordingCallbacks()
    callbacks.may_continue.clear()
    async with open_drive_harness(callbacks) as harness:
        await harness.receive()
        await harness.send(token("a"), token("b"))
        await run_pending()
        harness.controls.cancel()
        harness.clock.advance(CANCEL_S)
        await run_pending()
        assert not harness.task.done()
        callbacks.may_continue.set()
        assert (await harness.end()).outcome == CANCELLED
    assert callbacks.events == ['{"type":"token","content":"a"}']


async def test_error_of_an_event_callback_is_raised_unchanged() -> None:
    class FailingCallbacks(RecordingCallbacks):
        async def on_event(self, event: Raw) -> None:
            raise KeyError("lost")

    callbacks = FailingCallbacks()
    callbacks.decide = never
    ours, theirs = memory_pair()
    await theirs.send(b'{"kind":"approval_request","id":"1","body":{}}')
    await theirs.send(b'{"kind":"event","event":1}')
    with pytest.raises(KeyError):
        await in_time(drive(ours, RUN, callbacks, RunControl(), FakeClock()))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("is_late", [False, True])
async def test_task_cancel_is_propagated_even_after_the_timeout(*, is_late: bool) -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        if is_late:
            harness.clock.advance(FIRST_FRAME_S)
        harness.task.cancel()
        await asyncio.wait({harness.task})
        assert harness.task.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class SlowLink:
    """A link whose sends block until the test allows them."""

    def __init__(self) -> None:
        self.ours, self.theirs = memory_pair()
        self.may_continue = asyncio.Event()
        self.receive = self.ours.receive
        self.close = self.ours.close

    room = 0

    async def send(self, *frames: bytes) -> None:
        await self.may_continue.wait()
        await self.ours.send(*frames)


@contract("FLEET-98")
@pytest.mark.parametrize("is_sent", [True, False])
async def test_worker_has_separate_timeouts_to_take_the_run_and_to_answer(*, is_sent: bool) -> None:
    link, clock = SlowLink(), FakeClock()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(drive(link, RUN, DenyAll(), RunControl(), clock))
        await run_pending()
        clock.advance(FIRST_FRAME_S - 1)
        if is_sent:
            link.may_continue.set()
            await run_pending()
            clock.advance(FIRST_FRAME_S - 1)
        await run_pending()
        assert not task.done()
        clock.advance(1)
        assert await in_time(task) == RunResult(failed("the worker sent nothing for 60 s"))


class OneFrameLink:
    """A link to a worker that fails after its first frame, the run."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._has_sent = False
        self.receive = link.receive
        self.close = link.close

    room = 0

    async def send(self, *frames: bytes) -> None:
        if self._has_sent:
            raise LinkLost("broken pipe")
        self._has_sent = True
        await self._link.send(*frames)


@pytest.mark.parametrize(
    ("terminal_first", "outcome"),
    [(True, completed("done")), (False, failed("the link to the worker was lost: broken pipe"))],
)
async def test_terminal_sent_before_the_link_broke_counts(
    *, terminal_first: bool, outcome: Outcome
) -> None:
    ours, theirs = memory_pair()
    clock, controls = FakeClock(), RunControl()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(drive(OneFrameLink(ours), RUN, DenyAll(), controls, clock))
        await theirs.receive()
        controls.steer("do you hear?")
        await run_pending()
        if terminal_first:
            await theirs.send(encode_frame(DONE))
        clock.advance(0 if terminal_first else LAST_FRAMES_S)
        result = await in_time(task)
    assert result.outcome == outcome


@contract("FLEET-P6")
async def test_worker_that_misses_the_run_time_limit_is_abandoned() -> None:
    async with open_drive_harness(
        RecordingCallbacks(), limits=WorkerLimits(run_s=600.0)
    ) as harness:
        await harness.receive()
        await harness.send(token("a"))
        await run_pending()
        harness.clock.advance(600 + OVERTIME_S - 1)
        await run_pending()
        assert not harness.task.done()
        harness.clock.advance(1)
        error = "limit:run_timeout: the worker has not ended a run of 600 s"
        assert await harness.end() == RunResult(failed(error), began=True)
