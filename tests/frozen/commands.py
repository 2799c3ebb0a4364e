"""The installed `culm` command, run inside this process.

It is found by the name of its console script, so that no module of the product is named here.
"""

import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COLUMNS = 80


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


class OutputBuffer(io.BytesIO):
    """The bytes of an output stream, which raise a signal as soon as they contain `word`."""

    def __init__(self, word: str = "", number: int = 0) -> None:
        super().__init__()
        self._word = word.encode()
        self._number = number

    def write(self, data: "ReadableBuffer", /) -> int:
        written = super().write(data)
        if self._word and self._word in self.getvalue():
            self._word = b""
            signal.raise_signal(self._number)
        return written


def run_culm(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    *,
    interrupt_at: str = "",
) -> Ended:
    """Run `culm ARGS` with an empty stdin on a terminal of 80 columns.

    It is interrupted, as by Ctrl-C, when it writes `interrupt_at`.
    """
    (script,) = entry_points(group="console_scripts", name="culm")
    main = script.load()
    out, err = (OutputBuffer(interrupt_at, signal.SIGINT) for _ in range(2))
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):  # A command sets handlers for its process.
            stack.callback(signal.signal, number, signal.getsignal(number))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stdin = stack.enter_context(Path(os.devnull).open())
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "argv", ["culm", *args])
        patch.chdir(cwd or Path.cwd())
        for name, value in {"COLUMNS": str(COLUMNS), **(env or {})}.items():
            patch.setenv(name, value)
        stack.enter_context(redirect_stdout(_text_over(out, stack)))
        stack.enter_context(redirect_stderr(_text_over(err, stack)))
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    return Ended(
        code if isinstance(code, int) else 0, out.getvalue().decode(), err.getvalue().decode()
    )


def _text_over(buffer: OutputBuffer, stack: ExitStack) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(buffer, encoding="utf-8", write_through=True)
    stack.callback(stream.detach)  # Otherwise the bytes are closed with it.
    return stream


def subcommands(help_text: str) -> list[str]:
    """Return the names in the `Commands:` section of a help text."""
    _, found, section = help_text.partition("\nCommands:\n")
    lines = section.splitlines() if found else []
    return [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].strip()]


def all_help() -> str:
    """Return the help of `culm` and of all its subcommands as one text."""
    pieces: list[str] = []
    left: list[tuple[str, ...]] = [()]
    while left:
        path = left.pop(0)
        ended = run_culm([*path, "--help"])
        assert (ended.status, ended.stderr) == (0, ""), ended
        pieces.append(f"=== {' '.join(('culm', *path))} --help\n\n{ended.stdout}")
        left = [*((*path, name) for name in subcommands(ended.stdout)), *left]
    return "\n".join(pieces)
