"""Private files: bounded reads, atomic writes, locks between processes, and names that are safe."""

import fcntl
import os
import re
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_TRIES, LOCK_EVERY_S = 100, 0.02  # Locks are held for one write only.
# No leading dot, because its file would be hidden and never listed.
_SAFE_NAME: Final = re.compile(r"(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}")
STEM_CHARS_MAX: Final = 200  # A file name has at most 255 bytes, including all suffixes.


class UnreadableFile(Exception):
    """The path exists but cannot be read as a file. The message is the reason."""


def read_file(file: Path, bytes_max: int) -> bytes:
    """The content of a regular file; raises `FileNotFoundError`, `UnreadableFile`. Blocks."""
    try:
        # Not blocking, because opening a pipe would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise UnreadableFile(exc.strerror or str(exc)) from exc
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFile("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as source:
            data = source.read(bytes_max + 1)
    except OSError as exc:
        raise UnreadableFile(exc.strerror or str(exc)) from exc
    finally:
        os.close(descriptor)
    if len(data) > bytes_max:
        raise UnreadableFile(f"it has more than {bytes_max} bytes")
    return data


def replace_file(file: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a private file atomically; one writer at a time.

    A file that is useless after a crash of the machine need not be `durable`.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = file.with_name(f".{file.name}.tmp.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            if durable:
                os.fsync(descriptor)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)  # The disk may be full; free the space.
        raise


@contextmanager
def locked(file: Path) -> Generator[None]:
    """Lock `file` against other processes in the block; raises OSError if it stays locked."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for attempt in range(LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == LOCK_TRIES - 1:
                    raise
                time.sleep(LOCK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


# --- names that become part of a path


class UnsafeName(ValueError):
    """The name must not become part of a path."""

    def __init__(self) -> None:
        super().__init__("not a safe id: use letters, digits, _ - . and no ..")


def is_safe_name(text: str) -> bool:
    return _SAFE_NAME.fullmatch(text) is not None


def is_safe_stem(text: str) -> bool:
    """Return True if files may be named after it, such as a record and its temporary file."""
    return is_safe_name(text) and len(text) <= STEM_CHARS_MAX


def check_name(text: str) -> str:
    """Return the name itself; raises `UnsafeName`."""
    if not is_safe_name(text):
        raise UnsafeName
    return text
