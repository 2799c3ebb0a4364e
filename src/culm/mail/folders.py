"""The directories of one mailbox, held open: nobody can exchange them while they are in use.

Owns what makes a directory safe to use, and the moves of files between them. What the files
mean is `maildir.py`'s business.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from culm.mail.base import ForeignMailbox, MailboxBusy, NoMailbox

NAMES_MAX: Final = 10_000  # In one listing: ten times what a mailbox holds.
SEQ: Final = ".seq"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: a pipe would keep us waiting for somebody at its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The lock is held for a tenth of a millisecond. Who looks seldom is passed by all who look often.
_LOCK_EVERY_S, _LOCK_EVERY_MAX_S = 0.0002, 0.002


class Subfolder(StrEnum):
    TMP = "tmp"  # Being written.
    NEW = "new"  # Delivered.
    CUR = "cur"  # Claimed.
    CORRUPT = "corrupt"
    DEAD = "dead"


class ForeignFile(Exception):
    """Something is there that is no file of ours. Says why."""


@contextmanager
def open_folders(directory: Path, address: str) -> Generator["MailboxFolders"]:
    """Those of one of the mailboxes there; raises `NoMailbox`, `ForeignMailbox`, OSError."""
    root = open_private(address, directory)
    try:
        folders = MailboxFolders(address, root, open_private(address, address, root))
        try:
            yield folders
        finally:
            folders.close()
    finally:
        os.close(root)


class MailboxFolders:
    """Asking for a part of it may raise `NoMailbox`, `ForeignMailbox`, OSError."""

    def __init__(self, address: str, root: int, box: int) -> None:
        self._address = address
        self.root = root  # The descriptor of the directory of all mailboxes.
        self.box = box  # That of this one. It is closed with its parts.
        self._parts: dict[Subfolder, int] = {}

    def close(self) -> None:
        for folder in (*self._parts.values(), self.box):
            os.close(folder)

    def part(self, part: Subfolder) -> int:
        """Its descriptor, for as long as these are entered."""
        if part not in self._parts:
            self._parts[part] = open_private(self._address, part.value, self.box)
        return self._parts[part]

    def make_missing(self) -> None:
        """Each part that is not there; raises OSError."""
        for part in Subfolder:
            with suppress(FileExistsError):
                os.mkdir(part.value, 0o700, dir_fd=self.box)

    def is_open(self, part: Subfolder) -> bool:
        """Whether anything was done with it."""
        return part in self._parts

    def names(self, part: Subfolder) -> list[str]:
        """In order. Hidden ones are what others have not written to the end."""
        found: list[str] = []
        with os.scandir(self.part(part)) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    found.append(entry.name)
                    if len(found) >= NAMES_MAX:
                        break
        return sorted(found)

    def move(self, name: str, source: Subfolder, target: Subfolder) -> bool:
        """False if it is not there. Raises OSError."""
        from_, to = self.part(source), self.part(target)
        try:
            os.rename(name, name, src_dir_fd=from_, dst_dir_fd=to)
        except FileNotFoundError:
            return False
        return True

    def drop(self, name: str, part: Subfolder) -> bool:
        """Remove a file. False if it is not there. Raises OSError."""
        try:
            os.unlink(name, dir_fd=self.part(part))
        except FileNotFoundError:
            return False
        return True

    def clear(self, name: str, part: Subfolder) -> None:
        """Remove whatever it is, with all that is in it. Raises OSError."""
        try:
            self.drop(name, part)
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=self.part(part))

    def write(self, name: str, part: Subfolder, data: bytes) -> None:
        """Make a private file, and wait until the disk has it. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        folder = self.part(part)
        try:
            file = os.open(name, flags, 0o600, dir_fd=folder)
        except FileExistsError:  # Somebody who died had our thread's number.
            self.drop(name, part)
            file = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            write_at(file, 0, data)
            os.fsync(file)
        finally:
            os.close(file)

    def read(self, name: str, part: Subfolder, bytes_max: int) -> bytes:
        """Up to one byte more than `bytes_max`; raises OSError, `Odd`."""
        file = os.open(name, os.O_RDONLY | _FILE, dir_fd=self.part(part))
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ForeignFile("it is no file")
            if found.st_uid != os.geteuid():
                raise ForeignFile("it belongs to another user")
            return read_all(file, bytes_max)
        finally:
            os.close(file)

    def remove_older(self, part: Subfolder, before_s: float) -> None:
        """Remove the files that nobody has written to since then."""
        folder = self.part(part)
        for name in self.names(part):
            with suppress(OSError):  # Whoever wrote it may be done with it meanwhile.
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before_s:
                    self.drop(name, part)

    @contextmanager
    def locked(self, wait_s: float) -> Generator[int]:
        """The journal's file, and nobody else's until then; raises `MailboxBusy`, OSError."""
        try:
            file = os.open(SEQ, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self.box)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.EISDIR):
                raise ForeignMailbox(self._address, f"{SEQ} is a link, or no file") from exc
            raise
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ForeignMailbox(self._address, f"{SEQ} is no file, or not yours")
            if not _lock(file, wait_s):
                raise MailboxBusy(self._address)
            yield file
        finally:
            os.close(file)


def open_private(address: str, name: str | Path, within: int | None = None) -> int:
    """The descriptor of a directory that only we write to; raises `NoMailbox`, `ForeignMailbox`."""
    shown = Path(name).name
    try:
        folder = os.open(name, _DIRECTORY, dir_fd=within)
    except FileNotFoundError as exc:
        raise NoMailbox(address) from exc
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignMailbox(address, f"{shown} is a link, or no directory") from exc
        raise
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    os.close(folder)
    raise ForeignMailbox(address, f"{shown} is not yours, or others may write to it")


def read_all(file: int, bytes_max: int) -> bytes:
    """Up to one byte more than `bytes_max`. Asks for what there is: room for more is dear."""
    return os.pread(file, min(os.fstat(file).st_size, bytes_max + 1), 0)


def write_at(file: int, offset: int, data: bytes) -> None:
    """All of it; raises OSError."""
    if os.pwrite(file, data, offset) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(file: int, wait_s: float) -> bool:
    """False if somebody else held it for all that time, which is the sum of our own sleeps."""
    waited_s, every_s = 0.0, _LOCK_EVERY_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited_s >= wait_s:
                return False
            time.sleep(every_s)
            waited_s += every_s
            every_s = min(2 * every_s, _LOCK_EVERY_MAX_S)
        else:
            return True
