"""What is typed at the prompt of `culm`, and what it means."""

from pathlib import Path

import pytest

from culm.cli.terminal.line_editor import (
    TypedLine,
    TypedPrompt,
    completions,
    parse_line,
    parse_prompt,
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("  ", TypedLine("nothing")),
        ("what is this", TypedLine("prompt", "what is this")),
        ("/usr/bin is what", TypedLine("prompt", "/usr/bin is what")),
        ("!git status", TypedLine("shell", "git status")),
        ("!", TypedLine("nothing")),
        ("/help", TypedLine("help")),
        ("/?", TypedLine("help")),
        ("/session abc", TypedLine("session", "abc")),
        ("/exit", TypedLine("quit")),
        ("/nonsense", None),
    ],
)
def test_a_line_is_a_prompt_a_command_of_ours_or_of_the_shell(
    line: str, said: TypedLine | None
) -> None:
    assert parse_line(line) == said


def test_files_that_are_named_go_along_and_other_names_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").touch()
    (tmp_path / "c.txt").touch()
    said = 'compare @"a b.txt" with @c.txt and @c.txt, mail me@home, ask @nobody'
    assert parse_prompt(said, tmp_path) == TypedPrompt(
        "compare a b.txt with c.txt and c.txt, mail me@home, ask @nobody",
        [tmp_path / "a b.txt", tmp_path / "c.txt"],
        ["@nobody"],
    )


def test_a_word_becomes_a_command_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "cli.md").touch()
    (tmp_path / ".hidden").touch()
    assert list(completions("/se", tmp_path)) == ["/session ", "/sessions "]
    assert list(completions("@", tmp_path)) == ["@docs/"]
    assert list(completions("@docs/c", tmp_path)) == ["@docs/cli.md "]
    assert list(completions("@nowhere/", tmp_path)) == []
    assert list(completions("plain", tmp_path)) == []


@pytest.mark.parametrize("name", ["@~nobody-has-this-name/x", f"@{'x' * 300}", "@a\0b", "@none"])
def test_what_can_be_no_file_is_sent_as_it_is(tmp_path: Path, name: str) -> None:
    assert parse_prompt(f"{name} hi", tmp_path) == TypedPrompt(f"{name} hi", [], [name])
    assert list(completions(f"{name}/", tmp_path)) == []
