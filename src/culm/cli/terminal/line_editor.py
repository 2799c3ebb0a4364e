"""The prompt of `culm`: line editing, history, completion, and parsing of the typed line."""

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
# Punctuation at the end is not part of a file name.
_FILE = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S*[^\s,.;:!?)]))')
_NAMES = {"help", "new", "sessions", "session", "model", "quit"}

Kind = Literal["nothing", "prompt", "shell", "help", "new", "sessions", "session", "model", "quit"]


@dataclass(frozen=True, slots=True)
class TypedLine:
    """A typed line and its kind."""

    kind: Kind
    text: str = ""


def parse_line(line: str) -> TypedLine | None:
    """Parse a line; None if it looks like a command but is not one."""
    text = line.strip()
    if not text:
        return TypedLine("nothing")
    if text.startswith("!"):
        return TypedLine("shell", text[1:].strip()) if text[1:].strip() else TypedLine("nothing")
    # A path is not a command.
    name, _, rest = text.partition(" ")
    if not re.fullmatch(r"/[a-z?]*", name):
        return TypedLine("prompt", text)
    name = {"/exit": "quit", "/?": "help", "/": "help"}.get(name, name[1:])
    for kind in ("help", "new", "sessions", "session", "model", "quit"):
        if name == kind:
            return TypedLine(kind, rest.strip())
    return None


class TypedPrompt(NamedTuple):
    """The prompt for the agent, with its attached files."""

    text: str
    files: list[Path]
    others: list[str]  # Names after an @ that are not files.


def parse_prompt(text: str, directory: Path) -> TypedPrompt:
    """Attach the files named with an @; the names stay in the text, without the @."""
    files: dict[Path, None] = {}
    others: dict[str, None] = {}

    def name(found: re.Match[str]) -> str:
        # An unknown home directory or an invalid name is not a file.
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
        self._prompts = ("› ", "… ") if _can_encode("›…", sys.stdout.encoding) else ("> ", ". ")

    def __enter__(self) -> "LineEditor":
        with contextlib.suppress(OSError):  # The prompt works without a history.
            self._history.parent.mkdir(parents=True, exist_ok=True)
            # Typed lines may contain secrets.
            os.close(os.open(self._history, os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            readline.read_history_file(self._history)
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n")
        # Undecodable input must not end the prompt. Stdin is a terminal, so it is a text stream.
        cast("TextIOWrapper", sys.stdin).reconfigure(errors="replace")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        if not is_libedit:
            # Without it every pasted line would be sent by itself; Python turns it off.
            readline.parse_and_bind("set enable-bracketed-paste on")
        return self

    def __exit__(self, *_: object) -> None:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            readline.write_history_file(self._history)

    def read(self, initial: str = "") -> str:
        """Read a line and its continuation lines; raises `EOFError`, `KeyboardInterrupt`.

        `initial` is the editable text that the line starts with.
        """
        first, more = self._prompts
        readline.set_startup_hook(lambda: readline.insert_text(initial))
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


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def completions(text: str, directory: Path) -> Iterator[str]:
    """The completions of a command or of a path after an @."""
    if text.startswith("/") and "/" not in text[1:]:
        yield from sorted(f"/{name} " for name in _NAMES if name.startswith(text[1:]))
    elif text.startswith("@"):
        folder, slash, start = text[1:].rpartition("/")
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            location = directory / Path(folder + slash).expanduser()
            names = sorted(entry.name for entry in os.scandir(location))
            found = [n for n in names if n.startswith(start) and (start or not n.startswith("."))]
            for name in found[:MATCHES_MAX]:
                end = "/" if (location / name).is_dir() else " "
                yield f"@{folder}{slash}{name}{end}"
