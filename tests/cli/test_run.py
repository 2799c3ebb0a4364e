"""What `culm run` makes of a model's name, a prompt and an ending."""

import pytest

from culm.cli.asking import choose_model, limits_of
from culm.cli.render.call_lines import head_of
from culm.cli.run_ends import ending_text
from culm.client.asked_run import title_of
from culm.errors import InvalidRequest
from culm.ids import RunId, SessionId
from culm.wire.config import Model, ProviderConfig, SelectedModel
from culm.wire.runs import Limits, Run

SESSION = SessionId("s")
OURS = RunId("ours")
PROVIDERS = {
    "near": ProviderConfig(models=[Model(id="small"), Model(id="both")]),
    "far": ProviderConfig(models=[Model(id="maker/big"), Model(id="both")]),
    "off": ProviderConfig(models=[Model(id="hidden")], disable=True),
}


@pytest.mark.parametrize(
    ("text", "provider", "model"),
    [
        ("near/small", "near", "small"),
        ("near/unheard-of", "near", "unheard-of"),
        ("far/maker/big", "far", "maker/big"),
        ("maker/big", "far", "maker/big"),
        ("small", "near", "small"),
    ],
)
def test_a_model_is_found_by_its_provider_or_if_only_one_has_it(
    text: str, provider: str, model: str
) -> None:
    assert choose_model(text, PROVIDERS) == SelectedModel(model=model, provider=provider)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("both", "say near/both or far/both"),
        ("nothing", "there is near/small, near/both, far/maker/big, far/both"),
        ("off/hidden", "there is near/small, near/both, far/maker/big, far/both"),
        ("near/", "there is near/small, near/both, far/maker/big, far/both"),
    ],
)
def test_a_model_that_is_not_there_or_not_clear_is_refused_with_those_that_are(
    text: str, hint: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose_model(text, PROVIDERS)
    assert refused.value.hint == hint


def test_a_budget_is_what_it_says() -> None:
    budgets = ["0.50", "1.5ktokens", "20steps"]
    assert limits_of(budgets, "5m") == Limits(cost=0.5, tokens=1500, steps=20, wall_s=300)


@pytest.mark.parametrize("text", ["0", "0.5tokens", "0steps", "9" * 400, f"{'9' * 400}steps"])
def test_a_budget_that_would_be_no_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        limits_of([text], "")


@pytest.mark.parametrize("text", ["0", "0ms", "9" * 400, "99999999999999d"])
def test_a_time_that_would_be_no_limit_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        limits_of([], text)


def test_a_line_for_people_is_one_line_that_no_terminal_obeys() -> None:
    assert head_of("a\n\n  b\x1b[2Jc\x07") == "a b[2Jc"
    assert head_of("a\u202eb\u2066c\ud800d") == "abcd"
    assert head_of("x" * 300) == "x" * 199 + "…"
    assert title_of("one\n two") == "one two"
    assert title_of("word " * 40) == ("word " * 10)[:49] + "…"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(OURS, SESSION, outcome="error", title="No", details="It is."), "No: It is."),
        (Run(OURS, SESSION, outcome="budget", title="Over"), "Over"),
        (Run(OURS, SESSION, outcome="canceled"), "cancelled"),
        (Run(OURS, SESSION, state="held", title="no key"), "the run is held: no key"),
    ],
)
def test_a_bad_end_is_one_sentence_and_what_to_do(run: Run, words: str) -> None:
    said, hint = ending_text(run)
    assert said == words
    assert "culm run --session s 'go on'" in hint


def test_a_hint_that_comes_with_the_failure_is_the_one_that_is_shown() -> None:
    run = Run(OURS, SESSION, outcome="error", title="No", details="Wrong key.\nhint: mend it")
    assert ending_text(run) == ("No: Wrong key.", "mend it")
