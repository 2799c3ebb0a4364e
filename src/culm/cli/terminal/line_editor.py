"""The prompt of `culm`: line editing, history, completion, and parsing of the typed line.

During a run Escape stops the run, and other text is kept for the next prompt. Owns the mode of the
terminal meanwhile, and always restores it.
"""

import asyncio
import contextlib
import os
import re
import readline
import signal
import sys
import termios
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from msgspec import Struct

if TYPE_CHECKING:
    from io import TextIOWrapper

HISTORY_LINES = 1000
MATCHES_MAX = 100
# Punctuation at the end is not part of a file name.
_FILE = re.compile(r'(?<!\S)@(?:"([^"]+)"|(\S*[^\s,.;:!?)]))')
_NAMES = {"help", "new", "sessions", "session", "model", "quit"}

Kind = Literal["nothing", "prompt", "shell", "help", "new", "sessions", "session", "model", "quit"]


class TypedLine(Struct, frozen=True):
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


# --- keys typed during a run


KEYS_BYTES_MAX = 1024
_BACKSPACE = re.compile("[^\x7f\b]?[\x7f\b]")
ESCAPE = b"\x1b"  # Only when alone: with more bytes it is an arrow key or pasted text.


class KeyListener:
    """Reads single keys from a terminal. Use `paused` while the user types a line."""

    def __init__(self, descriptor: int, on_escape: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_escape = on_escape
        self._typed = b""  # Text for the next prompt.
        self._is_listening = False
        self._typing = termios.tcgetattr(descriptor)  # The mode for typing lines.
        self._listening = termios.tcgetattr(descriptor)
        # Ctrl-C and Ctrl-Z still send signals.
        self._listening[3] &= ~(termios.ICANON | termios.ECHO)

    @contextmanager
    def listening(self) -> Generator[None]:
        """Read keys within the block, which runs in an event loop."""
        self._listen()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Restore line mode within the block."""
        self._stop()
        try:
            yield
        finally:
            self._listen()

    def typed(self) -> str:
        """The text typed so far, as one line."""
        text = self._typed.decode(errors="replace")
        while "\x7f" in text or "\b" in text:  # Backspace removes the character before it.
            text = _BACKSPACE.sub("", text, count=1)
        return " ".join("".join(one for one in text if one.isprintable() or one.isspace()).split())

    @contextmanager
    def stopping(self) -> Generator[None]:
        """Restore the terminal before Ctrl-Z stops the process, within a block of the main thread.

        After the process is resumed it reads keys again: shells do not restore the mode.
        """

        def stop(*_: object) -> None:
            self.restore()
            os.kill(os.getpid(), signal.SIGSTOP)  # Returns when the process is resumed.
            with suppress(OSError):
                # In the background the terminal belongs to another process.
                if self._is_listening and os.tcgetpgrp(self._descriptor) == os.getpgrp():
                    self._set(self._listening)

        before = signal.signal(signal.SIGTSTP, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)

    def restore(self) -> None:
        """Restore the mode of the terminal; callable from any thread."""
        self._set(self._typing)

    def _set(self, mode: list[int | list[bytes | int]]) -> None:
        with suppress(termios.error):  # The terminal is gone.
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, mode)

    def _listen(self) -> None:
        self._is_listening = True
        self._set(self._listening)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def _stop(self) -> None:
        self._is_listening = False
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self.restore()

    def _read(self) -> None:
        try:
            keys = os.read(self._descriptor, KEYS_BYTES_MAX)
        except OSError:
            keys = b""
        if not keys:  # The terminal was closed.
            asyncio.get_running_loop().remove_reader(self._descriptor)
        elif not keys.strip(ESCAPE):  # Pressed once, or repeatedly in a hurry.
            self._on_escape()
        elif ESCAPE not in keys:  # Arrow keys and the like have no meaning here.
            self._typed = (self._typed + keys)[:KEYS_BYTES_MAX]
