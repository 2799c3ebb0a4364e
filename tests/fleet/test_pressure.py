"""A worker under pressure: hosts that do not read or do not stop, and unencodable values."""

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
from culm.fleet.worker_server import outbox
from culm.fleet.worker_server import run as worker_run
from culm.fleet.worker_server.connection import OWED_MAX, STALL_S
from culm.fleet.worker_server.outbox import FrameOutbox
from culm.wire.codec import Json
from tests.fleet.fake_executors import (
    AskingExecutor,
    CancelIgnoringExecutor,
    EmittingExecutor,
    HostCallExecutor,
    LateSteerExecutor,
    ManyAsksExecutor,
    ResultExecutor,
)
from tests.fleet.link_harness import (
    CANCEL,
    KINDS,
    PANICKED,
    Kind,
    done,
    events_of,
    serving,
    tokens_of,
)
from tests.support import WAIT_S, FakeClock, contract

both = pytest.mark.parametrize("kind", KINDS)


@both
async def test_lone_surrogates_are_replaced_in_events_and_results(kind: Kind) -> None:
    async with serving(
        kind, EmittingExecutor([{"type": "token", "content": "\ud800!"}])
    ) as connect:
        assert tokens_of(await (await connect()).run("go")) == ["\ufffd!"]
    async with serving(kind, ResultExecutor("\ud800!")) as connect:
        assert await (await connect()).run("go") == [done("\ufffd!")]


def nested(levels: int) -> Json:
    value: Json = []
    for _ in range(levels):
        value = [value]
    return value


async def test_values_other_hosts_cannot_parse_are_not_sent() -> None:
    deep, deeper = nested(200), nested(5000)
    wide: list[Json] = [[{"n": 0}]] * 200
    events: list[dict[str, Json]] = [
        {"type": "tool_complete", "result": Raw(b'"\\ud83d!"')},
        {"type": "tool_complete", "result": deep},
        {"type": "tool_complete", "result": deeper},
        {"type": "tool_complete", "result": wide},
    ]
    too_deep = "a value may be nested at most 100 levels deep"
    async with serving("memory", EmittingExecutor(events)) as connect:
        assert events_of(await (await connect()).run("go")) == [
            {"type": "tool_complete", "result": "\ufffd!"},
            {"type": "tool_complete", "error": too_deep},
            {"type": "tool_complete", "error": too_deep},
            {"type": "tool_complete", "result": wide},
        ]
    async with serving("memory", AskingExecutor(resource=deep)) as connect:
        assert await (await connect()).run("go") == [done("approved: false")]
    async with serving("memory", AskingExecutor(resource=deep), host_calls=True) as connect:
        assert await (await connect()).run("go") == [done(f"not asked: {too_deep}")]
    async with serving("memory", HostCallExecutor(args=deep), host_calls=True) as connect:
        frames = await (await connect()).run("go")
        assert frames == [done(f"failed: {too_deep}")]


async def test_payload_over_the_link_limit_is_an_error_of_its_run() -> None:
    large = "x" * MESSAGE_BYTES_MAX
    async with serving("memory", ResultExecutor(large)) as connect:
        parent = await connect()
        terminal = TerminalFrame("error", error="the result exceeds the size limit of a link")
        assert await parent.run("go") == [terminal]
    async with serving(
        "memory", EmittingExecutor([{"type": "token", "content": large}])
    ) as connect:
        assert await (await connect()).run("go") == [PANICKED]


# --- hosts that do not read, or do not stop

CAPACITY = memory.FRAMES_MAX + 1 + outbox.FRAMES_MAX  # In the link, being sent, and queued.


async def emitted_when_stuck(executor: EmittingExecutor) -> int:
    """The number of events it has emitted when it is blocked."""
    before = -1
    while executor.emitted != before:
        before = executor.emitted
        for _ in range(100):
            await asyncio.sleep(0)
    return executor.emitted


@contract("FLEET-24", "FLEET-P7")
async def test_events_wait_for_a_slow_host_and_keep_their_order() -> None:
    events: list[dict[str, Json]] = [{"type": "token", "n": n} for n in range(1000)]
    executor = EmittingExecutor(events)
    async with serving("memory", executor) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        assert await emitted_when_stuck(executor) == CAPACITY + outbox.EVENTS_MAX
        frames = await parent.until_ended()
        assert (events_of(frames), frames[-1]) == (events, done("told"))


@contract("FLEET-24")
async def test_257th_event_waits_while_requests_pass() -> None:
    out, clock = FrameOutbox(), FakeClock()
    while out.has_room:
        out.put_nowait(b"old")
    events = outbox.RunEventSink(RunSpec("x"), out, clock)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for n in range(256):
            await events.emit({"n": n})
        late = group.create_task(events.emit({"n": 256}))
        await asyncio.sleep(0)
        assert not late.done()
        await out.request_room()
        out.put_request_nowait(b"request")
        taken = [frame for _ in range(1 + outbox.FRAMES_MAX + 256) for frame in out.take_nowait()]
        await late
        taken += out.take_nowait()
        assert out.take_nowait() == []
    assert taken[: 1 + outbox.FRAMES_MAX] == [b"request"] + [b"old"] * outbox.FRAMES_MAX
    assert taken[1 + outbox.FRAMES_MAX :] == [
        b'{"kind":"event","event":{"n":%d}}' % n for n in range(257)
    ]


@both
@contract("FLEET-23", "FLEET-P7")
async def test_text_events_for_a_slow_host_are_dropped_and_counted(
    kind: Kind,
) -> None:
    tokens = 10_000
    text = "x" * (10 if kind == "memory" else 2000)  # Sockets take some MB.
    events: list[dict[str, Json]] = [{"type": "tool_start", "n": 0}]
    events += [{"type": "token", "content": text} for _ in range(tokens)]
    events += [{"type": "tool_start", "n": 1}]
    executor = EmittingExecutor(events)
    async with serving(kind, executor) as connect:
        parent = await connect()
        await parent.send(RunSpec("go", execution_epoch=1))
        while (
            executor.emitted < len(events) - 1
        ):  # None of the tokens waits for a host that reads nothing.
            await asyncio.sleep(0)
        frames = await parent.until_ended()
        assert executor.all_emitted.is_set()
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
        (CAPACITY + 10, False, [STALL_S]),
        (CAPACITY + 10, True, [GRACE_S, GRACE_S]),
        (CAPACITY - 10, False, [STALL_S]),
        (CAPACITY - 10, True, [STALL_S]),
    ],
    ids=["its events", "its events, cancelled", "its ending", "its ending, cancelled"],
)
async def test_host_that_stops_reading_is_disconnected(
    events: int, steps_s: list[float], *, cancels: bool
) -> None:
    clock, executor = FakeClock(), EmittingExecutor([{"type": "complete"}] * events)
    async with serving("memory", executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await executor.all_emitted.wait()
        if cancels:
            await parent.send(CANCEL)
        for step_s in steps_s:
            for _ in range(20):
                await asyncio.sleep(0)
            clock.advance(step_s)
        assert not any(isinstance(frame, TerminalFrame) for frame in await parent.until_closed())
        other = await connect()
        await other.send(RunSpec("go"))
        assert (await other.until_ended())[-1] == done("told")


@contract("FLEET-P5")
async def test_host_that_reads_slowly_is_not_disconnected() -> None:
    clock, executor = FakeClock(), EmittingExecutor([{"type": "complete"}] * (CAPACITY + 100))
    async with serving("memory", executor, clock=clock) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        await executor.all_emitted.wait()
        for _ in range(10):
            for _ in range(5):
                await parent.receive()
                await asyncio.sleep(0)
            clock.advance(STALL_S / 2)
        frames = await parent.until_ended()
        assert len(parent.received) == CAPACITY + 100 + 1
        assert frames[-1] == done("told")


@both
@contract("FLEET-P7")
async def test_host_that_sends_runs_without_reading_is_disconnected(kind: Kind) -> None:
    async with serving(kind, CancelIgnoringExecutor(), clock=FakeClock()) as connect:
        parent = await connect()
        with suppress(LinkLost):
            for n in range(OWED_MAX + 200):
                await parent.send(RunSpec(str(n)))
        assert not any(isinstance(frame, TerminalFrame) for frame in await parent.until_closed())


async def test_untaken_messages_of_a_run_are_limited() -> None:
    executor = LateSteerExecutor()
    async with serving("memory", executor) as connect:
        parent = await connect()
        await parent.send(
            RunSpec("go"), *(SteerFrame(str(n)) for n in range(worker_run.STEERS_MAX + 10))
        )
        await parent.send(ApprovalReply("sa-no", approved=True))
        request = await parent.until_asked()
        await parent.send(ApprovalReply(request.id, approved=True))
        expected = " ".join(str(n) for n in range(worker_run.STEERS_MAX))
        assert await parent.until_ended() == [done(expected)]


async def test_run_may_have_more_open_asks_than_the_outbox_holds() -> None:
    async with serving("memory", ManyAsksExecutor(60)) as connect:
        parent = await connect()
        await parent.send(RunSpec("go"))
        for _ in range(60):
            request = await parent.until_asked()
            await parent.send(ApprovalReply(request.id, approved=True))
        assert await parent.until_ended() == [done("60")]
