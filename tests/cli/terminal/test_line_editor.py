"""Lines typed at the prompt of `culm`, parsed and completed."""

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
    ("line", "parsed"),
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
def test_line_is_a_prompt_a_slash_command_or_a_shell_command(
    line: str, parsed: TypedLine | None
) -> None:
    assert parse_line(line) == parsed


def test_mentioned_files_are_attached_and_other_mentions_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").touch()
    (tmp_path / "c.txt").touch()
    text = 'compare @"a b.txt" with @c.txt and @c.txt, mail me@home, ask @nobody'
    assert parse_prompt(text, tmp_path) == TypedPrompt(
        "compare a b.txt with c.txt and c.txt, mail me@home, ask @nobody",
        [tmp_path / "a b.txt", tmp_path / "c.txt"],
        ["@nobody"],
    )


def test_completion_offers_slash_commands_and_paths(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "cli.md").touch()
    (tmp_path / ".hidden").touch()
    assert list(completions("/se", tmp_path)) == ["/session ", "/sessions "]
    assert list(completions("@", tmp_path)) == ["@docs/"]
    assert list(completions("@docs/c", tmp_path)) == ["@docs/cli.md "]
    assert list(completions("@nowhere/", tmp_path)) == []
    assert list(completions("plain", tmp_path)) == []


@pytest.mark.parametrize("name", ["@~nobody-has-this-name/x", f"@{'x' * 300}", "@a\0b", "@none"])
def test_mention_that_cannot_be_a_file_is_sent_unchanged(tmp_path: Path, name: str) -> None:
    assert parse_prompt(f"{name} hi", tmp_path) == TypedPrompt(f"{name} hi", [], [name])
    assert list(completions(f"{name}/", tmp_path)) == []
