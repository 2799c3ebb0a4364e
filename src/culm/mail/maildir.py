"""Mailboxes as directories: `<directory>/<address>/{tmp,new,cur,corrupt,dead}` and a `.seq`.

Owns that layout and the order of writes to the disk. A letter is a file that moves from `tmp/` to
`new/` to `cur/`: it is written and synced in `tmp/`, gets its position under the lock of `.seq`, is
moved to `new/`, and `new/` is synced. Claims and acknowledgements are not synced: if one is lost,
the letter is delivered again.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

from culm.clock import Clock
from culm.errors import AppError
from culm.files import is_safe_stem
from culm.mail.base import (
    KEPT_MAX,
    MAILBOXES_MAX,
    ClaimedLetter,
    Delivered,
    ForeignMailbox,
    LetterIdTaken,
    LetterState,
    MailboxBusy,
    MailboxFailed,
    MailboxFull,
    NoMailbox,
    check_address,
)
from culm.mail.letters import (
    JOURNAL_BYTES_MAX,
    LETTER_BYTES_MAX,
    LETTERS_MAX,
    BadLetter,
    Letter,
    OrderJournal,
    encode_letter,
    has_id,
    is_ahead,
    journal_line,
    make_journal,
    name_of,
    next_position,
    parse_journal,
    read_letter,
)
from culm.processes.linux import read_boot_id
from culm.wire.codec import printable

log = logging.getLogger(__name__)

LOCK_WAIT_S: Final = 5.0  # A process that holds the lock this long is stopped, or its disk hangs.
TEMP_AGE_S: Final = 3600.0  # No letter takes an hour to write: its writer is dead.
REMOVE_TRIES: Final = 10  # This many deliveries may interfere with one removal.
# Errors caused by the process, not by the letter that was about to be read.
_PROCESS_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR})
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


# In the direction in which letters move, so that a letter being moved is not missed.
_STATES: Final = (
    (Subfolder.NEW, LetterState.DELIVERED),
    (Subfolder.CUR, LetterState.CLAIMED),
    (Subfolder.DEAD, LetterState.DEAD),
    (Subfolder.CORRUPT, LetterState.CORRUPT),
    (Subfolder.NEW, LetterState.DELIVERED),  # It may have been put back meanwhile.
)


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
    """The descriptors of one mailbox; open descriptors cannot be swapped while they are in use.

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


class MaildirPostOffice:
    """Implements `PostOffice`, with one directory per mailbox. Safe for concurrent processes."""

    def __init__(self, directory: Path, clock: Clock, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._directory = directory
        self._clock = clock
        self._boot_id = read_boot_id()
        self._lock_wait_s = lock_wait_s

    def open(self, address: str) -> "Maildir":
        mailbox = self._mailbox(address)
        with mailbox.opened():
            return mailbox

    def make(self, address: str) -> "Maildir":
        """Not synced here: the first delivery does that, and an empty mailbox loses nothing."""
        mailbox = self._mailbox(address)
        try:
            _make_synced(self._directory)
            root = open_private(address, self._directory)
            try:
                with suppress(FileExistsError):
                    os.mkdir(address, 0o700, dir_fd=root)
            finally:
                os.close(root)
        except OSError as exc:
            raise MailboxFailed(address, exc.strerror or str(exc)) from exc
        with mailbox.opened() as box:
            box.make_missing()
            for subfolder in Subfolder:
                box.descriptor(subfolder)
        return mailbox

    def addresses(self, *, claimed: bool = False) -> list[str]:
        subfolders = (Subfolder.NEW, Subfolder.CUR) if claimed else (Subfolder.NEW,)
        try:
            with os.scandir(self._directory) as entries:
                return sorted(
                    entry.name
                    for entry in islice(entries, MAILBOXES_MAX)
                    if is_safe_stem(entry.name)
                    and any(_has_files(entry.path, subfolder) for subfolder in subfolders)
                )
        except FileNotFoundError:
            return []  # No mailbox was ever created.
        except OSError as exc:
            raise MailboxFailed(self._directory.name, exc.strerror or str(exc)) from exc

    def remove(self, address: str) -> bool:
        try:
            self._mailbox(address).remove()
        except NoMailbox:
            return False
        return True

    def _mailbox(self, address: str) -> "Maildir":
        check_address(address)
        return Maildir(self._directory, address, self._clock, self._boot_id, self._lock_wait_s)


class Maildir:
    """Implements `Mailbox`; created by `MaildirPostOffice`. Keeps nothing open between calls."""

    def __init__(
        self, root: Path, address: str, clock: Clock, boot_id: str, lock_wait_s: float
    ) -> None:
        self._root = root
        self._address = address
        self._clock = clock
        self._boot_id = boot_id
        self._lock_wait_s = lock_wait_s

    def deliver(self, letter: Letter) -> Delivered:
        """A repeated letter is `again`, unless the owner is just putting the first copy back: then
        both are delivered, and the reader admits one of them."""
        data = encode_letter(letter)
        with self.opened() as box:
            temporary = f"{letter.id}.{threading.get_native_id()}"
            try:
                box.write(temporary, Subfolder.TMP, data)
                with box.locked(self._lock_wait_s) as seq:
                    delivered = self._accept(box, seq, letter, data, temporary)
            finally:
                with suppress(OSError):  # Moved already, or else removed now or by the owner.
                    box.drop(temporary, Subfolder.TMP)
            if delivered.again:
                os.fsync(box.descriptor(Subfolder.CUR))
            try:
                os.fsync(box.descriptor(Subfolder.NEW))
            except OSError:
                # The letter may not be durable. If it was claimed meanwhile, it has arrived.
                if delivered.again or box.drop(delivered.name, Subfolder.NEW):
                    raise
        return delivered

    def claim(self, letters_max: int) -> list[ClaimedLetter]:
        claims: list[ClaimedLetter] = []
        problem: OSError | None = None
        with self.opened() as box:
            for name in box.names(Subfolder.NEW):
                if len(claims) >= letters_max:
                    break
                try:
                    claims += _claim(box, name)
                except OSError as exc:  # A letter that cannot be moved does not block the others.
                    problem = exc
            _trim(box)
            if problem is not None and not claims:
                raise problem
        return claims

    def recover(self) -> list[ClaimedLetter]:
        """Also create missing subfolders, and remove the files of dead writers from `tmp/`."""
        with self.opened() as box:
            box.make_missing()
            box.remove_older(Subfolder.TMP, self._clock.now_s() - TEMP_AGE_S)
            claims = [claim for name in box.names(Subfolder.CUR) for claim in _read(box, name)]
            _trim(box)
        return claims

    def ack(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            return box.drop(claim.name, Subfolder.CUR)

    def put_back(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            return box.move(claim.name, Subfolder.CUR, Subfolder.NEW)

    def bury(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            moved = box.move(claim.name, Subfolder.CUR, Subfolder.DEAD)
            _trim(box)
        return moved

    def pending_count(self) -> int:
        with self.opened() as box:
            return len(box.names(Subfolder.NEW)) + len(box.names(Subfolder.CUR))

    def find(self, letter_id: str) -> LetterState | None:
        with self.opened() as box:
            for subfolder, state in _STATES:
                if any(has_id(name, letter_id) for name in box.names(subfolder)):
                    return state
        return None

    def remove(self) -> None:
        """Remove the mailbox under its lock: a delivery is removed too, or raises `NoMailbox`."""
        with self.opened() as box:
            for attempt in range(REMOVE_TRIES):
                with box.locked(self._lock_wait_s):
                    for subfolder in Subfolder:
                        _remove_subfolder(box, subfolder)
                with suppress(FileNotFoundError):
                    os.unlink(SEQ, dir_fd=box.box)
                try:
                    return os.rmdir(self._address, dir_fd=box.root)
                except OSError as exc:
                    # A late delivery created the lock file again, or the owner a subfolder.
                    if exc.errno != errno.ENOTEMPTY or attempt == REMOVE_TRIES - 1:
                        raise

    @contextmanager
    def opened(self) -> Generator[MailboxFolders]:
        """Open and check the directories; translate OS errors of the block into our errors."""
        try:
            with open_folders(self._root, self._address) as box:
                yield box
        except FileNotFoundError as exc:
            raise NoMailbox(self._address) from exc  # It was removed meanwhile.
        except OSError as exc:
            raise MailboxFailed(self._address, exc.strerror or str(exc)) from exc

    def _accept(
        self, box: MailboxFolders, seq: int, letter: Letter, data: bytes, temporary: str
    ) -> Delivered:
        """Assign a position and move the letter to `new/`. The caller holds the lock."""
        now_s = self._clock.now_s()
        journal = self._journal(box, seq, now_s)
        earlier = journal.find(letter.id)
        if earlier is not None and (stored := _find_data(box, earlier)) is not None:
            if stored != data:
                raise LetterIdTaken(letter.id)
            return Delivered(letter.id, earlier, again=True)
        if journal.count >= LETTERS_MAX:
            raise MailboxFull(self._address, letter.id)
        name = name_of(next_position(letter, journal.last, now_s), letter.id)
        # First, so that no position is assigned twice even if the writer is killed.
        write_at(seq, len(journal.data), journal_line(name))
        new = box.descriptor(Subfolder.NEW)
        os.rename(temporary, name, src_dir_fd=box.descriptor(Subfolder.TMP), dst_dir_fd=new)
        return Delivered(letter.id, name)

    def _journal(self, box: MailboxFolders, seq: int, now_s: float) -> OrderJournal:
        """Read the journal from `.seq`; rebuild it if it is damaged, too long or implausible."""
        journal = parse_journal(read_all(seq, JOURNAL_BYTES_MAX), self._boot_id)
        if journal is None:
            # No delivery returns before the mailbox itself is durable; an existing journal means
            # that it is.
            os.fsync(box.root)
            os.fsync(box.box)
        elif journal.count < LETTERS_MAX and not is_ahead(journal.last, now_s):
            return journal
        last = 0 if journal is None else journal.last
        names = (*box.names(Subfolder.NEW), *box.names(Subfolder.CUR))
        rebuilt = make_journal(names, self._boot_id, last, now_s)
        if journal is None or rebuilt.data != journal.data:
            os.ftruncate(seq, 0)
            # The first byte last: a process killed in between leaves a journal that is damaged.
            write_at(seq, 1, rebuilt.data[1:])
            write_at(seq, 0, rebuilt.data[:1])
        return rebuilt


def _remove_subfolder(box: MailboxFolders, subfolder: Subfolder) -> None:
    """Remove a subfolder with its files; raises OSError."""
    for _ in range(REMOVE_TRIES):
        # Each writer puts one letter into `tmp/` before it waits for the lock, which we hold.
        shutil.rmtree(subfolder.value, ignore_errors=True, dir_fd=box.box)
        try:
            os.stat(subfolder.value, dir_fd=box.box, follow_symlinks=False)
        except FileNotFoundError:
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _find_data(box: MailboxFolders, name: str) -> bytes | None:
    """Read the data of an accepted letter that is still waiting or claimed."""
    for subfolder in (Subfolder.NEW, Subfolder.CUR):
        with suppress(FileNotFoundError, ForeignFile):
            return box.read(name, subfolder, LETTER_BYTES_MAX)
    return None


def _claim(box: MailboxFolders, name: str) -> list[ClaimedLetter]:
    """Claim one letter; empty if it is gone or not a valid letter. Raises OSError."""
    if not box.move(name, Subfolder.NEW, Subfolder.CUR):
        return []
    try:
        return _read(box, name)
    except OSError:
        with suppress(OSError):  # If this fails, the owner recovers the letter at its next start.
            box.move(name, Subfolder.CUR, Subfolder.NEW)
        raise


def _read(box: MailboxFolders, name: str) -> list[ClaimedLetter]:
    """Read a claimed letter; empty if it is gone or not a valid letter. Raises OSError."""
    try:
        return [
            ClaimedLetter(read_letter(name, box.read(name, Subfolder.CUR, LETTER_BYTES_MAX)), name)
        ]
    except FileNotFoundError:
        return []
    except (BadLetter, ForeignFile) as exc:
        reason = str(exc)
    except OSError as exc:
        if exc.errno in _PROCESS_ERRORS:
            raise
        reason = exc.strerror or str(exc)
    try:
        _quarantine(box, name)
        log.warning("moved to corrupt/: %s: %s", printable(name), reason)
    except (AppError, OSError) as exc:  # It stays claimed and does not block the others.
        log.warning("cannot move to corrupt/: %s: %s; %s", printable(name), reason, exc)
    return []


def _quarantine(box: MailboxFolders, name: str) -> None:
    try:
        box.move(name, Subfolder.CUR, Subfolder.CORRUPT)
    except OSError:  # A file cannot replace a directory, nor a directory a file.
        box.clear(name, Subfolder.CORRUPT)
        box.move(name, Subfolder.CUR, Subfolder.CORRUPT)


def _trim(box: MailboxFolders) -> None:
    """Remove the oldest letters beyond `KEPT_MAX` where letters were just moved to."""
    for subfolder in (Subfolder.CORRUPT, Subfolder.DEAD):
        if box.is_open(subfolder):
            for old in box.names(subfolder)[:-KEPT_MAX]:
                with suppress(OSError):  # Then it stays; the limit applies to the next ones too.
                    box.clear(old, subfolder)


def _make_synced(directory: Path) -> None:
    """Create a private directory and its parents, each synced before it is used."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _has_files(mailbox: str, subfolder: Subfolder) -> bool:
    """Check for files. An unreadable mailbox counts as empty; opening it raises the error."""
    with suppress(OSError), os.scandir(f"{mailbox}/{subfolder}") as entries:
        return any(not entry.name.startswith(".") for entry in entries)
    return False
