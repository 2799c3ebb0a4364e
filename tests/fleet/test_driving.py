"""One run over one link: what a worker may do, and what becomes of the run then."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest
from msgspec import Raw, structs

from culm.errors import InvalidRequest, TooLarge
from culm.fleet.executor import Outcome, completed, failed
from culm.fleet.host.callbacks import DenyAll, WorkerAsk, parse_ask
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import (
    FIRST_FRAME_S,
    HostSettings,
    drive,
    host_terms_of,
)
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
from culm.fleet.provision import Capabilities, CulmExtension
from culm.fleet.times import format_time
from culm.fleet.transport.base import LinkLost
from culm.fleet.transport.memory import memory_pair
from culm.wire.codec import Json
from tests.fleet.parents import (
    CLEAN,
    DONE,
    OURS,
    RUN,
    Talk,
    Witness,
    batch,
    never,
    open_talk,
    provision,
    raw,
    settle,
    token,
)
from tests.support import FakeClock, contract

# --- what is heard


async def test_events_reach_the_overseer_in_order_as_they_were_written_before_the_outcome() -> None:
    witness = Witness()
    odd = EventFrame(Raw(b'{"type":"of tomorrow", "x" : [1.50]}'))
    async with open_talk(witness) as talk:
        assert await talk.hear() == RUN
        await talk.say(token("a"), odd, token("b"), DONE)
        assert await talk.end() == CLEAN
    assert witness.told == [
        '{"type":"token","content":"a"}',
        '{"type":"of tomorrow", "x" : [1.50]}',
        '{"type":"token","content":"b"}',
    ]


async def test_while_an_overseer_is_busy_the_worker_is_not_read() -> None:
    witness = Witness()
    witness.let_go.clear()
    async with open_talk(witness) as talk:
        await talk.hear()
        sent: list[str] = []

        async def flood() -> None:
            for n in range(300):
                await talk.link.send(b'{"kind":"event","event":%d}' % n)
                sent.append(str(n))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flood())
            await settle(1000)
            assert len(sent) < 100
            witness.let_go.set()
        await talk.say(DONE)
        assert await talk.end() == CLEAN
    assert witness.told == sent


@contract("FLEET-P10")
@pytest.mark.parametrize(
    ("dropped", "outcome"),
    [
        (2, completed("done")),
        (0, failed("the run's history has a gap: 2 events never arrived")),
    ],
)
async def test_a_gap_is_told_when_it_may_be_and_fails_the_run_when_it_may_not(
    dropped: int, outcome: Outcome
) -> None:
    witness = Witness()
    count = b'{"type":"runner_progress","dropped_events":%d}' % dropped
    async with open_talk(witness, spec=RunSpec("do it", execution_epoch=1)) as talk:
        await talk.hear()
        await talk.say(
            batch(1, "ephemeral", b'{"type":"token"}'),
            batch(4, "durable", b'{"type":"tool_start"}', count),
            DONE,
        )
        assert (await talk.end()).outcome == outcome
    assert witness.told == ['{"type":"token"}', "gap", '{"type":"tool_start"}', count.decode()]


async def _says_garbage(talk: Talk) -> None:
    await talk.link.send(b'{"kind":"event"')


async def _says_an_unknown_kind(talk: Talk) -> None:
    await talk.link.send(b'{"kind":"of tomorrow"}')


async def _sends_too_much(talk: Talk) -> None:
    talk.link.cut("a frame is larger than a link carries")


async def _leaves(talk: Talk) -> None:
    await talk.link.close()


async def _suspends(talk: Talk) -> None:
    await talk.say(TerminalFrame("suspended"))


async def _counts_wrongly(talk: Talk) -> None:
    await talk.say(batch(1, "durable", b"{}"))


async def _is_silent(talk: Talk) -> None:
    talk.clock.advance(FIRST_FRAME_S - 1)
    await settle()
    assert not talk.task.done()
    talk.clock.advance(1)


@contract("FLEET-98")
@pytest.mark.parametrize(
    ("does", "began", "reason"),
    [
        (_says_garbage, True, "the worker sent what cannot be read: Input data was truncated"),
        (_says_an_unknown_kind, True, "the worker sent what cannot be read: Invalid value"),
        (_sends_too_much, False, "the link to the worker was lost: a frame is larger than"),
        (_leaves, False, "the worker closed the link before the run ended"),
        (_suspends, True, "the worker suspended the run, and nothing can wake it"),
        (_counts_wrongly, True, "the worker's events cannot be trusted: a batch belongs to"),
        (_is_silent, False, "the worker said nothing for 60 s"),
    ],
)
async def test_a_run_whose_worker_fails_ends_as_an_error_that_says_how(
    does: Callable[[Talk], Awaitable[None]], *, began: bool, reason: str
) -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        await does(talk)
        driven = await talk.end()
    assert driven.outcome.status == "error"
    assert (driven.outcome.error or "").startswith(reason)
    assert driven.began == began


async def test_silence_after_the_first_frame_is_no_failure() -> None:
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        await talk.say(token("a"))
        await settle()
        talk.clock.advance(86_400)
        await talk.say(DONE)
        assert await talk.end() == CLEAN


@pytest.mark.parametrize(
    ("spec", "error"),
    [(RunSpec("\ud800"), InvalidRequest), (RunSpec("x" * (64 << 20)), TooLarge)],
    ids=["surrogate", "64 MiB"],
)
async def test_a_run_that_no_frame_can_carry_is_refused(
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
def test_what_an_ask_leaves_out_is_empty(
    body: Mapping[str, Json], ask: tuple[str, str, str, str, float | None]
) -> None:
    assert parse_ask(body) == WorkerAsk(*ask, body)


@contract("FLEET-4", "FLEET-94")
async def test_an_ask_is_answered_once_by_whoever_oversees_the_run_and_denied_by_nobody() -> None:
    witness = Witness()
    body = {"tool_name": "Bash", "resource": "git push"}

    async def decide(ask: WorkerAsk) -> bool:
        if ask.body == body:
            return True
        raise RuntimeError("it cannot be decided")

    witness.decide = decide
    async with open_talk(witness) as talk:
        await talk.hear()
        await talk.say(ApprovalRequest("1", raw(body)))
        assert await talk.hear() == ApprovalReply("1", approved=True)
        await talk.say(ApprovalRequest("1", raw(body)), ApprovalRequest("2", raw({})))
        assert await talk.hear() == ApprovalReply("2", approved=False)
        await talk.silence()
    assert witness.asked == [parse_ask(body), parse_ask({})]
    async with open_talk(DenyAll()) as talk:
        await talk.hear()
        await talk.say(ApprovalRequest("1", raw(body)))
        assert await talk.hear() == ApprovalReply("1", approved=False)


async def test_one_ask_too_many_is_denied_and_the_others_end_with_the_run() -> None:
    witness = Witness()
    witness.decide = never
    witness.carry_out = never
    async with open_talk(witness, terms=OURS) as talk:
        await talk.hear()
        for n in range(OPEN_MAX + 1):
            await talk.say(
                ApprovalRequest(f"ask {n}", raw({})), SubAgentRequest(f"call {n}", "", raw({}))
            )
        why = "too many asks are open"
        assert await talk.hear() == ApprovalReply(f"ask {OPEN_MAX}", approved=False, reason=why)
        refused = {"error": "too many host calls are open"}
        assert await talk.hear() == SubAgentReply(f"call {OPEN_MAX}", refused)
        await talk.say(DONE)
        assert await talk.end() == CLEAN
    assert witness.withdrawn == 2 * OPEN_MAX


@contract("FLEET-P8")
async def test_an_ask_that_nobody_answers_by_its_deadline_is_denied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    witness = Witness()
    late = asyncio.Event()

    async def decide(ask: WorkerAsk) -> bool:
        with contextlib.suppress(asyncio.CancelledError):  # As nobody should.
            await late.wait()
        return True

    witness.decide = decide
    async with open_talk(witness) as talk:
        await talk.hear()
        deadline = format_time(talk.clock.now_s() + 300)
        await talk.say(ApprovalRequest("1", raw({"deadline": deadline})))
        await settle()
        talk.clock.advance(299)
        await talk.silence()
        talk.clock.advance(1)
        assert await talk.hear() == ApprovalReply("1", approved=False)
        await talk.silence()
        await talk.say(DONE)
        assert await talk.end() == CLEAN
    assert "an answer came too late and was not sent: 1" in caplog.text


@pytest.mark.parametrize("how", ["fails", "is late"])
async def test_a_worker_of_ours_is_told_that_nobody_decided(how: str) -> None:
    witness = Witness()

    async def decide(ask: WorkerAsk) -> bool:
        if how == "fails":
            raise RuntimeError("it cannot be decided")
        return await never(ask)

    witness.decide = decide
    async with open_talk(witness, terms=OURS) as talk:
        await talk.hear()
        deadline = format_time(talk.clock.now_s() + 300)
        await talk.say(ApprovalRequest("1", raw({"deadline": deadline})))
        await settle()
        talk.clock.advance(300)
        why = "it could not be decided" if how == "fails" else "nobody answered in time"
        assert await talk.hear() == ApprovalReply("1", approved=False, reason=why)
        await talk.say(DONE)
        assert await talk.end() == CLEAN


async def test_a_worker_that_asks_and_does_not_read_is_given_up() -> None:
    async with open_talk(DenyAll()) as talk:

        async def flood() -> None:
            with contextlib.suppress(LinkLost):
                for n in range(10_000):
                    await talk.link.send(encode_frame(ApprovalRequest(str(n), raw({}))))

        async with asyncio.TaskGroup() as tasks:
            flooding = tasks.create_task(flood())
            driven = await talk.end()
            flooding.cancel()
    assert driven.outcome == failed("the worker asks, and does not read the answers")


# --- host calls


async def _listing(args: Mapping[str, Json]) -> Json:
    return ["a", args["op"]]


async def _odd(args: Mapping[str, Json]) -> Json:
    return object()


@contract("FLEET-100")
@pytest.mark.parametrize(
    ("terms", "carry_out", "op", "result"),
    [
        (OURS, _listing, "list", {"result": ["a", "list"]}),
        (OURS, None, "list", {"error": "it cannot be done"}),
        (OURS, _odd, "list", {"error": "the host failed at it"}),
        (HostSettings(), _listing, "list", {"error": "host calls are not taken"}),
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
async def test_a_host_call_is_done_only_where_it_was_provisioned_and_not_too_deep(
    terms: HostSettings,
    carry_out: Callable[[Mapping[str, Json]], Awaitable[Json]] | None,
    op: str,
    result: Json,
) -> None:
    witness = Witness()
    if carry_out is not None:
        witness.carry_out = carry_out
    async with open_talk(witness, terms=terms) as talk:
        await talk.hear()
        await talk.say(SubAgentRequest("1", "call", raw({"op": op})))
        assert await talk.hear() == SubAgentReply("1", result)
        await talk.say(DONE)
        assert await talk.end() == CLEAN


def test_a_workers_terms_are_those_of_its_provision() -> None:
    shallow = structs.replace(
        provision(depth=2),
        capabilities=Capabilities(max_spawn_depth=2),
        culm=CulmExtension(host_calls=True),
    )
    assert [host_terms_of(provision()), host_terms_of(shallow)] == [
        HostSettings(host_calls=False, depth=1, depth_max=4),
        HostSettings(host_calls=True, depth=2, depth_max=2),
    ]
