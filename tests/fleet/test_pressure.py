"""A worker under pressure: hosts that do not read or do not stop, and words that fit no wire."""

import asyncio
from contextlib import suppress

import pytest
from msgspec import Raw

from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    ApprovalReply,
    EventBatch,
    RunSpec,
    SteerFrame,
    TerminalFrame,
)
from culm.fleet.protocol.worker import GRACE_S
from culm.fleet.transport import memory
from culm.fleet.transport.base import LinkLost
from culm.fleet.worker_server import event_sink as sink
from culm.fleet.worker_server import outbox
from culm.fleet.worker_server import run_channels as given
from culm.fleet.worker_server.connection import OWED_MAX, STALL_S
from culm.fleet.worker_server.outbox import FrameOutbox
from culm.wire.codec import Json
from tests.fleet.links import (
    CANCEL,
    KINDS,
    PANICKED,
    Kind,
    done,
    events_of,
    serving,
    tokens_of,
)
from tests.fleet.players import (
    Asks,
    AsksMany,
    Calls,
    Deaf,
    Says,
    TakesLate,
    Tells,
)
from tests.support import WAIT_S, FakeClock, contract

both = pytest.mark.parametrize("kind", KINDS)


@both
async def test_half_a_surrogate_pair_is_mended_in_events_and_in_the_ending(kind: Kind) -> None:
    async with serving(kind, Tells([{"type": "token", "content": "\ud800!"}])) as connect:
        assert tokens_of(await (await connect()).run("go")) == ["\ufffd!"]
    async with serving(kind, Says("\ud800!")) as connect:
        assert await (await connect()).run("go") == [done("\ufffd!")]


def nested(levels: int) -> Json:
    value: Json = []
    for _ in range(levels):
        value = [value]
    return value


async def test_what_other_hosts_cannot_read_is_not_sent_to_them() -> None:
    deep, deeper = nested(200), nested(5000)
    wide: list[Json] = [[{"n": 0}]] * 200
    said: list[dict[str, Json]] = [
        {"type": "tool_complete", "result": Raw(b'"\\ud83d!"')},
        {"type": "tool_complete", "result": deep},
        {"type": "tool_complete", "result": deeper},
        {"type": "tool_complete", "result": wide},
    ]
    too_deep = "what is said may be nested 100 levels deep, and not more"
    async with serving("memory", Tells(said)) as connect:
        assert events_of(await (await connect()).run("go")) == [
            {"type": "tool_complete", "result": "\ufffd!"},
            {"type": "tool_complete", "error": too_deep},
            {"type": "tool_complete", "error": too_deep},
            {"type": "tool_complete", "result": wide},
        ]
    async with serving("memory", Asks(resource=deep)) as connect:
        assert await (await connect()).run("go") == [done("approved: false")]
    async with serving("memory", Asks(resource=deep), host_calls=True) as connect:
        assert await (await connect()).run("go") == [done(f"not asked: {too_deep}")]
    async with serving("memory", Calls(args=deep), host_calls=True) as connect:
        frames = await (await connect()).run("go")
        assert frames == [done(f"failed: {too_deep}")]


async def test_what_no_link_carries_is_an_error_of_its_run() -> None:
    large = "x" * MESSAGE_BYTES_MAX
    async with serving("memory", Says(large)) as connect:
        parent = await connect()
        said = TerminalFrame("error", error="the result is larger than a link carries")
        assert await parent.run("go") == [said]
    async with serving("memory", Tells([{"type": "token", "content": large}])) as connect:
        assert await (await connect()).run("go") == [PANICKED]


# --- hosts that do not read, or do not stop

ROOM = memory.FRAMES_MAX + 1 + outbox.FRAMES_MAX  # A link's, one being sent, those that wait.


async def settled(tells: Tells) -> int:
    """How much it has told when it tells no more."""
    before = -1
    while tells.told != before:
        before = tells.told
        for _ in range(100):
            await asyncio.sleep(0)
    return tells.told


@contract("FLEET-24", "FLEET-P7")
async def test_events_wait_for_a_host_that_does_not_read_and_keep_their_order() -> None:
    told: list[dict[str, Json]] = [{"type": "token", "n": n} for n in range(1000)]
    tells = Tells(told)
    async with serving("memory", tells) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        assert await settled(tells) == ROOM + sink.EVENTS_MAX
        frames = await parent.until_ended()
        assert (events_of(frames), frames[-1]) == (told, done("told"))


@contract("FLEET-24")
async def test_the_257th_event_waits_while_requests_pass() -> None:
    out, clock = FrameOutbox(), FakeClock()
    while out.has_room:
        out.put_nowait(b"old")
    events = sink.RunEventSink(RunSpec("x"), out, clock)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for n in range(256):
            await events.emit({"n": n})
        late = group.create_task(events.emit({"n": 256}))
        await asyncio.sleep(0)
        assert not late.done()
        await out.request_room()
        out.put_request_nowait(b"request")
        taken = [out.take_nowait() for _ in range(1 + outbox.FRAMES_MAX + 256)]
        await late
        taken.append(out.take_nowait())
        assert out.take_nowait() is None
    assert taken[: 1 + outbox.FRAMES_MAX] == [b"request"] + [b"old"] * outbox.FRAMES_MAX
    assert taken[1 + outbox.FRAMES_MAX :] == [
        b'{"kind":"event","event":{"n":%d}}' % n for n in range(257)
    ]


@both
@contract("FLEET-23", "FLEET-P7")
async def test_what_only_grows_a_text_is_dropped_for_a_slow_host_and_counted_before_the_ending(
    kind: Kind,
) -> None:
    tokens = 10_000
    text = "x" * (10 if kind == "memory" else 2000)  # Sockets take some MB.
    told: list[dict[str, Json]] = [{"type": "tool_start", "n": 0}]
    told += [{"type": "token", "content": text} for _ in range(tokens)]
    told += [{"type": "tool_start", "n": 1}]
    tells = Tells(told)
    async with serving(kind, tells) as connect:
        parent = await connect()
        await parent.say(RunSpec("go", execution_epoch=1))
        while tells.told < len(told) - 1:  # None of the tokens waits for a host that reads nothing.
            await asyncio.sleep(0)
        frames = await parent.until_ended()
        assert tells.all_told.is_set()
    batches = [frame.batch for frame in frames if isinstance(frame, EventBatch)]
    seqs = [seq for batch in batches for seq in range(batch.first_seq, batch.last_seq + 1)]
    assert seqs == sorted(set(seqs))
    missing = seqs[-1] - len(seqs)
    assert 0 < missing < tokens
    last = events_of(frames)[-2:]
    assert last == [
        {"type": "tool_start", "n": 1},
        {
            "type": "runner_progress",
            "session_id": "",
            "round_count": 0,
            "dropped_events": missing,
            "dropped_batches": last[-1]["dropped_batches"],
        },
    ]
    assert frames[-1] == done("told")


@contract("FLEET-P5", "FLEET-P7")
@pytest.mark.parametrize(
    ("events", "cancels", "steps_s"),
    [
        (ROOM + 10, False, [STALL_S]),
        (ROOM + 10, True, [GRACE_S, GRACE_S]),
        (ROOM - 10, False, [STALL_S]),
        (ROOM - 10, True, [STALL_S]),
    ],
    ids=["its events", "its events, cancelled", "its ending", "its ending, cancelled"],
)
async def test_a_host_that_reads_nothing_of_what_a_run_left_is_let_go(
    events: int, steps_s: list[float], *, cancels: bool
) -> None:
    clock, tells = FakeClock(), Tells([{"type": "complete"}] * events)
    async with serving("memory", tells, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await tells.all_told.wait()
        if cancels:
            await parent.say(CANCEL)
        for step_s in steps_s:
            for _ in range(20):
                await asyncio.sleep(0)
            clock.advance(step_s)
        assert not any(isinstance(frame, TerminalFrame) for frame in await parent.until_closed())
        other = await connect()
        await other.say(RunSpec("go"))
        assert (await other.until_ended())[-1] == done("told")


@contract("FLEET-P5")
async def test_a_host_that_reads_slowly_is_not_let_go() -> None:
    clock, tells = FakeClock(), Tells([{"type": "complete"}] * (ROOM + 100))
    async with serving("memory", tells, clock=clock) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        await tells.all_told.wait()
        for _ in range(10):
            for _ in range(5):
                await parent.hear()
                await asyncio.sleep(0)
            clock.advance(STALL_S / 2)
        frames = await parent.until_ended()
        assert len(parent.heard) == ROOM + 100 + 1
        assert frames[-1] == done("told")


@both
@contract("FLEET-P7")
async def test_a_host_that_asks_for_run_after_run_and_reads_nothing_is_let_go(kind: Kind) -> None:
    async with serving(kind, Deaf(), clock=FakeClock()) as connect:
        parent = await connect()
        with suppress(LinkLost):
            for n in range(OWED_MAX + 200):
                await parent.say(RunSpec(str(n)))
        assert not any(isinstance(frame, TerminalFrame) for frame in await parent.until_closed())


async def test_of_messages_that_a_run_does_not_take_only_so_many_are_kept() -> None:
    takes = TakesLate()
    async with serving("memory", takes) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"), *(SteerFrame(str(n)) for n in range(given.STEERS_MAX + 10)))
        await parent.say(ApprovalReply("sa-no", approved=True))
        request = await parent.until_asked()
        await parent.say(ApprovalReply(request.id, approved=True))
        said = " ".join(str(n) for n in range(given.STEERS_MAX))
        assert await parent.until_ended() == [done(said)]


async def test_a_run_may_ask_more_than_the_outbox_holds_at_once() -> None:
    async with serving("memory", AsksMany(60)) as connect:
        parent = await connect()
        await parent.say(RunSpec("go"))
        for _ in range(60):
            request = await parent.until_asked()
            await parent.say(ApprovalReply(request.id, approved=True))
        assert await parent.until_ended() == [done("60")]
