"""What is typed at the prompt of `culm`: files that are named, keys that are pressed."""

import asyncio
import os
import select
import termios
from contextlib import closing
from pathlib import Path

import pytest

from culm.cli.keys import Keys
from culm.cli.talk_lines import Prompt, completions, parse_prompt
from tests.support import WAIT_S


@pytest.mark.parametrize("name", ["@~nobody-has-this-name/x", f"@{'x' * 300}", "@a\0b", "@none"])
def test_what_can_be_no_file_is_sent_as_it_is(tmp_path: Path, name: str) -> None:
    assert parse_prompt(f"{name} hi", tmp_path) == Prompt(f"{name} hi", [], [name])
    assert list(completions(f"{name}/", tmp_path)) == []


def test_a_file_is_attached_and_its_name_stays(tmp_path: Path) -> None:
    (tmp_path / "a b").write_text("x")
    found = parse_prompt('see @"a b"', tmp_path)
    assert found == Prompt("see a b", [tmp_path / "a b"], [])


@pytest.mark.parametrize(
    ("typed", "times"), [(b"\x1b", 1), (b"\x1b\x1b", 1), (b"\x1b[A", 0), (b"q", 0)]
)
async def test_only_escape_says_anything_also_pressed_twice(typed: bytes, times: int) -> None:
    ours, theirs = os.openpty()
    escapes: list[None] = []
    with closing(os.fdopen(ours, "wb", 0)) as terminal, closing(os.fdopen(theirs, "rb", 0)):
        before = termios.tcgetattr(theirs)
        with Keys(theirs, lambda: escapes.append(None)).listening():
            terminal.write(typed)
            async with asyncio.timeout(WAIT_S):
                while select.select([theirs], [], [], 0)[0]:
                    await asyncio.sleep(0)
        assert len(escapes) == times
        assert termios.tcgetattr(theirs) == before
