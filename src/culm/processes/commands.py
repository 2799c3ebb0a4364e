"""Translate a process request into the kernel's terms, and a start failure into a message."""

import errno
import os
from pathlib import Path

from culm.processes.base import ProcessRequest, ProcessStartFailed
from culm.processes.linux import TOKEN_NAME
from culm.processes.packets import PASSED_MAX, SpawnCommand

DESCRIPTORS_MAX = PASSED_MAX - 2  # Besides the channel and the command.


def make_command(request: ProcessRequest, token: str | None) -> SpawnCommand:
    """Raises `ProcessStartFailed` for values no kernel accepts. Sidecars have no token."""
    if not request.argv or not request.argv[0]:
        raise ProcessStartFailed("the command is empty")
    if len(request.descriptors) > DESCRIPTORS_MAX:
        raise ProcessStartFailed(
            f"too many descriptors: at most {DESCRIPTORS_MAX} can be passed on"
        )
    for name in request.env:
        if not name or "=" in name:
            raise ProcessStartFailed(f"invalid environment variable name: {name!r}")
    env = request.env if token is None else {**request.env, TOKEN_NAME: token}
    return SpawnCommand(
        [_encode(argument, "an argument") for argument in request.argv],
        _encode(request.cwd, "the working directory"),
        [_encode(f"{name}={value}", f"the variable {name!r}") for name, value in env.items()],
    )


def _encode(text: str, what: str) -> bytes:
    if "\0" in text:
        raise ProcessStartFailed(f"{what} contains a NUL character")
    try:
        return os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise ProcessStartFailed(f"{what} cannot be encoded") from exc


def describe_failure(request: ProcessRequest, step: str, number: int) -> str:
    """Describe why a start failed. May access the file system."""
    name = request.argv[0]
    reason = os.strerror(number).lower()
    if step == "chdir":
        return _describe_directory(request.cwd, number, reason)
    if step == "fork":
        return f"no further process can be started: {reason}"
    if step != "exec":
        return f"`{name}` could not be prepared: {reason}"
    match number:
        case errno.ENOENT if "/" in name and Path(request.cwd, name).exists():
            return f"`{name}` cannot be executed: the interpreter it names is missing"
        case errno.ENOENT:
            where = "" if "/" in name else " in PATH"
            return f"`{name}` was not found{where}"
        case errno.EACCES:
            return f"`{name}` cannot be executed: permission denied, or it is not executable"
        case errno.E2BIG:
            return f"`{name}` cannot be executed: its arguments and environment are too long"
        case errno.ENOEXEC:
            return f"`{name}` cannot be executed: it is not a program and names no interpreter"
        case _:
            return f"`{name}` cannot be executed: {reason}"


def _describe_directory(cwd: str, number: int, reason: str) -> str:
    match number:
        case errno.ENOENT:
            return f"the working directory {cwd} does not exist"
        case errno.ENOTDIR:
            return f"{cwd} is not a directory"
        case _:
            return f"the working directory {cwd} cannot be entered: {reason}"


def title_of(request: ProcessRequest) -> str:
    return request.title or " ".join(request.argv)
