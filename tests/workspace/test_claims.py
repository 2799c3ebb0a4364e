"""The table of claims, cell by cell; documented in docs/contract/workspaces.md."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from culm.ids import ClientId
from culm.workspace.claims import (
    AbandonedExpired,
    Claims,
    ClaimStep,
    ClientClaim,
    Created,
    Graces,
    HoldExpired,
    Input,
    Released,
    Retired,
    RunsChanged,
    Selected,
    StreamClosed,
    StreamOpened,
    WorkspaceFate,
    on_claim,
)
from tests.support import contract

A, B = ClientId("a"), ClientId("b")
GRACES = Graces(create_s=30, detach_s=10, abandoned_s=3600)


def after(*inputs: Input, claims: Claims | None = None, graces: Graces = GRACES) -> ClaimStep:
    step = ClaimStep(claims or Claims(), WorkspaceFate.KEEP)
    for what in inputs:
        step = on_claim(step.claims, what, graces)
    return step


def claim_of(step: ClaimStep, client: ClientId = A) -> ClientClaim | None:
    return step.claims.by_client.get(client)


HELD = after(Created(A)).claims
ATTACHED = after(Created(A), StreamOpened(A)).claims
TWICE = after(StreamOpened(A), claims=ATTACHED).claims
RELEASED = after(Released(A), claims=ATTACHED).claims
BIRTH = ATTACHED.by_client[A].claim_id
DETACHED = after(StreamClosed(A, BIRTH), claims=ATTACHED).claims
HOLD = HELD.by_client[A].hold or 0
DETACH_HOLD = DETACHED.by_client[A].hold or 0


@contract("INV-9", "INV-10", "INV-11", "INV-12", "INV-15", "INV-16", "INV-17", "INV-21")
@pytest.mark.parametrize(
    ("claims", "what", "streams", "released", "delay_s", "fate"),
    [
        # none
        (Claims(), Created(A), 0, False, 30, WorkspaceFate.KEEP),
        (Claims(), StreamOpened(A), 1, False, None, WorkspaceFate.KEEP),
        # held after create
        (HELD, Created(A), 0, False, 30, WorkspaceFate.KEEP),
        (HELD, StreamOpened(A), 1, False, None, WorkspaceFate.KEEP),
        (HELD, Released(A), None, None, None, WorkspaceFate.CLOSE),
        (HELD, HoldExpired(A, HOLD), None, None, None, WorkspaceFate.CLOSE),
        (HELD, Retired(A), None, None, None, WorkspaceFate.CLOSE),
        # attached
        (ATTACHED, Created(A), 1, False, None, WorkspaceFate.KEEP),
        (ATTACHED, StreamOpened(A), 2, False, None, WorkspaceFate.KEEP),
        (TWICE, StreamClosed(A, BIRTH), 1, False, None, WorkspaceFate.KEEP),
        (ATTACHED, StreamClosed(A, BIRTH), 0, False, 10, WorkspaceFate.KEEP),
        (ATTACHED, Released(A), 1, True, None, WorkspaceFate.KEEP),
        (ATTACHED, HoldExpired(A, HOLD), 1, False, None, WorkspaceFate.KEEP),
        (ATTACHED, Retired(A), None, None, None, WorkspaceFate.CLOSE),
        # attached and released
        (RELEASED, Created(A), 1, False, None, WorkspaceFate.KEEP),
        (RELEASED, StreamOpened(A), 2, True, None, WorkspaceFate.KEEP),
        (RELEASED, StreamClosed(A, BIRTH), None, None, None, WorkspaceFate.CLOSE),
        (RELEASED, Released(A), 1, True, None, WorkspaceFate.KEEP),
        (RELEASED, Retired(A), None, None, None, WorkspaceFate.CLOSE),
        # held after the last stream closed
        (DETACHED, Created(A), 0, False, 30, WorkspaceFate.KEEP),
        (DETACHED, StreamOpened(A), 1, False, None, WorkspaceFate.KEEP),
        (DETACHED, Released(A), None, None, None, WorkspaceFate.CLOSE),
        (DETACHED, HoldExpired(A, DETACH_HOLD), None, None, None, WorkspaceFate.CLOSE),
        (DETACHED, HoldExpired(A, HOLD), 0, False, None, WorkspaceFate.KEEP),
        (DETACHED, Retired(A), None, None, None, WorkspaceFate.CLOSE),
    ],
)
def test_each_cell_of_the_table(
    claims: Claims,
    what: Input,
    streams: int | None,
    released: bool | None,  # noqa: FBT001
    delay_s: float | None,
    fate: WorkspaceFate,
) -> None:
    step = on_claim(claims, what, GRACES)
    claim = claim_of(step)
    if streams is None:
        assert claim is None
    else:
        assert claim is not None
        assert (claim.streams, claim.released) == (streams, released)
        assert (claim.hold is None) == (claim.streams > 0)
    assert (step.arm.delay_s if step.arm else None) == delay_s
    assert step.fate is fate


@contract("INV-17")
def test_create_during_detach_grace_keeps_selection_and_voids_old_timer() -> None:
    selected = after(Selected(A, "s"), StreamClosed(A, BIRTH), claims=ATTACHED).claims
    old_hold = selected.by_client[A].hold
    assert old_hold is not None
    step = after(Created(A), HoldExpired(A, old_hold), claims=selected)
    assert step.fate is WorkspaceFate.KEEP
    assert step.claims.by_client[A].session_id == "s"


def test_last_close_without_detach_grace_ends_the_claim_at_once() -> None:
    step = on_claim(ATTACHED, StreamClosed(A, BIRTH), replace(GRACES, detach_s=0))
    assert step.fate is WorkspaceFate.CLOSE


@contract("INV-18")
def test_leaving_client_does_not_affect_another() -> None:
    both = after(Created(B), StreamOpened(B), claims=ATTACHED).claims
    step = after(Retired(A), claims=both)
    assert step.fate is WorkspaceFate.KEEP
    assert step.claims.by_client == {B: both.by_client[B]}


@contract("INV-19")
def test_stream_from_before_retirement_does_not_count_later() -> None:
    again = after(Retired(A), StreamOpened(A), claims=ATTACHED)
    late = on_claim(again.claims, StreamClosed(A, BIRTH), GRACES)
    assert late.fate is WorkspaceFate.KEEP
    assert late.claims == again.claims


@contract("INV-22")
def test_only_live_streams_count_as_attached() -> None:
    looking = after(Selected(A, "s"), Created(B), claims=ATTACHED).claims
    assert (looking.attached_to("s"), looking.attached_to("")) == (1, 0)
    assert after(StreamClosed(A, BIRTH), claims=looking).claims.attached_to("s") == 0


@contract("EXC-15")
def test_live_runs_defer_the_close() -> None:
    running = after(RunsChanged(1), Retired(A), claims=ATTACHED)
    assert (running.fate, running.arm and running.arm.delay_s) == (WorkspaceFate.KEEP, 3600)
    assert on_claim(running.claims, RunsChanged(0), GRACES).fate is WorkspaceFate.CLOSE
    assert on_claim(running.claims, Created(B), GRACES).fate is WorkspaceFate.KEEP


@contract("EXC-15")
def test_abandoned_runs_are_interrupted_only_by_the_latest_timer() -> None:
    running = after(RunsChanged(1), Retired(A), claims=ATTACHED)
    assert running.arm is not None
    timer = running.arm.then
    assert isinstance(timer, AbandonedExpired)
    assert on_claim(running.claims, timer, GRACES).fate is WorkspaceFate.INTERRUPT
    back = after(StreamOpened(B), claims=running.claims).claims
    assert on_claim(back, timer, GRACES).fate is WorkspaceFate.KEEP


inputs = st.one_of(
    *(
        st.builds(kind, st.sampled_from([A, B]))
        for kind in (Created, StreamOpened, Released, Retired)
    ),
    st.builds(StreamClosed, st.sampled_from([A, B]), st.integers(1, 12)),
    st.builds(HoldExpired, st.sampled_from([A, B]), st.integers(1, 12)),
    st.builds(RunsChanged, st.integers(0, 2)),
    st.builds(AbandonedExpired, st.integers(1, 12)),
)


@given(st.lists(inputs, max_size=40))
@example(
    [Created(B), StreamClosed(B, 1), StreamOpened(B)]
)  # A stream that never opened closes nothing.
def test_claim_has_either_a_stream_or_a_timer(whats: list[Input]) -> None:
    step = ClaimStep(Claims(), WorkspaceFate.KEEP)
    for what in whats:
        step = on_claim(step.claims, what, GRACES)
        for claim in step.claims.by_client.values():
            assert (claim.streams > 0) == (claim.hold is None)
        assert (step.fate is WorkspaceFate.CLOSE) == (
            not step.claims.by_client and not step.claims.live_runs
        ) or step.fate is WorkspaceFate.INTERRUPT
