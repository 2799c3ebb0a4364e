"""Events with numbers: what is gathered, what may be lost, what a reader makes of it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from culm.fleet.protocol.batching import BatchReader, EventBatcher, NewEvents, check_batch, qos_of
from culm.fleet.protocol.frames import BadFrame, Batch, LogicalSession, RunSpec
from culm.wire.codec import Json
from tests.support import contract

SPEC = RunSpec(
    "x",
    activation_run_id="a1",
    logical_session=LogicalSession("s1", root_session_id="s0"),
    execution_epoch=2,
)
START: dict[str, Json] = {"type": "tool_start", "tool_call_id": "c1"}


def token(text: str = "t") -> dict[str, Json]:
    return {"type": "token", "content": text}


def raw(event: dict[str, Json]) -> Raw:
    return Raw(msgspec.json.encode(event))


def added(batcher: EventBatcher, *events: dict[str, Json], now_s: float = 0.0) -> list[Batch]:
    return [batch for event in events for batch in batcher.add(raw(event), qos_of(event), now_s)]


def summary(batches: list[Batch]) -> list[tuple[int, int, str]]:
    return [(batch.first_seq, batch.last_seq, batch.qos) for batch in batches]


@contract("FLEET-37")
def test_two_tokens_and_a_tool_start_are_two_batches_and_nothing_is_pending() -> None:
    batcher = EventBatcher(SPEC)
    batches = added(batcher, token("a"), token("b"), START)
    assert summary(batches) == [(1, 2, "ephemeral"), (3, 3, "durable")]
    assert batcher.flush() == []
    assert batches[0] == Batch(
        1,
        2,
        "ephemeral",
        [raw(token("a")), raw(token("b"))],
        logical_session=SPEC.logical_session,
        activation_id="a1",
        execution_epoch=2,
    )


@contract("FLEET-39")
@pytest.mark.parametrize(("strict", "qos"), [(False, "ephemeral"), (True, "durable")])
def test_64_tokens_are_a_batch_and_63_wait(strict: bool, qos: str) -> None:  # noqa: FBT001
    batcher = EventBatcher(SPEC, strict=strict)
    assert added(batcher, *[token()] * 63) == []
    assert summary(added(batcher, token())) == [(1, 64, qos)]


def test_what_waits_is_due_20_ms_after_the_first_of_it() -> None:
    batcher = EventBatcher(SPEC)
    added(batcher, token(), now_s=10.0)
    added(batcher, token(), now_s=10.015)
    assert batcher.due_s == pytest.approx(10.02)
    assert summary(batcher.flush()) == [(1, 2, "ephemeral")]
    assert batcher.due_s is None


@contract("FLEET-38")
@pytest.mark.parametrize(
    "batch",
    [
        Batch(1, 0, "durable", []),
        Batch(1, 65, "durable", [raw(START)] * 65),
        Batch(0, 0, "durable", [raw(START)]),
        Batch(1, 2, "durable", [raw(START)]),
        Batch(1, 1, "ephemeral", [raw(START)]),
        Batch(1, 2, "snapshot", [raw({"type": "runner_progress"}), raw(token())]),
        Batch(1, 1, "ephemeral", [Raw(b"7")]),
    ],
)
def test_a_batch_that_cannot_be_right_is_refused(batch: Batch) -> None:
    with pytest.raises(BadFrame):
        check_batch(batch)


@contract("FLEET-40")
@pytest.mark.parametrize(
    ("event", "qos"),
    [
        (token(), "ephemeral"),
        ({"type": "sub_agent_heartbeat"}, "ephemeral"),
        ({"type": "token_budget_updated"}, "snapshot"),
        ({"type": "task_list_item_progress"}, "durable"),
        ({"type": "never_heard_of"}, "durable"),
        ({"content": "no type"}, "durable"),
        ({"type": ["token"]}, "durable"),
        ({"type": "sub_agent_event", "event": token()}, "ephemeral"),
        ({"type": "sub_agent_event"}, "durable"),
        ({"type": "sub_agent_event", "event": {"type": "sub_agent_event"}}, "durable"),
    ],
)
def test_only_what_grows_or_repeats_may_be_lost(event: dict[str, Json], qos: str) -> None:
    assert qos_of(event) == qos
    check_batch(Batch(1, 1, qos_of(event), [raw(event)]))


@contract("FLEET-P10")
def test_a_reader_sees_a_gap_once_takes_a_repetition_once_and_refuses_an_altered_one() -> None:
    reader = BatchReader(RunSpec("x"))
    first = Batch(1, 2, "durable", [raw(token("a")), raw(token("b"))])
    later = Batch(5, 5, "durable", [raw(START)])
    assert reader.take(first) == NewEvents(first.events)
    assert reader.take(later) == NewEvents(later.events, missing=2)
    assert reader.take(first) == NewEvents([])
    assert reader.missing == 2
    with pytest.raises(BadFrame, match="another content"):
        reader.take(Batch(2, 2, "durable", [raw(token("c"))]))


@pytest.mark.parametrize(
    "batch",
    [
        Batch(1, 1, "durable", [raw(START)], execution_epoch=1),
        Batch(1, 1, "durable", [raw(START)], execution_epoch=2, activation_id="a0"),
        Batch(
            1,
            1,
            "durable",
            [raw(START)],
            execution_epoch=2,
            logical_session=LogicalSession("s9", root_session_id="s0"),
        ),
    ],
)
def test_a_batch_of_another_attempt_activation_or_session_is_refused(batch: Batch) -> None:
    with pytest.raises(BadFrame, match="belongs to another"):
        BatchReader(SPEC).take(batch)


@given(st.lists(st.sampled_from([token(), {"type": "runner_progress"}, START]), max_size=200))
def test_whatever_is_told_arrives_in_order_and_without_a_gap(events: list[dict[str, Json]]) -> None:
    batcher, reader = EventBatcher(SPEC), BatchReader(SPEC)
    taken = [reader.take(batch) for batch in [*added(batcher, *events), *batcher.flush()]]
    assert [event for one in taken for event in one.events] == [raw(event) for event in events]
    assert reader.missing == 0
