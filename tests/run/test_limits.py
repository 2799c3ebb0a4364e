"""Limits of a run, and loop detection."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import InvalidRequest, ModelFailed
from culm.ids import MessageId, SessionId
from culm.model.base import ModelRequest, TokenUsage
from culm.run import limits
from culm.run.context import needs_summary
from culm.run.limits import CallOutcome, Price, RunSpending
from culm.settings import Settings
from culm.wire.messages import Message, Text, TextPart
from culm.wire.runs import Limits, Used
from tests.support import contract

PRICE = Price(input=3.0, output=15.0, cache_read=0.3, cache_write=3.75)
MESSAGE = Message(MessageId("m"), "user", SessionId("s"), [TextPart(Text("hello"))])
REQUEST = ModelRequest("", [MESSAGE])


@pytest.mark.parametrize(
    ("error", "attempt", "delay_s"),
    [
        (ModelFailed("t", "d", transient=True), 0, 5.0),
        (ModelFailed("t", "d", transient=True), 2, 20.0),
        (ModelFailed("t", "d", transient=True), 3, None),
        (ModelFailed("t", "d"), 0, None),
        (ModelFailed("t", "d", transient=True, retry_after_s=0.5), 0, 0.5),
        (ModelFailed("t", "d", transient=True, retry_after_s=60.0), 1, 60.0),
        (ModelFailed("t", "d", transient=True, retry_after_s=61.0), 0, None),
    ],
)
def test_transient_failure_is_retried_three_times_within_its_delay(
    error: ModelFailed, attempt: int, delay_s: float | None
) -> None:
    assert limits.retry_delay_s(error, attempt) == delay_s


@contract("INV-81")
def test_counted_usage_has_a_cost_and_estimated_usage_has_none() -> None:
    counted = limits.used_of(TokenUsage(1000, 100, 2000, 400), PRICE, REQUEST, 5)
    assert (counted.prompt_tokens, counted.completion_tokens) == (3000, 100)
    assert counted.cost == pytest.approx(0.0066)
    assert not counted.estimated
    reported = limits.used_of(TokenUsage(1000, 100, cost=0.5), PRICE, REQUEST, 5)
    assert reported.cost == 0.5
    for nothing in (None, TokenUsage()):
        guessed = limits.used_of(nothing, PRICE, REQUEST, 5)
        assert guessed.estimated
        assert guessed.cost == 0
        assert guessed.completion_tokens == 2
        assert guessed.prompt_tokens > 0


def test_prompt_limits_can_only_lower_the_settings() -> None:
    settings = Settings(run_wall_s=100, run_steps_max=10, run_tokens_max=0, run_cost_max=2.0)
    asked = Limits(wall_s=500, steps=3, tokens=7)
    assert limits.effective(asked, settings) == Limits(100, 3, 7, 2.0)


def test_run_is_over_its_limit_once_it_is_used_up() -> None:
    spent = (
        RunSpending()
        .plus(Used(10, 5, 0.25, estimated=False))
        .plus(Used(1, 1, 0.5, estimated=False))
    )
    assert spent == RunSpending(2, 17, 0.75)
    assert limits.over_limit(spent, Limits()) is None
    assert limits.over_limit(spent, Limits(steps=3, tokens=18, cost=0.76)) is None
    for tight in (Limits(steps=2), Limits(tokens=17), Limits(cost=0.75)):
        ending = limits.over_limit(spent, tight)
        assert ending is not None
        assert ending.outcome == "budget"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_invalid_limits_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest):
        limits.check_limits(Limits(wall_s=value))


def step(output: str = "same") -> str:
    return limits.fingerprint([CallOutcome("bash", "{}", output)])


@contract("INV-80")
def test_loop_is_more_than_five_equal_steps_of_the_last_ten() -> None:
    different = [step(str(n)) for n in range(20)]
    assert not limits.repeats_itself([step()] * 9)
    assert limits.repeats_itself([step()] * 10)
    assert not limits.repeats_itself([*[step()] * 5, *different[:5]])
    assert limits.repeats_itself([*[step()] * 6, *different[:4]])
    assert not limits.repeats_itself([*[step()] * 6, *different[:10]]), "too long ago"
    assert not limits.repeats_itself([limits.fingerprint([])] * 20), "without calls"


@contract("INV-80")
@given(st.lists(st.sampled_from("abcdef"), max_size=30))
def test_loop_detection_agrees_with_counting(outputs: list[str]) -> None:
    last = outputs[-10:]
    expected = len(outputs) >= 10 and max(last.count(o) for o in last) > 5
    assert limits.repeats_itself([step(output) for output in outputs]) is expected


@contract("INV-81")
def test_cache_writes_count_towards_context_and_limit() -> None:
    used = limits.used_of(TokenUsage(10, 5, 20, 190_000), PRICE, REQUEST, 5)
    assert (used.prompt_tokens, used.all_tokens) == (30, 190_035)
    assert needs_summary(200_000, used.all_tokens)
    assert limits.over_limit(RunSpending().plus(used), Limits(tokens=190_000)) is not None
