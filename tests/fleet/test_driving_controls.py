"""One run over its link: what is said to its worker, and how a run ends by a cancel or by time."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import Raw

from culm.errors import LimitExceeded, TooLarge
from culm.fleet.executor import CANCELLED, Outcome, SteerMessage, completed, failed
from culm.fleet.host.callbacks import DenyAll
from culm.fleet.host.run_control import STEER_CHARS_MAX, STEERS_MAX, RunControl
from culm.fleet.host.run_driver import (
    CANCEL_S,
    DEAF_S,
    FIRST_FRAME_S,
    OVERTIME_S,
    HostSettings,
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
from culm.fleet.transport.base import LinkLost
from culm.fleet.transport.memory import FRAMES_MAX, MemoryLink, memory_pair
from tests.fleet.parents import (
    CLEAN,
    DONE,
    OURS,
    RUN,
    Witness,
    batch,
    in_time,
    never,
    open_talk,
    raw,
    settle,
    token,
)
from tests.support import FakeClock, contract


def admitted(steer_id: str) -> EventFrame:
    return EventFrame(Raw(b'{"type":"message_admitted","id":"%s"}' % steer_id.encode()))


# --- steering


async def test_what_was_said_before_the_run_and_during_it_arrives_in_order() -> None:
    controls = RunControl()
    assert controls.steer("one", id="1")
    async with open_talk(DenyAll(), controls, OURS) as talk:
        assert [await talk.hear(), await talk.hear()] == [RUN, SteerFrame("one", "1")]
        assert controls.steer("two", id="2")
        assert controls.steer("three \ud800")
        assert [await talk.hear(), await talk.hear()] == [
            SteerFrame("two", "2"),
            SteerFrame("three \ufffd"),
        ]
        await talk.say(admitted("1"), DONE)
        driven = await talk.end()
    assert driven == replace(CLEAN, unadmitted=(SteerMessage("two", "2"),))
    assert controls.unadmitted == driven.unadmitted
    assert not controls.steer("four")
    controls.cancel()
    assert not controls.is_cancelled


async def test_what_a_worker_never_began_with_is_for_the_next_one() -> None:
    controls = RunControl()
    controls.steer("one")
    async with open_talk(DenyAll(), controls) as talk:
        assert [await talk.hear(), await talk.hear()] == [RUN, SteerFrame("one")]
        controls.steer("two")
        assert await talk.hear() == SteerFrame("two")
        await talk.link.close()
        assert (await talk.end()).began is False
    controls.steer("three")
    async with open_talk(DenyAll(), controls) as talk:
        heard = [await talk.hear() for _ in range(4)]
    assert heard == [RUN, SteerFrame("one"), SteerFrame("two"), SteerFrame("three")]


async def test_what_was_admitted_is_not_returned() -> None:
    async with open_talk(DenyAll(), terms=OURS) as talk:
        await talk.hear()
        talk.controls.steer("one", id="1")
        await talk.hear()
        await talk.say(admitted("1"), DONE)
        assert await talk.end() == CLEAN


async def test_what_was_admitted_counts_only_once_the_overseer_knows_it() -> None:
    witness, controls = Witness(), RunControl()
    spec = RunSpec("do it", execution_epoch=1)
    both = batch(1, "durable", b'{"type":"tool_start"}', bytes(admitted("1").event))
    async with open_talk(witness, controls, OURS, spec) as talk:
        await talk.hear()
        controls.steer("one", id="1")
        await talk.hear()
        witness.let_go.clear()
        await talk.say(both)
        await settle()
        talk.task.cancel()
        await asyncio.wait({talk.task})
    assert controls.unadmitted == (SteerMessage("one", "1"),)
    assert controls.has_begun


@pytest.mark.parametrize("is_heard", [True, False])
async def test_what_is_not_admitted_yet_is_bounded_too(*, is_heard: bool) -> None:
    controls = RunControl()
    async with open_talk(DenyAll(), controls, OURS) as talk:
        await talk.hear()
        if is_heard:
            await talk.say(token("a"))
        for n in range(STEERS_MAX):
            assert controls.steer("x", id=str(n))
            assert await talk.hear() == SteerFrame("x", str(n))
        for n in range(STEERS_MAX):
            assert controls.steer("y", id=f"later {n}")
        await talk.silence()
        with pytest.raises(LimitExceeded):
            controls.steer("one more")
        await talk.say(admitted("0"), admitted("1"))
        assert await talk.hear() == SteerFrame("y", "later 0")
        await talk.say(DONE)
        assert len((await talk.end()).unadmitted) == 2 * STEERS_MAX - 2


def test_messages_that_wait_are_bounded() -> None:
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
async def test_a_cancelled_run_ends_with_its_terminal_or_without_it_in_bounded_time(
    answers: list[ChildFrame], outcome: Outcome
) -> None:
    witness = Witness()
    witness.decide = never
    async with open_talk(witness) as talk:
        await talk.hear()
        await talk.say(ApprovalRequest("1", raw({})))
        await settle()
        talk.controls.steer("never mind")
        talk.controls.cancel()
        talk.controls.cancel()
        assert await talk.hear() == Cancel()
        assert witness.withdrawn == 1
        await talk.say(ApprovalRequest("2", raw({})), *answers)
        await settle()
        assert talk.task.done() == (answers[-1:] in ([DONE], [TerminalFrame("cancelled")]))
        talk.clock.advance(CANCEL_S)
        driven = await talk.end()
    assert driven.outcome == outcome
    assert driven.unadmitted == (SteerMessage("never mind"),)
    assert len(witness.asked) == 1


async def test_a_cancel_overtakes_what_waits_to_be_sent() -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        await talk.say(*(ApprovalRequest(str(n), raw({})) for n in range(FRAMES_MAX + 10)))
        await settle()
        talk.controls.cancel()
        heard = [await talk.hear() for _ in range(FRAMES_MAX + 11)]
    assert heard.index(Cancel()) == FRAMES_MAX + 1


async def test_a_run_cancelled_before_it_began_is_never_sent() -> None:
    controls = RunControl()
    controls.cancel()
    async with open_talk(DenyAll(), controls) as talk:
        assert await talk.end() == RunResult(CANCELLED)
        await talk.silence()


async def test_a_cancelled_run_whose_link_is_lost_is_cancelled() -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        talk.controls.cancel()
        await talk.hear()
        talk.link.cut()
        assert (await talk.end()).outcome == CANCELLED


async def test_a_worker_that_floods_after_a_cancel_is_given_up_in_time() -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        talk.controls.cancel()
        await talk.say(*(token("x") for _ in range(500)))
        talk.clock.advance(CANCEL_S)
        assert (await talk.end()).outcome == CANCELLED


async def test_time_never_tears_an_overseer_from_its_work() -> None:
    witness = Witness()
    witness.let_go.clear()
    async with open_talk(witness) as talk:
        await talk.hear()
        await talk.say(token("a"), token("b"))
        await settle()
        talk.controls.cancel()
        talk.clock.advance(CANCEL_S)
        await settle()
        assert not talk.task.done()
        witness.let_go.set()
        assert (await talk.end()).outcome == CANCELLED
    assert witness.told == ['{"type":"token","content":"a"}']


async def test_what_an_overseer_raises_at_an_event_is_raised_as_it_is() -> None:
    class Clumsy(Witness):
        async def on_event(self, event: Raw) -> None:
            raise KeyError("lost")

    witness = Clumsy()
    witness.decide = never
    ours, theirs = memory_pair()
    await theirs.send(b'{"kind":"approval_request","id":"1","body":{}}')
    await theirs.send(b'{"kind":"event","event":1}')
    with pytest.raises(KeyError):
        await in_time(drive(ours, RUN, witness, RunControl(), FakeClock()))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_cancel_from_outside_is_passed_on_even_when_time_is_over_too(
    *, is_late: bool
) -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        if is_late:
            talk.clock.advance(FIRST_FRAME_S)
        talk.task.cancel()
        await asyncio.wait({talk.task})
        assert talk.task.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Slow:
    """A link that takes its time for what is sent."""

    def __init__(self) -> None:
        self.ours, self.theirs = memory_pair()
        self.let_go = asyncio.Event()
        self.receive = self.ours.receive
        self.close = self.ours.close

    async def send(self, frame: bytes) -> None:
        await self.let_go.wait()
        await self.ours.send(frame)


@contract("FLEET-98")
@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_worker_has_its_time_for_the_run_and_again_for_its_first_word(
    *, is_sent: bool
) -> None:
    link, clock = Slow(), FakeClock()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(drive(link, RUN, DenyAll(), RunControl(), clock))
        await settle()
        clock.advance(FIRST_FRAME_S - 1)
        if is_sent:
            link.let_go.set()
            await settle()
            clock.advance(FIRST_FRAME_S - 1)
        await settle()
        assert not task.done()
        clock.advance(1)
        assert await in_time(task) == RunResult(failed("the worker said nothing for 60 s"))


class Deaf:
    """A link that carries nothing to a worker any more, once its run is sent."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._has_sent = False
        self.receive = link.receive
        self.close = link.close

    async def send(self, frame: bytes) -> None:
        if self._has_sent:
            raise LinkLost("broken pipe")
        self._has_sent = True
        await self._link.send(frame)


@pytest.mark.parametrize(
    ("is_said", "outcome"),
    [(True, completed("done")), (False, failed("the link to the worker was lost: broken pipe"))],
)
async def test_what_a_worker_said_before_it_stopped_listening_counts(
    *, is_said: bool, outcome: Outcome
) -> None:
    ours, theirs = memory_pair()
    clock, controls = FakeClock(), RunControl()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(drive(Deaf(ours), RUN, DenyAll(), controls, clock))
        await theirs.receive()
        controls.steer("do you hear?")
        await settle()
        if is_said:
            await theirs.send(encode_frame(DONE))
        clock.advance(0 if is_said else DEAF_S)
        driven = await in_time(task)
    assert driven.outcome == outcome


@contract("FLEET-P6")
async def test_a_worker_that_does_not_end_a_run_at_its_limit_is_not_waited_for() -> None:
    async with open_talk(Witness(), terms=HostSettings(run_s=600.0)) as talk:
        await talk.hear()
        await talk.say(token("a"))
        await settle()
        talk.clock.advance(600 + OVERTIME_S - 1)
        await settle()
        assert not talk.task.done()
        talk.clock.advance(1)
        words = "limit:run_timeout: the worker has not ended a run of 600 s"
        assert await talk.end() == RunResult(failed(words), began=True)
