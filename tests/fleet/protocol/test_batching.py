"""Numbered events: batching, quality of service, and the reader."""

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
def test_tokens_then_tool_start_make_two_batches_with_none_pending() -> None:
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
def test_64_tokens_are_sent_as_a_batch_and_63_wait() -> None:
    batcher = EventBatcher(SPEC)
    assert added(batcher, *[token()] * 63) == []
    assert summary(added(batcher, token())) == [(1, 64, "ephemeral")]


def test_batch_is_due_20_ms_after_its_first_event() -> None:
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
def test_inconsistent_batch_is_refused(batch: Batch) -> None:
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
def test_unknown_events_are_durable_and_only_known_kinds_may_be_lost(
    event: dict[str, Json], qos: str
) -> None:
    assert qos_of(event) == qos
    check_batch(Batch(1, 1, qos_of(event), [raw(event)]))


@contract("FLEET-P10")
def test_reader_reports_gap_skips_repeat_and_refuses_altered_repeat() -> None:
    reader = BatchReader(RunSpec("x"))
    first = Batch(1, 2, "durable", [raw(token("a")), raw(token("b"))])
    later = Batch(5, 5, "durable", [raw(START)])
    assert reader.take(first) == NewEvents(first.events)
    assert reader.take(later) == NewEvents(later.events, missing=2)
    assert reader.take(first) == NewEvents([])
    assert reader.missing == 2
    with pytest.raises(BadFrame, match="different content"):
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
def test_batch_of_another_attempt_activation_or_session_is_refused(batch: Batch) -> None:
    with pytest.raises(BadFrame, match="belongs to another"):
        BatchReader(SPEC).take(batch)


@given(st.lists(st.sampled_from([token(), {"type": "runner_progress"}, START]), max_size=200))
def test_batched_events_arrive_in_order_without_gaps(events: list[dict[str, Json]]) -> None:
    batcher, reader = EventBatcher(SPEC), BatchReader(SPEC)
    taken = [reader.take(batch) for batch in [*added(batcher, *events), *batcher.flush()]]
    assert [event for one in taken for event in one.events] == [raw(event) for event in events]
    assert reader.missing == 0
