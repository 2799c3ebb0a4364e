"""Keys pressed during a run."""

import asyncio
import os
import select
import termios
from contextlib import closing

import pytest

from culm.cli.terminal.line_editor import KeyListener
from tests.support import WAIT_S


@pytest.mark.parametrize(
    ("typed", "times"), [(b"\x1b", 1), (b"\x1b\x1b", 1), (b"\x1b[A", 0), (b"q", 0)]
)
async def test_only_escape_is_reported_and_once_when_pressed_twice(
    typed: bytes, times: int
) -> None:
    ours, theirs = os.openpty()
    escapes: list[None] = []
    with closing(os.fdopen(ours, "wb", 0)) as terminal, closing(os.fdopen(theirs, "rb", 0)):
        before = termios.tcgetattr(theirs)
        keys = KeyListener(theirs, lambda: escapes.append(None))
        with keys.listening():
            terminal.write(typed)
            async with asyncio.timeout(WAIT_S):
                while select.select([theirs], [], [], 0)[0]:
                    await asyncio.sleep(0)
        assert len(escapes) == times
        assert keys.typed() == ("q" if typed == b"q" else "")
        assert termios.tcgetattr(theirs) == before


async def test_text_typed_meanwhile_is_one_line_with_backspace_applied() -> None:
    ours, theirs = os.openpty()
    with closing(os.fdopen(ours, "wb", 0)) as terminal, closing(os.fdopen(theirs, "rb", 0)):
        keys = KeyListener(theirs, lambda: None)
        with keys.listening():
            terminal.write("gp\x7fo \ton\nnöw\x01".encode())
            async with asyncio.timeout(WAIT_S):
                while select.select([theirs], [], [], 0)[0]:
                    await asyncio.sleep(0)
        assert keys.typed() == "go on nöw"
