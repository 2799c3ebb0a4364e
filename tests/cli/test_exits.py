"""The message about a run that failed, and one-line texts."""

import pytest

from culm.cli.render.text import head_of
from culm.cli.terminal.process import ending_text
from culm.client.run import title_of
from culm.ids import RunId, SessionId
from culm.wire.runs import Run

SESSION = SessionId("s")
OURS = RunId("ours")


def test_head_and_title_are_one_line_without_control_characters() -> None:
    assert head_of("a\n\n  b\x1b[2Jc\x07") == "a b[2Jc"
    assert head_of("a\u202eb\u2066c\ud800d") == "abcd"
    assert head_of("x" * 300) == "x" * 199 + "…"
    assert title_of("one\n two") == "one two"
    assert title_of("word " * 40) == ("word " * 10)[:49] + "…"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (Run(OURS, SESSION, outcome="error", title="No", details="It is."), "No: It is."),
        (Run(OURS, SESSION, outcome="budget", title="Over"), "Over"),
        (Run(OURS, SESSION, outcome="canceled"), "canceled"),
        (Run(OURS, SESSION, state="held", title="no key"), "the run is held: no key"),
    ],
)
def test_failed_run_has_a_message_and_a_hint(run: Run, expected: str) -> None:
    message, hint = ending_text(run)
    assert message == expected
    assert "culm run --session s 'go on'" in hint


def test_hint_in_the_failure_details_is_used() -> None:
    run = Run(OURS, SESSION, outcome="error", title="No", details="Wrong key.\nhint: mend it")
    assert ending_text(run) == ("No: Wrong key.", "mend it")
