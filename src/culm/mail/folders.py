"""The open directories of one mailbox; open descriptors cannot be swapped while they are in use.

Owns the checks that make a directory safe to use, and moving files between directories. The
meaning of the files belongs to `maildir.py`.
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

NAMES_MAX: Final = 10_000  # Per listing: ten times the capacity of a mailbox.
SEQ: Final = ".seq"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking: opening a pipe would otherwise wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The lock is held for about 0.1 ms. A process that polls rarely is overtaken by frequent pollers.
_LOCK_EVERY_S, _LOCK_EVERY_MAX_S = 0.0002, 0.002


class Subfolder(StrEnum):
    TMP = "tmp"  # Being written.
    NEW = "new"  # Delivered.
    CUR = "cur"  # Claimed.
    CORRUPT = "corrupt"
    DEAD = "dead"


class ForeignFile(Exception):
    """A file that is not a regular file of the current user; the message gives the reason."""


@contextmanager
def open_folders(directory: Path, address: str) -> Generator["MailboxFolders"]:
    """Open the mailbox `address` below `directory`.

    Raises `NoMailbox`, `ForeignMailbox`, OSError.
    """
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
    """The descriptors of one mailbox.

    Accessing a subfolder may raise `NoMailbox`, `ForeignMailbox`, OSError.
    """

    def __init__(self, address: str, root: int, box: int) -> None:
        self._address = address
        self.root = root  # Descriptor of the directory of all mailboxes.
        self.box = box  # Descriptor of this mailbox; `close` closes it with its subfolders.
        self._open: dict[Subfolder, int] = {}

    def close(self) -> None:
        for descriptor in (*self._open.values(), self.box):
            os.close(descriptor)

    def descriptor(self, subfolder: Subfolder) -> int:
        """Return the subfolder's descriptor, which stays open until `close`."""
        if subfolder not in self._open:
            self._open[subfolder] = open_private(self._address, subfolder.value, self.box)
        return self._open[subfolder]

    def make_missing(self) -> None:
        """Create the missing subfolders; raises OSError."""
        for subfolder in Subfolder:
            with suppress(FileExistsError):
                os.mkdir(subfolder.value, 0o700, dir_fd=self.box)

    def is_open(self, subfolder: Subfolder) -> bool:
        """Return True if the subfolder has been accessed."""
        return subfolder in self._open

    def names(self, subfolder: Subfolder) -> list[str]:
        """List the file names, sorted. Hidden files are skipped: they are still being written."""
        found: list[str] = []
        with os.scandir(self.descriptor(subfolder)) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    found.append(entry.name)
                    if len(found) >= NAMES_MAX:
                        break
        return sorted(found)

    def move(self, name: str, source: Subfolder, target: Subfolder) -> bool:
        """Move a file. False if it does not exist. Raises OSError."""
        from_, to = self.descriptor(source), self.descriptor(target)
        try:
            os.rename(name, name, src_dir_fd=from_, dst_dir_fd=to)
        except FileNotFoundError:
            return False
        return True

    def drop(self, name: str, subfolder: Subfolder) -> bool:
        """Remove a file. False if it does not exist. Raises OSError."""
        try:
            os.unlink(name, dir_fd=self.descriptor(subfolder))
        except FileNotFoundError:
            return False
        return True

    def clear(self, name: str, subfolder: Subfolder) -> None:
        """Remove a file or a directory tree. Raises OSError."""
        try:
            self.drop(name, subfolder)
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=self.descriptor(subfolder))

    def write(self, name: str, subfolder: Subfolder, data: bytes) -> None:
        """Create a private file and sync it to disk. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        folder = self.descriptor(subfolder)
        try:
            file = os.open(name, flags, 0o600, dir_fd=folder)
        except FileExistsError:  # Left by a dead process that had the id of our thread.
            self.drop(name, subfolder)
            file = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            write_at(file, 0, data)
            os.fsync(file)
        finally:
            os.close(file)

    def read(self, name: str, subfolder: Subfolder, bytes_max: int) -> bytes:
        """Read up to `bytes_max` bytes and one more; raises OSError, `ForeignFile`."""
        file = os.open(name, os.O_RDONLY | _FILE, dir_fd=self.descriptor(subfolder))
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ForeignFile("it is not a regular file")
            if found.st_uid != os.geteuid():
                raise ForeignFile("it belongs to another user")
            return read_all(file, bytes_max)
        finally:
            os.close(file)

    def remove_older(self, subfolder: Subfolder, before_s: float) -> None:
        """Remove the files that were last written before that time."""
        folder = self.descriptor(subfolder)
        for name in self.names(subfolder):
            with suppress(OSError):  # Its writer may have moved or removed it meanwhile.
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < before_s:
                    self.drop(name, subfolder)

    @contextmanager
    def locked(self, wait_s: float) -> Generator[int]:
        """Lock the journal file and yield its descriptor; raises `MailboxBusy`, OSError."""
        try:
            file = os.open(SEQ, os.O_RDWR | os.O_CREAT | _FILE, 0o600, dir_fd=self.box)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.EISDIR):
                raise ForeignMailbox(self._address, f"{SEQ} is not a regular file") from exc
            raise
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ForeignMailbox(
                    self._address, f"{SEQ} is not a regular file, or belongs to another user"
                )
            if not _lock(file, wait_s):
                raise MailboxBusy(self._address)
            yield file
        finally:
            os.close(file)


def open_private(address: str, name: str | Path, within: int | None = None) -> int:
    """Open a directory that only the current user can write to.

    Raises `NoMailbox`, `ForeignMailbox`, OSError.
    """
    shown = Path(name).name
    try:
        folder = os.open(name, _DIRECTORY, dir_fd=within)
    except FileNotFoundError as exc:
        raise NoMailbox(address) from exc
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignMailbox(address, f"{shown} is a link, or not a directory") from exc
        raise
    found = os.fstat(folder)
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    os.close(folder)
    raise ForeignMailbox(address, f"{shown} is not yours, or others can write to it")


def read_all(file: int, bytes_max: int) -> bytes:
    """Read up to `bytes_max` bytes and one more.

    Requests only the size of the file, because allocating a larger buffer is expensive.
    """
    return os.pread(file, min(os.fstat(file).st_size, bytes_max + 1), 0)


def write_at(file: int, offset: int, data: bytes) -> None:
    """Write all of the data; raises OSError."""
    if os.pwrite(file, data, offset) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lock(file: int, wait_s: float) -> bool:
    """Lock the file. False if others held the lock for `wait_s`, measured as the sum of sleeps."""
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
