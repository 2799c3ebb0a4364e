"""An order in the kernel's terms, and why one could not be carried out, in words."""

import errno
import os
from pathlib import Path

from culm.processes.base import ProcessRequest, ProcessStartFailed
from culm.processes.linux import TOKEN_NAME
from culm.processes.packets import PASSED_MAX, SpawnCommand

DESCRIPTORS_MAX = PASSED_MAX - 2  # Beside the channel and the command.


def parse_order(order: ProcessRequest, token: str | None) -> SpawnCommand:
    """Raises `StartFailed` for what no kernel takes. Without a token it is no set's command."""
    if not order.argv or not order.argv[0]:
        raise ProcessStartFailed("there is no command to start")
    if len(order.descriptors) > DESCRIPTORS_MAX:
        raise ProcessStartFailed(f"more than {DESCRIPTORS_MAX} descriptors are passed on")
    for name in order.env:
        if not name or "=" in name:
            raise ProcessStartFailed(f"{name!r} is no name of an environment variable")
    env = order.env if token is None else {**order.env, TOKEN_NAME: token}
    return SpawnCommand(
        [_encode(word, "an argument") for word in order.argv],
        _encode(order.cwd, "the working directory"),
        [_encode(f"{name}={value}", f"the variable {name!r}") for name, value in env.items()],
    )


def _encode(text: str, what: str) -> bytes:
    if "\0" in text:
        raise ProcessStartFailed(f"{what} holds a NUL, which no process can be given")
    try:
        return os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise ProcessStartFailed(f"{what} holds what cannot be encoded") from exc


def describe_failure(order: ProcessRequest, step: str, number: int) -> str:
    """Why it could not be started. May look at the file system."""
    name = order.argv[0]
    reason = os.strerror(number).lower()
    if step == "chdir":
        return _describe_directory(order.cwd, number, reason)
    if step == "fork":
        return f"no further process can be started: {reason}"
    if step != "exec":
        return f"`{name}` could not be prepared: {reason}"
    match number:
        case errno.ENOENT if "/" in name and Path(order.cwd, name).exists():
            return f"`{name}` cannot be executed: the interpreter it names is missing"
        case errno.ENOENT:
            where = "" if "/" in name else " in PATH"
            return f"`{name}` was not found{where}"
        case errno.EACCES:
            return f"`{name}` cannot be executed: permission denied, or it is not executable"
        case errno.E2BIG:
            return f"`{name}` cannot be executed: its arguments and environment are too long"
        case errno.ENOEXEC:
            return f"`{name}` cannot be executed: it is no program and names no interpreter"
        case _:
            return f"`{name}` cannot be executed: {reason}"


def _describe_directory(cwd: str, number: int, reason: str) -> str:
    match number:
        case errno.ENOENT:
            return f"the working directory {cwd} does not exist"
        case errno.ENOTDIR:
            return f"{cwd} is no directory"
        case _:
            return f"the working directory {cwd} cannot be entered: {reason}"


def title_of(order: ProcessRequest) -> str:
    return order.title or " ".join(order.argv)
