"""`$NAME` and `$(command)` in configuration: read only when a value is used, and never shown.

Pure, but for `run_command`. A reference stands in a key, an address or a header; what it leads to
goes nowhere but into the request it is for, and is not itself read for references.
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

from culm.errors import ModelFailed

COMMAND_S = 10.0  # A password manager may ask its owner; one that waits longer has been left.
POLL_S = 0.005  # What has printed all it will is as good as gone.
LOOK_S = 0.05  # How often a command that prints nothing is looked after.
OUTPUT_BYTES_MAX = 64 << 10
VALUE_CHARS_MAX = 64 << 10  # No key, address or header is longer.
DEPTH_MAX = 8  # References to variables that are references.

BY_HAND = "run it yourself in your home directory; `culm config show` has what is written"

# `$$` is a dollar; a `$` that none of these follows stands for itself.
_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)"
    r"|(?P<command>\()"
    r"|\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}"
    r"|(?P<name>[A-Za-z_]\w*))",
    re.ASCII,
)


class UnresolvedReference(Exception):
    """A reference leads nowhere; says why, and never what a value was."""

    def __init__(self, why: str, hint: str = "`culm config check` names every one") -> None:
        super().__init__(why)
        self.hint = hint


class Variables(NamedTuple):
    """Where names are looked up: what the configuration sets, over the environment."""

    set: Mapping[str, str]
    env: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Variables({len(self.set)} set, {len(self.env)} in the environment)"


class _Name(NamedTuple):
    name: str
    default: str | None


class _Command(NamedTuple):
    text: str


Run = Callable[[str], Awaitable[str]]  # The output of a command; raises `Unresolved`.


def _pieces(text: str) -> Iterator[str | _Name | _Command]:
    """A text cut into what stands for itself and what refers to something."""
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
    """Where the parenthesis closes that was opened before `start`."""
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
    """Why the names in a text cannot be read; empty if they can. Commands are not run."""
    try:
        for piece in _pieces(text):
            if isinstance(piece, _Name):
                _value_of(piece, variables, ())
    except UnresolvedReference as exc:
        return str(exc)
    return ""


async def resolve(text: str, variables: Variables, run: Run) -> str:
    """The text with every reference replaced; raises `Unresolved`."""
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


def _value_of(wanted: _Name, variables: Variables, inside: tuple[str, ...]) -> str:
    """What a variable holds; an empty one counts as none, as in a shell's `:-`."""
    name = wanted.name
    written = variables.set.get(name)
    if written and name not in inside[-1:]:  # `PATH: "$PATH:…"` means the outer one.
        value = _written(name, written, variables, inside)
    else:
        value = variables.env.get(name, "")
    if value:
        return value
    if wanted.default is not None:
        return wanted.default
    raise UnresolvedReference(f"${name} is not set")


def _written(name: str, text: str, variables: Variables, inside: tuple[str, ...]) -> str:
    """What the configuration says a variable holds."""
    if name in inside:
        raise UnresolvedReference(f"${name} refers to itself by way of ${', $'.join(inside[::-1])}")
    if len(inside) >= DEPTH_MAX:
        raise UnresolvedReference(f"${inside[0]} has more than {DEPTH_MAX} references in a row")
    parts: list[str] = []
    for piece in _pieces(text):
        if isinstance(piece, _Command):
            raise UnresolvedReference(
                f"${name} is a command; only keys, addresses and headers may be"
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
    """What a command prints, without its line ends; raises `Unresolved`.

    It is a process group of its own, and none of that is left when this returns.
    """
    process, source = _start(command, env, folder)
    try:
        async with asyncio.timeout(within_s):
            output = await _read(source, lambda: process.poll() is not None)
            while (status := process.poll()) is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise UnresolvedReference(f"a command took longer than {within_s:g} s", BY_HAND) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status:
        raise UnresolvedReference(f"a command failed with status {status}", BY_HAND)
    return output.decode(errors="replace").rstrip("\r\n")


def _start(
    command: str, env: Mapping[str, str], folder: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the end of a pipe from which its output is read.

    In one step: who is cancelled while a process starts does not know whom to stop.
    """
    source, sink = os.pipe()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.DEVNULL,  # It may name the secret.
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
    """All that comes out of a pipe, which is closed then.

    Who wrote into it may have ended while a process it left behind holds the other end. Without a
    transport: one that is cancelled while it is made leaves the descriptor to be closed twice.
    """
    loop, readable, output = asyncio.get_running_loop(), asyncio.Event(), b""
    os.set_blocking(source, False)
    loop.add_reader(source, readable.set)
    try:
        while len(output) <= OUTPUT_BYTES_MAX:
            ended = has_ended()  # Before the look: what it wrote is in the pipe then.
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


def failed(what: str, exc: UnresolvedReference) -> ModelFailed:
    """A run that needs the value ends with this."""
    return ModelFailed("A reference leads nowhere", f"{what}: {exc}", hint=exc.hint)
