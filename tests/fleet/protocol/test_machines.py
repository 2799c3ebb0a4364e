"""State machines of both sides of a link; every run ends once."""

import random

import pytest
from msgspec import UNSET, Raw

from culm.fleet.executor import CANCELLED, SteerMessage, completed, failed
from culm.fleet.protocol.frames import (
    OPEN_MAX,
    ApprovalReply,
    ApprovalRequest,
    Batch,
    Cancel,
    EventBatch,
    EventFrame,
    OwnedTreeReply,
    OwnedTreeRequest,
    RunSpec,
    SessionMessage,
    SessionMessageAdmitted,
    SteerFrame,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
)
from culm.fleet.protocol.host import (
    OPEN_BYTES_MAX,
    ApprovalAsked,
    EventsLost,
    HostCalled,
    HostMachine,
)
from culm.fleet.protocol.worker import (
    STUCK,
    AbortRun,
    RequestCancel,
    RevokeRun,
    StartRun,
    SteerRun,
    WorkerMachine,
)
from tests.support import contract

ONE, TWO, THREE = RunSpec("one"), RunSpec("two"), RunSpec("three")
DONE = TerminalFrame("completed", result="done")
STOPPED = TerminalFrame("cancelled")
BASH, LIST, EMPTY = Raw(b'{"tool_name":"bash"}'), Raw(b'{"op":"list"}'), Raw(b"{}")


# --- the worker


def test_run_starts_is_steered_and_ends_with_its_terminal() -> None:
    machine = WorkerMachine()
    assert machine.on_frame(ONE) == [StartRun(1, ONE)]
    assert machine.on_frame(SteerFrame("left")) == [SteerRun(1, SteerMessage("left"))]
    assert machine.on_ended(1, completed("done")) == [RevokeRun(1), DONE]
    assert machine.on_ended(1, completed("done")) == []
    assert machine.on_frame(TWO) == [StartRun(2, TWO)]


@contract("FLEET-26", "FLEET-27")
@pytest.mark.parametrize(
    "frame",
    [
        Cancel(),
        SteerFrame("nobody hears this"),
        ApprovalReply("sa-1", approved=True),
        SubAgentReply("h1", {}),
        SessionMessage({}),
    ],
)
def test_frames_for_a_run_are_dropped_without_a_run(frame: object) -> None:
    machine = WorkerMachine(host_calls=True)
    assert machine.on_frame(frame) == []  # pyright: ignore[reportArgumentType]
    machine.on_frame(ONE)
    machine.on_ended(1, completed("done"))
    assert machine.on_frame(frame) == []  # pyright: ignore[reportArgumentType]
    assert machine.on_frame(TWO) == [StartRun(2, TWO)]


@contract("FLEET-P4", "FLEET-7")
def test_second_run_starts_after_the_first_with_messages_sent_to_it() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    assert machine.on_frame(TWO) == [RequestCancel(1)]
    assert machine.on_frame(SteerFrame("for two", "m1")) == []
    assert machine.on_ended(1, CANCELLED) == [
        RevokeRun(1),
        STOPPED,
        StartRun(2, TWO, (SteerMessage("for two", "m1"),)),
    ]


def test_message_with_an_id_reaches_its_run_once() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    assert machine.on_frame(SteerFrame("a", "m1")) == [SteerRun(1, SteerMessage("a", "m1"))]
    assert machine.on_frame(SteerFrame("a", "m1")) == []
    assert machine.on_frame(SteerFrame("a")) == [SteerRun(1, SteerMessage("a"))]
    machine.on_frame(TWO)
    machine.on_frame(SteerFrame("b", "m2"))
    machine.on_frame(SteerFrame("b", "m2"))
    assert machine.on_ended(1, CANCELLED)[-1] == StartRun(2, TWO, (SteerMessage("b", "m2"),))
    assert machine.on_frame(SteerFrame("b", "m2")) == []


@contract("FLEET-P4", "FLEET-P5")
def test_runs_superseded_before_start_end_in_order() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    machine.on_frame(TWO)
    assert machine.on_frame(THREE) == []
    assert machine.on_ended(1, completed("done")) == [
        RevokeRun(1),
        DONE,
        STOPPED,
        StartRun(2, THREE),
    ]


def test_cancel_applies_to_the_newest_run_and_both_runs_end() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    machine.on_frame(TWO)
    assert machine.on_frame(Cancel()) == []
    assert machine.on_ended(1, CANCELLED) == [RevokeRun(1), STOPPED, STOPPED]
    assert machine.on_frame(THREE) == [StartRun(2, THREE)]


@contract("FLEET-17", "FLEET-P5")
def test_executor_ignoring_cancel_is_aborted_then_abandoned() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    assert machine.on_frame(Cancel()) == [RequestCancel(1)]
    assert machine.on_frame(Cancel()) == []
    assert machine.on_frame(SteerFrame("too late")) == []
    assert machine.on_grace(1) == [AbortRun(1)]
    machine.on_frame(TWO)
    terminal = TerminalFrame("error", error=STUCK.error)
    assert machine.on_grace(1) == [RevokeRun(1), STOPPED, terminal]
    assert machine.on_frame(THREE) == [terminal]
    assert machine.on_ended(1, completed("at last")) == []
    assert machine.on_frame(ONE) == [StartRun(2, ONE)]


@contract("FLEET-17")
def test_aborted_run_is_canceled_whatever_it_returns() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    machine.on_frame(Cancel())
    machine.on_grace(1)
    assert machine.on_ended(1, failed("cancelled inside")) == [RevokeRun(1), STOPPED]
    assert machine.on_grace(1) == []


@contract("FLEET-4", "FLEET-27")
def test_ask_is_answered_once_and_not_after_its_run_ends() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    assert machine.on_request(1, ApprovalRequest("sa-1", BASH))
    assert machine.on_frame(ApprovalReply("sa-2", approved=True)) == []
    assert machine.on_frame(ApprovalReply("sa-1", approved=True)) == [
        ApprovalReply("sa-1", approved=True)
    ]
    assert machine.on_frame(ApprovalReply("sa-1", approved=False)) == []
    machine.on_request(1, ApprovalRequest("sa-3", EMPTY))
    machine.on_withdrawn(1, "sa-3")
    assert machine.on_frame(ApprovalReply("sa-3", approved=True)) == []
    machine.on_request(1, ApprovalRequest("sa-4", EMPTY))
    machine.on_ended(1, CANCELLED)
    assert machine.on_frame(ApprovalReply("sa-4", approved=True)) == []
    assert not machine.on_request(1, ApprovalRequest("sa-5", EMPTY))


def test_host_call_is_sent_only_to_a_host_that_accepts_calls() -> None:
    foreign, ours = WorkerMachine(), WorkerMachine(host_calls=True)
    foreign.on_frame(ONE)
    ours.on_frame(ONE)
    assert not foreign.on_request(1, SubAgentRequest("h1", "c1", LIST))
    assert ours.on_request(1, SubAgentRequest("h1", "c1", LIST))
    assert ours.on_frame(SubAgentReply("h1", {"result": 1})) == [SubAgentReply("h1", {"result": 1})]
    assert ours.on_frame(SubAgentReply("h1", {"result": 2})) == []


def test_open_requests_of_a_run_are_limited() -> None:
    machine = WorkerMachine(host_calls=True)
    machine.on_frame(ONE)
    for number in range(OPEN_MAX):
        assert machine.on_request(1, ApprovalRequest(f"sa-{number}", EMPTY))
        assert machine.on_request(1, SubAgentRequest(f"h{number}", "", EMPTY))
    assert not machine.on_request(1, ApprovalRequest("one more", EMPTY))
    assert not machine.on_request(1, SubAgentRequest("one more", "", EMPTY))


@contract("FLEET-30")
def test_lost_link_stops_the_run_and_nothing_more_is_sent() -> None:
    machine = WorkerMachine()
    machine.on_frame(ONE)
    machine.on_frame(TWO)
    assert machine.on_lost() == []
    assert not machine.on_request(1, ApprovalRequest("sa-1", EMPTY))
    assert machine.on_grace(1) == [AbortRun(1)]
    assert machine.on_ended(1, CANCELLED) == [RevokeRun(1)]


@contract("FLEET-P4", "FLEET-P5")
@pytest.mark.parametrize("seed", range(200))
def test_each_run_has_one_terminal_and_runs_do_not_overlap(seed: int) -> None:
    chance = random.Random(seed)
    machine = WorkerMachine()
    active: set[int] = set()
    asked = terminals = 0
    for _ in range(200):
        match chance.choice(["run", "cancel", "message", "ended", "grace"]):
            case "run":
                asked += 1
                effects = machine.on_frame(RunSpec("x"))
            case "cancel":
                effects = machine.on_frame(Cancel())
            case "message":
                effects = machine.on_frame(SteerFrame("m"))
            case "ended":
                effects = machine.on_ended(min(active, default=0), completed("done"))
                active.clear()
            case _:
                effects = machine.on_grace(min(active, default=0))
        for effect in effects:
            match effect:
                case StartRun(run=run):
                    assert not active
                    active.add(run)
                case TerminalFrame():
                    terminals += 1
                case _:
                    continue
    effects = [*machine.on_ended(min(active, default=0), CANCELLED)]
    for effect in effects:
        terminals += isinstance(effect, TerminalFrame)
        if isinstance(effect, StartRun):
            terminals += len(
                [e for e in machine.on_ended(effect.run, CANCELLED) if type(e) is TerminalFrame]
            )
    assert terminals == asked


# --- the host


def test_host_emits_events_in_order_and_ends_with_the_terminal() -> None:
    machine = HostMachine(ONE)
    event = Raw(b'{"type":"token","content":"a"}')
    assert machine.on_frame(EventFrame(event)) == [EventFrame(event)]
    assert machine.on_frame(DONE) == [completed("done")]
    assert machine.on_frame(EventFrame(event)) == []
    assert machine.on_frame(DONE) == []
    assert machine.cancel() is None
    assert machine.on_broken("gone") == []


@contract("FLEET-27", "FLEET-94")
def test_host_answers_a_repeated_ask_once() -> None:
    machine = HostMachine(ONE)
    asking = ApprovalRequest("sa-1", BASH)
    assert machine.on_frame(asking) == [ApprovalAsked("sa-1", {"tool_name": "bash"})]
    assert machine.on_frame(asking) == []
    assert machine.answer("sa-1", approved=True) == ApprovalReply("sa-1", approved=True)
    assert machine.answer("sa-1", approved=False) is None
    assert machine.on_frame(asking) == []
    assert machine.answer("sa-9", approved=True) is None


@contract("FLEET-94")
@pytest.mark.parametrize("body", [b"null", b"7", b'["bash"]', b"[1e400]"])
def test_ask_with_an_unusable_body_is_still_an_ask(body: bytes) -> None:
    assert HostMachine(ONE).on_frame(ApprovalRequest("sa-1", Raw(body))) == [
        ApprovalAsked("sa-1", {})
    ]


def test_open_asks_are_limited_in_bytes() -> None:
    machine = HostMachine(ONE)
    large = Raw(b'"%s"' % (b"x" * (OPEN_BYTES_MAX // 2)))
    assert machine.on_frame(ApprovalRequest("sa-1", large)) == [ApprovalAsked("sa-1", {})]
    refused = ApprovalReply("sa-2", approved=False)
    assert machine.on_frame(ApprovalRequest("sa-2", large)) == [refused]
    machine.answer("sa-1", approved=True)
    assert machine.on_frame(ApprovalRequest("sa-3", large)) == [ApprovalAsked("sa-3", {})]


def test_reason_for_no_decision_is_sent_only_to_our_own_workers() -> None:
    for host_calls, reason in ((False, UNSET), (True, "nobody is there")):
        machine = HostMachine(ONE, host_calls=host_calls)
        machine.on_frame(ApprovalRequest("sa-1", EMPTY))
        reply = machine.answer("sa-1", approved=False, reason="nobody is there")
        assert reply == ApprovalReply("sa-1", approved=False, reason=reason)


def test_too_many_open_requests_are_refused_by_the_host() -> None:
    machine = HostMachine(ONE, host_calls=True)
    for number in range(OPEN_MAX):
        machine.on_frame(ApprovalRequest(f"sa-{number}", EMPTY))
        machine.on_frame(SubAgentRequest(f"h{number}", "", EMPTY))
    assert machine.on_frame(ApprovalRequest("more", EMPTY)) == [
        ApprovalReply("more", reason="too many asks are open")
    ]
    assert machine.on_frame(SubAgentRequest("more", "", EMPTY)) == [
        SubAgentReply("more", {"error": "too many host calls are open"})
    ]


def test_host_call_from_an_unprovisioned_worker_is_refused() -> None:
    foreign, ours = HostMachine(ONE), HostMachine(ONE, host_calls=True)
    call = SubAgentRequest("h1", "c1", LIST)
    assert foreign.on_frame(call) == [SubAgentReply("h1", {"error": "host calls are not taken"})]
    assert ours.on_frame(call) == [HostCalled("h1", "c1", {"op": "list"})]
    assert ours.reply("h1", {"result": []}) == SubAgentReply("h1", {"result": []})
    assert ours.reply("h1", {"result": []}) is None


def test_unsupported_requests_are_refused_and_the_run_continues() -> None:
    machine = HostMachine(ONE)
    assert machine.on_frame(OwnedTreeRequest("t1")) == [OwnedTreeReply("t1")]
    assert machine.on_frame(SessionMessageAdmitted({})) == []
    assert machine.on_frame(DONE) == [completed("done")]


def test_unadmitted_messages_are_known_when_the_run_ends() -> None:
    machine = HostMachine(ONE, host_calls=True)
    assert machine.steer(SteerMessage("a", "m1")) == SteerFrame("a", "m1")
    assert machine.steer(SteerMessage("b", "m2")) == SteerFrame("b", "m2")
    machine.on_frame(EventFrame(Raw(b'{"type":"message_admitted","id":"m1"}')))
    machine.on_frame(DONE)
    assert machine.steer(SteerMessage("c", "m3")) is None
    assert machine.unadmitted == (SteerMessage("b", "m2"), SteerMessage("c", "m3"))


def test_foreign_worker_receives_messages_without_ids() -> None:
    machine = HostMachine(ONE)
    assert machine.steer(SteerMessage("a", "m1")) == SteerFrame("a")
    assert machine.unadmitted == ()


@contract("FLEET-P10", "FLEET-P7")
def test_gap_is_reported_and_an_uncounted_gap_fails_the_run() -> None:
    def batch(seq: int, event: bytes) -> EventBatch:
        return EventBatch(Batch(seq, seq, "durable", [Raw(event)], execution_epoch=1))

    def end_with(dropped: int) -> list[object]:
        machine = HostMachine(RunSpec("x", execution_epoch=1))
        counted = b'{"type":"runner_progress","dropped_events":%d}' % dropped
        effects: list[object] = [*machine.on_frame(batch(1, b"{}"))]
        effects += [*machine.on_frame(batch(4, counted)), *machine.on_frame(DONE)]
        return effects

    counted = EventFrame(Raw(b'{"type":"runner_progress","dropped_events":2}'))
    assert end_with(2) == [
        EventFrame(Raw(b"{}")),
        EventsLost(2),
        counted,
        completed("done"),
    ]
    assert end_with(1)[-1] == failed("the run's history has a gap: 1 events never arrived")


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (TerminalFrame("suspended"), "the worker suspended the run, which cannot be resumed"),
        (
            EventBatch(Batch(2, 1, "durable", [Raw(b"{}")])),
            "the worker sent invalid events: the numbers of a batch do not fit its events",
        ),
    ],
)
def test_protocol_violation_by_the_worker_fails_its_run(frame: TerminalFrame, error: str) -> None:
    assert HostMachine(ONE).on_frame(frame) == [failed(error)]
