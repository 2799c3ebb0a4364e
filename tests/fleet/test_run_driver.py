"""One run over one link: worker behavior and how the run ends."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

import pytest
from msgspec import Raw, structs
from msgspec.structs import replace

from culm.clock import format_time
from culm.errors import InvalidRequest, TooLarge
from culm.fleet.executor import Outcome, completed, failed
from culm.fleet.host.caller import DenyAll, RunControl, WorkerAsk, parse_ask
from culm.fleet.host.run_driver import FIRST_FRAME_S, drive
from culm.fleet.protocol.frames import (
    OPEN_MAX,
    ApprovalReply,
    ApprovalRequest,
    EventFrame,
    RunSpec,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
    encode_frame,
)
from culm.fleet.provision import Capabilities, CulmExtension, WorkerLimits, limits_of
from culm.fleet.transport.base import LinkLost
from culm.fleet.transport.memory import memory_pair
from culm.wire.codec import Json
from tests.fleet.host_harness import (
    CLEAN,
    DONE,
    OURS,
    RUN,
    DriveHarness,
    RecordingCallbacks,
    batch,
    never,
    open_drive_harness,
    provision,
    raw,
    run_pending,
    token,
)
from tests.support import FakeClock, contract

# --- events


async def test_events_reach_callbacks_in_order_before_the_outcome() -> None:
    callbacks = RecordingCallbacks()
    odd = EventFrame(Raw(b'{"type":"of tomorrow", "x" : [1.50]}'))
    async with open_drive_harness(callbacks) as harness:
        assert await harness.receive() == RUN
        await harness.send(token("a"), odd, token("b"), DONE)
        assert await harness.end() == CLEAN
    assert callbacks.events == [
        '{"type":"token","content":"a"}',
        '{"type":"of tomorrow", "x" : [1.50]}',
        '{"type":"token","content":"b"}',
    ]


async def test_worker_is_not_read_while_the_callback_is_busy() -> None:
    callbacks = RecordingCallbacks()
    callbacks.may_continue.clear()
    async with open_drive_harness(callbacks) as harness:
        await harness.receive()
        sent: list[str] = []

        async def flood() -> None:
            for n in range(300):
                await harness.link.send(b'{"kind":"event","event":%d}' % n)
                sent.append(str(n))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flood())
            await run_pending(1000)
            assert len(sent) < 100
            callbacks.may_continue.set()
        await harness.send(DONE)
        assert await harness.end() == CLEAN
    assert callbacks.events == sent


@contract("FLEET-P10")
@pytest.mark.parametrize(
    ("dropped", "outcome"),
    [
        (2, completed("done")),
        (0, failed("the run's history has a gap: 2 events never arrived")),
    ],
)
async def test_counted_gap_is_reported_and_uncounted_gap_fails_the_run(
    dropped: int, outcome: Outcome
) -> None:
    callbacks = RecordingCallbacks()
    count = b'{"type":"runner_progress","dropped_events":%d}' % dropped
    async with open_drive_harness(callbacks, spec=RunSpec("do it", execution_epoch=1)) as harness:
        await harness.receive()
        await harness.send(
            batch(1, "ephemeral", b'{"type":"token"}'),
            batch(4, "durable", b'{"type":"tool_start"}', count),
            DONE,
        )
        assert (await harness.end()).outcome == outcome
    assert callbacks.events == ['{"type":"token"}', "gap", '{"type":"tool_start"}', count.decode()]


async def _send_garbage(harness: DriveHarness) -> None:
    await harness.link.send(b'{"kind":"event"')


async def _send_unknown_kind(harness: DriveHarness) -> None:
    await harness.link.send(b'{"kind":"of tomorrow"}')


async def _send_too_much(harness: DriveHarness) -> None:
    harness.link.cut("a frame exceeds the size limit of a link")


async def _leave(harness: DriveHarness) -> None:
    await harness.link.close()


async def _suspend(harness: DriveHarness) -> None:
    await harness.send(TerminalFrame("suspended"))


async def _number_wrongly(harness: DriveHarness) -> None:
    await harness.send(batch(1, "durable", b"{}"))


async def _stay_silent(harness: DriveHarness) -> None:
    harness.clock.advance(FIRST_FRAME_S - 1)
    await run_pending()
    assert not harness.task.done()
    harness.clock.advance(1)


@contract("FLEET-98")
@pytest.mark.parametrize(
    ("act", "began", "reason"),
    [
        (_send_garbage, True, "the worker sent an unreadable frame: Input data was truncated"),
        (_send_unknown_kind, True, "the worker sent an unreadable frame: Invalid value"),
        (_send_too_much, False, "the link to the worker was lost: a frame exceeds the size limit"),
        (_leave, False, "the worker closed the link before the run ended"),
        (_suspend, True, "the worker suspended the run, which cannot be resumed"),
        (_number_wrongly, True, "the worker sent invalid events: a batch belongs to"),
        (_stay_silent, False, "the worker sent nothing for 60 s"),
    ],
)
async def test_worker_failure_ends_the_run_with_its_reason(
    act: Callable[[DriveHarness], Awaitable[None]], *, began: bool, reason: str
) -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        await act(harness)
        result = await harness.end()
    assert result.outcome.status == "error"
    assert (result.outcome.error or "").startswith(reason)
    assert result.began == began


async def test_silence_after_the_first_frame_does_not_fail_the_run() -> None:
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        await harness.send(token("a"))
        await run_pending()
        harness.clock.advance(86_400)
        await harness.send(DONE)
        assert await harness.end() == CLEAN


@pytest.mark.parametrize(
    ("spec", "error"),
    [(RunSpec("\ud800"), InvalidRequest), (RunSpec("x" * (64 << 20)), TooLarge)],
    ids=["surrogate", "64 MiB"],
)
async def test_run_too_large_or_unencodable_for_a_frame_is_refused(
    spec: RunSpec, error: type[Exception]
) -> None:
    ours, _ = memory_pair()
    with pytest.raises(error):
        await drive(ours, spec, DenyAll(), RunControl(), FakeClock())


# --- asks


@contract("FLEET-94")
@pytest.mark.parametrize(
    ("body", "ask"),
    [
        ({}, ("", "", "", "", None)),
        (
            {"tool_name": "Bash", "permission_type": "execute", "resource": 7, "question": None},
            ("Bash", "execute", "", "", None),
        ),
        (
            {
                "permission": "write",
                "permission_type": "execute",
                "resource": "a.txt",
                "question": "may I?",
                "deadline": "1970-01-01T00:01:00.500Z",
            },
            ("", "write", "a.txt", "may I?", 60.5),
        ),
        ({"deadline": "soon"}, ("", "", "", "", None)),
    ],
)
def test_missing_ask_fields_are_empty(
    body: Mapping[str, Json], ask: tuple[str, str, str, str, float | None]
) -> None:
    assert parse_ask(body) == WorkerAsk(*ask, body)


@contract("FLEET-4", "FLEET-94")
async def test_ask_is_answered_once_and_denied_without_a_decision() -> None:
    callbacks = RecordingCallbacks()
    body = {"tool_name": "Bash", "resource": "git push"}

    async def decide(ask: WorkerAsk) -> bool:
        if ask.body == body:
            return True
        raise RuntimeError("it cannot be decided")

    callbacks.decide = decide
    async with open_drive_harness(callbacks) as harness:
        await harness.receive()
        await harness.send(ApprovalRequest("1", raw(body)))
        assert await harness.receive() == ApprovalReply("1", approved=True)
        await harness.send(ApprovalRequest("1", raw(body)), ApprovalRequest("2", raw({})))
        assert await harness.receive() == ApprovalReply("2", approved=False)
        await harness.assert_nothing_sent()
    assert callbacks.asked == [parse_ask(body), parse_ask({})]
    async with open_drive_harness(DenyAll()) as harness:
        await harness.receive()
        await harness.send(ApprovalRequest("1", raw(body)))
        assert await harness.receive() == ApprovalReply("1", approved=False)


async def test_ask_over_the_limit_is_denied_and_others_end_with_the_run() -> None:
    callbacks = RecordingCallbacks()
    callbacks.decide = never
    callbacks.handle_call = never
    async with open_drive_harness(callbacks, limits=OURS) as harness:
        await harness.receive()
        for n in range(OPEN_MAX + 1):
            await harness.send(
                ApprovalRequest(f"ask {n}", raw({})), SubAgentRequest(f"call {n}", "", raw({}))
            )
        reason = "too many asks are open"
        assert await harness.receive() == ApprovalReply(
            f"ask {OPEN_MAX}", approved=False, reason=reason
        )
        refused = {"error": "too many host calls are open"}
        assert await harness.receive() == SubAgentReply(f"call {OPEN_MAX}", refused)
        await harness.send(DONE)
        assert await harness.end() == CLEAN
    assert callbacks.withdrawn == 2 * OPEN_MAX


@contract("FLEET-P8")
async def test_ask_unanswered_by_its_deadline_is_denied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    callbacks = RecordingCallbacks()
    late = asyncio.Event()

    async def decide(ask: WorkerAsk) -> bool:
        with contextlib.suppress(asyncio.CancelledError):  # Badly behaved on purpose.
            await late.wait()
        return True

    callbacks.decide = decide
    async with open_drive_harness(callbacks) as harness:
        await harness.receive()
        deadline = format_time(harness.clock.now_s() + 300)
        await harness.send(ApprovalRequest("1", raw({"deadline": deadline})))
        await run_pending()
        harness.clock.advance(299)
        await harness.assert_nothing_sent()
        harness.clock.advance(1)
        assert await harness.receive() == ApprovalReply("1", approved=False)
        await harness.assert_nothing_sent()
        await harness.send(DONE)
        assert await harness.end() == CLEAN
    assert "an answer came too late and was not sent: 1" in caplog.text


@pytest.mark.parametrize("cause", ["fails", "is late"])
async def test_our_worker_receives_the_reason_for_no_decision(cause: str) -> None:
    callbacks = RecordingCallbacks()

    async def decide(ask: WorkerAsk) -> bool:
        if cause == "fails":
            raise RuntimeError("it cannot be decided")
        return await never(ask)

    callbacks.decide = decide
    async with open_drive_harness(callbacks, limits=OURS) as harness:
        await harness.receive()
        deadline = format_time(harness.clock.now_s() + 300)
        await harness.send(ApprovalRequest("1", raw({"deadline": deadline})))
        await run_pending()
        harness.clock.advance(300)
        reason = "it could not be decided" if cause == "fails" else "nobody answered in time"
        assert await harness.receive() == ApprovalReply("1", approved=False, reason=reason)
        await harness.send(DONE)
        assert await harness.end() == CLEAN


async def test_worker_that_asks_without_reading_answers_is_abandoned() -> None:
    async with open_drive_harness(DenyAll()) as harness:

        async def flood() -> None:
            with contextlib.suppress(LinkLost):
                for n in range(10_000):
                    await harness.link.send(encode_frame(ApprovalRequest(str(n), raw({}))))

        async with asyncio.TaskGroup() as tasks:
            flooding = tasks.create_task(flood())
            result = await harness.end()
            flooding.cancel()
    assert result.outcome == failed("the worker sends requests but does not read the answers")


# --- host calls


async def _listing(args: Mapping[str, Json]) -> Json:
    return ["a", args["op"]]


async def _odd(args: Mapping[str, Json]) -> Json:
    return object()


@contract("FLEET-100")
@pytest.mark.parametrize(
    ("limits", "handle_call", "op", "expected"),
    [
        (OURS, _listing, "list", {"result": ["a", "list"]}),
        (OURS, None, "list", {"error": "it cannot be done"}),
        (OURS, _odd, "list", {"error": "the host call failed"}),
        (WorkerLimits(), _listing, "list", {"error": "host calls are not taken"}),
        (replace(OURS, depth=3), _listing, "agent", {"result": ["a", "agent"]}),
        (
            replace(OURS, depth=4),
            _listing,
            "agent",
            {"error": "an agent at depth 4 may not start others: the limit is reached"},
        ),
        (replace(OURS, depth=4), _listing, "list", {"result": ["a", "list"]}),
    ],
)
async def test_host_call_needs_provisioning_and_an_allowed_depth(
    limits: WorkerLimits,
    handle_call: Callable[[Mapping[str, Json]], Awaitable[Json]] | None,
    op: str,
    expected: Json,
) -> None:
    callbacks = RecordingCallbacks()
    if handle_call is not None:
        callbacks.handle_call = handle_call
    async with open_drive_harness(callbacks, limits=limits) as harness:
        await harness.receive()
        await harness.send(SubAgentRequest("1", "call", raw({"op": op})))
        assert await harness.receive() == SubAgentReply("1", expected)
        await harness.send(DONE)
        assert await harness.end() == CLEAN


def test_limits_come_from_the_provision() -> None:
    shallow = structs.replace(
        provision(depth=2),
        capabilities=Capabilities(max_spawn_depth=2),
        culm=CulmExtension(host_calls=True),
    )
    assert [limits_of(provision()), limits_of(shallow)] == [
        WorkerLimits(host_calls=False, depth=1, depth_max=4),
        WorkerLimits(host_calls=True, depth=2, depth_max=2),
    ]
