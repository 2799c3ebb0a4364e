"""What a person types at the prompt of `culm`: a line, edited, remembered and understood."""

import contextlib
import os
import re
import readline
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from io import TextIOWrapper

HISTORY_LINES = 1000
MATCHES_MAX = 100
# What ends a sentence ends a name.
_FILE = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S*[^\s,.;:!?)]))')
_NAMES = {"help", "new", "sessions", "session", "model", "quit"}

Kind = Literal["nothing", "prompt", "shell", "help", "new", "sessions", "session", "model", "quit"]


@dataclass(frozen=True, slots=True)
class TypedLine:
    """A line and what it means."""

    kind: Kind
    text: str = ""


def parse_line(line: str) -> TypedLine | None:
    """What is meant; None if it begins like a command and is none."""
    text = line.strip()
    if not text:
        return TypedLine("nothing")
    if text.startswith("!"):
        return TypedLine("shell", text[1:].strip()) if text[1:].strip() else TypedLine("nothing")
    # A path is no command.
    word, _, rest = text.partition(" ")
    if not re.fullmatch(r"/[a-z?]*", word):
        return TypedLine("prompt", text)
    name = {"/exit": "quit", "/?": "help", "/": "help"}.get(word, word[1:])
    for kind in ("help", "new", "sessions", "session", "model", "quit"):
        if name == kind:
            return TypedLine(kind, rest.strip())
    return None


class TypedPrompt(NamedTuple):
    """What the agent is asked, with the files that go with it."""

    text: str
    files: list[Path]
    others: list[str]  # Names behind an @ that are no files.


def parse_prompt(text: str, directory: Path) -> TypedPrompt:
    """Files that are named with an @ are attached, and their names stay."""
    files: dict[Path, None] = {}
    others: dict[str, None] = {}

    def name(found: re.Match[str]) -> str:
        # A home nobody has, a name too long for a file: whatever it is, it is none.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            file = directory / Path(found[1] or found[2]).expanduser()
            if file.is_file():
                files[file] = None
                return found[1] or found[2]
        others[found[0]] = None
        return found[0]

    return TypedPrompt(_FILE.sub(name, text), list(files), list(others))


class LineEditor:
    """A line editor: arrows, history, and Tab for paths and commands."""

    def __init__(self, directory: Path, history: Path) -> None:
        self._directory = directory
        self._history = history
        self._matches: Sequence[str] = ()
        self._signs = ("› ", "… ") if _knows("›…", sys.stdout.encoding) else ("> ", ". ")

    def __enter__(self) -> "LineEditor":
        with contextlib.suppress(OSError):  # Without history one can type as well.
            self._history.parent.mkdir(parents=True, exist_ok=True)
            # What was typed may be secret.
            os.close(os.open(self._history, os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            readline.read_history_file(self._history)
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n")
        # What is no letter in this encoding is no reason to end. It is a terminal's own stream.
        cast("TextIOWrapper", sys.stdin).reconfigure(errors="replace")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        if not is_libedit:
            # Else each line that is pasted would be a prompt, or a command; Python has it off.
            readline.parse_and_bind("set enable-bracketed-paste on")
        return self

    def __exit__(self, *_: object) -> None:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            readline.write_history_file(self._history)

    def read(self, begun: str = "") -> str:
        """What is typed, with the lines it goes on in; raises `EOFError`, `KeyboardInterrupt`.

        `begun` stands there already, and can be changed.
        """
        first, more = self._signs
        readline.set_startup_hook(lambda: readline.insert_text(begun))
        try:
            lines = [input(first)]
        finally:
            readline.set_startup_hook(None)
        while lines[-1].endswith("\\"):
            lines.append(input(more))
        return "\n".join(line.removesuffix("\\") for line in lines)

    def _complete(self, text: str, state: int) -> str | None:
        if state == 0:
            self._matches = list(completions(text, self._directory))
        return self._matches[state] if state < len(self._matches) else None


def _knows(signs: str, encoding: str) -> bool:
    try:
        signs.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def completions(text: str, directory: Path) -> Iterator[str]:
    """What a word may become."""
    if text.startswith("/") and "/" not in text[1:]:
        yield from sorted(f"/{name} " for name in _NAMES if name.startswith(text[1:]))
    elif text.startswith("@"):
        folder, slash, start = text[1:].rpartition("/")
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            place = directory / Path(folder + slash).expanduser()
            names = sorted(entry.name for entry in os.scandir(place))
            found = [n for n in names if n.startswith(start) and (start or not n.startswith("."))]
            for name in found[:MATCHES_MAX]:
                end = "/" if (place / name).is_dir() else " "
                yield f"@{folder}{slash}{name}{end}"
