"""`$NAME` and `$(command)` in configuration, resolved only when a value is used, and never shown.

Pure, except for `run_command`. References are allowed in keys, addresses and headers. A resolved
value is only used in its request, and is not searched for further references.
"""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

COMMAND_S = 10.0  # A password manager may prompt its user; after this long nobody is there.
POLL_S = 0.005  # A command that has closed its output exits soon.
REAP_ROUNDS_MAX = 50  # A killed process needs a moment to end.
LOOK_S = 0.05  # The interval of checks on a command that prints nothing.
OUTPUT_BYTES_MAX = 64 << 10
VALUE_CHARS_MAX = 64 << 10  # No key, address or header is longer.
DEPTH_MAX = 8  # The length of a chain of variables that refer to variables.

COMMAND_HINT = "run it yourself in your home directory; `culm config show` shows the command"

# `$$` is a dollar sign. A `$` that does not start a reference is kept.
_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)"
    r"|(?P<command>\()"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}"
    r"|(?P<name>[A-Za-z_]\w*))",
    re.ASCII,
)


class UnresolvedReference(Exception):
    """A reference cannot be resolved. The message gives the reason and never a value."""

    def __init__(self, reason: str, hint: str = "run `culm config check` to list them all") -> None:
        super().__init__(reason)
        self.hint = hint


class Variables(NamedTuple):
    """The values of names: the configuration takes precedence over the environment."""

    set: Mapping[str, str]
    env: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Variables({len(self.set)} set, {len(self.env)} in the environment)"


class _Name(NamedTuple):
    name: str
    default: str | None


class _Command(NamedTuple):
    text: str


Run = Callable[[str], Awaitable[str]]  # The output of a command; raises `UnresolvedReference`.


def _pieces(text: str) -> Iterator[str | _Name | _Command]:
    """Split a text into literal text and references."""
    end = 0
    while (found := _REFERENCE.search(text, end)) is not None:
        yield text[end : found.start()]
        end = found.end()
        if found["dollar"]:
            yield "$"
        elif found["command"]:
            close = _closing(text, end)
            yield _Command(text[end:close])
            end = close + 1
        else:
            yield _Name(found["braced"] or found["name"], found["default"])
    yield text[end:]


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one before `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise UnresolvedReference("a command does not end: `)` is missing")


def names_in(text: str) -> set[str]:
    """The variables that a text refers to."""
    try:
        return {piece.name for piece in _pieces(text) if isinstance(piece, _Name)}
    except UnresolvedReference:
        return set()


def why_unresolved(text: str, variables: Variables) -> str:
    """The reason why a name in a text cannot be resolved, or an empty string; runs no commands."""
    try:
        for piece in _pieces(text):
            if isinstance(piece, _Name):
                _value_of(piece, variables, ())
    except UnresolvedReference as exc:
        return str(exc)
    return ""


async def resolve(text: str, variables: Variables, run: Run) -> str:
    """The text with every reference replaced by its value; raises `UnresolvedReference`."""
    parts: list[str] = []
    for piece in _pieces(text):
        match piece:
            case _Command(text=command):
                parts.append(await run(command))
            case _Name():
                parts.append(_value_of(piece, variables, ()))
            case str():
                parts.append(piece)
    return "".join(parts)


def _value_of(reference: _Name, variables: Variables, inside: tuple[str, ...]) -> str:
    """The value of a variable; an empty one counts as unset, as with `:-` in a shell."""
    name = reference.name
    configured = variables.set.get(name)
    if configured and name not in inside[-1:]:  # `PATH: "$PATH:…"` refers to the environment.
        value = _configured_value(name, configured, variables, inside)
    else:
        value = variables.env.get(name, "")
    if value:
        return value
    if reference.default is not None:
        return reference.default
    raise UnresolvedReference(f"${name} is not set")


def _configured_value(name: str, text: str, variables: Variables, inside: tuple[str, ...]) -> str:
    """The value of a variable that the configuration sets."""
    if name in inside:
        raise UnresolvedReference(f"${name} refers to itself by way of ${', $'.join(inside[::-1])}")
    if len(inside) >= DEPTH_MAX:
        raise UnresolvedReference(f"${inside[0]} has more than {DEPTH_MAX} references in a row")
    parts: list[str] = []
    for piece in _pieces(text):
        if isinstance(piece, _Command):
            raise UnresolvedReference(
                f"${name} is a command; commands are only allowed in keys, addresses and headers"
            )
        is_name = isinstance(piece, _Name)
        parts.append(_value_of(piece, variables, (*inside, name)) if is_name else piece)
        if sum(map(len, parts)) > VALUE_CHARS_MAX:
            raise UnresolvedReference(f"${name} is longer than {VALUE_CHARS_MAX} characters")
    return "".join(parts)


# --- commands


async def run_command(
    command: str, env: Mapping[str, str], folder: Path, *, within_s: float = COMMAND_S
) -> str:
    """The output of a command without trailing line breaks; raises `UnresolvedReference`.

    The command has a process group of its own, which is killed before this returns.
    """
    process, source = _start(command, env, folder)
    try:
        async with asyncio.timeout(within_s):
            output = await _read(source, lambda: process.poll() is not None)
            while (status := process.poll()) is None:  # noqa: ASYNC110 - Popen has no event
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        problem = f"a command took longer than {within_s:g} s"
        raise UnresolvedReference(problem, COMMAND_HINT) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        await _reap_orphans(process.pid)
    if status:
        raise UnresolvedReference(f"a command failed with status {status}", COMMAND_HINT)
    return output.decode(errors="replace").rstrip("\r\n")


async def _reap_orphans(group: int) -> None:
    """Collect processes of a killed group that were left to us, as a server is a subreaper."""
    for _ in range(REAP_ROUNDS_MAX):
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:  # noqa: ASYNC222 - never waits
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(POLL_S)


def _start(
    command: str, env: Mapping[str, str], folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the read end of a pipe for its output.

    It does not await: a cancel during an asynchronous start would leave a process to nobody.
    """
    source, sink = os.pipe()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.DEVNULL,  # It may contain the secret.
            env=env,
            cwd=folder,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        os.close(source)
        raise UnresolvedReference(f"a command cannot be started: {type(exc).__name__}") from None
    finally:
        os.close(sink)
    return process, source


async def _read(source: int, has_ended: Callable[[], bool]) -> bytes:
    """Read a pipe to its end, or until the command has ended, and close it.

    A process that the command left behind may keep the write end open. There is no transport here,
    because a cancel while one is created would close the descriptor twice.
    """
    loop, readable, output = asyncio.get_running_loop(), asyncio.Event(), b""
    os.set_blocking(source, False)
    loop.add_reader(source, readable.set)
    try:
        while len(output) <= OUTPUT_BYTES_MAX:
            ended = has_ended()  # Before the read: then all of its output is in the pipe.
            readable.clear()
            try:
                piece = os.read(source, OUTPUT_BYTES_MAX)
            except BlockingIOError:
                if ended:
                    return output
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await readable.wait()
                continue
            if not piece:
                return output
            output += piece
    finally:
        loop.remove_reader(source)
        os.close(source)
    raise UnresolvedReference(f"a command printed more than {OUTPUT_BYTES_MAX} bytes")
