"""Private files: read within bounds, written whole or not at all, changed by one at a time."""

import fcntl
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

LOCK_TRIES, LOCK_EVERY_S = 100, 0.02  # Whoever holds the lock holds it for one write.


class UnreadableFile(Exception):
    """Something is there, and it is not a file we read. Says why."""


def read_file(file: Path, bytes_max: int) -> bytes:
    """All of a regular file; raises `FileNotFoundError`, `Unreadable`. Blocks as the disk does."""
    try:
        # Not blocking: a pipe would keep us waiting for somebody to write into it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise UnreadableFile(exc.strerror or str(exc)) from exc
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableFile("it is no file")
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
    """Write a private file whole or not at all; one writer at a time.

    One that means nothing after a crash of the machine need not be `durable`.
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
        temporary.unlink(missing_ok=True)  # The disk may be full; leave it what there is.
        raise


@contextmanager
def locked(file: Path) -> Generator[None]:
    """Keep other processes from changing `file` meanwhile; raises OSError if one does not end."""
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
