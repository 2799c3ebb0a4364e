"""The lines that tell what goes on: bounded, as wide as there is room, nothing in them obeyed."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cli.render.cells import cells_of, fit
from culm.cli.terminal.status_lines import (
    AGENTS_MAX,
    AgentStatus,
    RunStatus,
    elapsed_text,
    lines_of,
)

TREE = RunStatus(
    model="anthropic/claude-sonnet-4-5",
    elapsed_s=12.3,
    tokens=1366,
    cost=0.0123,
    calls=["bash make test", "view garden.py"],
    agents=[
        AgentStatus("read README.md", "view README.md", 236, 0.001),
        AgentStatus("edit garden.py", "asks the model", 549, 0.002, depth=1),
    ],
)


@pytest.mark.parametrize(
    ("cells_max", "lines"),
    [
        (
            100,
            [
                "⠸ 12 s · anthropic/claude-sonnet-4-5 · 1,366 tokens, $0.0123 "
                "· bash make test, view garden.py",
                "  read README.md · 236 tokens, $0.0010 · view README.md",
                "    edit garden.py · 549 tokens, $0.0020 · asks the model",
            ],
        ),
        (
            80,
            [
                "⠸ 12 s · anthropic/claude-sonnet-4-5 · 1,366 tokens, $0.0123 · bash make test,…",
                "  read README.md · 236 tokens, $0.0010 · view README.md",
                "    edit garden.py · 549 tokens, $0.0020 · asks the model",
            ],
        ),
        (
            40,
            [
                "⠸ 12 s · bash make test, view garden.py",
                "  read README.md · view README.md",
                "    edit garden.py · asks the model",
            ],
        ),
        (20, ["⠸ 12 s · bash make…", "  read README.md ·…", "    edit garden.py…"]),
        (1, ["…", "…", "…"]),
        (0, ["", "", ""]),
    ],
)
def test_where_there_is_little_room_what_is_done_stays(cells_max: int, lines: list[str]) -> None:
    assert lines_of(TREE, cells_max) == lines


def test_before_anything_is_known_there_is_a_sign_of_life() -> None:
    assert lines_of(RunStatus(state="asks the model"), 40) == ["⠋ 0 s · asks the model"]
    assert lines_of(RunStatus(), 40) == ["⠋ 0 s"]


def test_of_many_agents_some_are_shown_and_the_others_counted() -> None:
    agents = [AgentStatus(f"a{number}", "starts") for number in range(AGENTS_MAX + 1234)]
    lines = lines_of(RunStatus(agents=agents), 40)
    assert len(lines) == 1 + AGENTS_MAX + 1
    assert lines[-1] == "  … and 1,234 more"
    assert len(lines_of(RunStatus(agents=agents[:AGENTS_MAX]), 40)) == 1 + AGENTS_MAX


def test_wide_signs_count_two_and_are_not_halved() -> None:
    doing = RunStatus(calls=["漢字漢字漢字漢字"], agents=[AgentStatus("木" * 20, "走る")])
    assert lines_of(doing, 17) == ["⠋ 0 s · 漢字漢字…", "  木木木木木木木…"]


def test_names_of_strangers_are_shown_and_not_obeyed() -> None:
    evil = "\x1b[2J\x07a\r\nb\x9b31m\u202ec\td"
    doing = RunStatus(model=f"p/{evil}", calls=[evil], agents=[AgentStatus(evil, evil)])
    for line in lines_of(doing, 200):
        assert line.isprintable(), line
        assert "b" in line


HOSTILE = st.text(
    st.characters() | st.sampled_from("漢\u0301\ufe0f\u200d🇩🇪👩\x1b\r\n\t…"), max_size=50
)


@given(HOSTILE, HOSTILE, st.integers(0, 90), st.integers(0, 5))
def test_no_line_is_ever_wider_than_told(name: str, what: str, cells_max: int, depth: int) -> None:
    agent = AgentStatus(name, what, 1, depth=depth)
    for line in lines_of(RunStatus(name, 1, 2, 3, [what], agents=[agent]), cells_max):
        assert cells_of(line) <= cells_max
        assert not any(unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") for one in line)


@given(HOSTILE, st.integers(0, 60))
def test_a_text_is_cut_only_if_it_must_be(text: str, cells_max: int) -> None:
    kept = fit(text, cells_max)
    assert kept == text if cells_of(text) <= cells_max else text.startswith(kept[:-1])


@pytest.mark.parametrize(
    ("elapsed_s", "text"), [(0.9, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_time_is_told_in_words(elapsed_s: float, text: str) -> None:
    assert elapsed_text(elapsed_s) == text
