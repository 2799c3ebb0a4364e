"""One mailbox as directories: a letter is a file that moves from `tmp/` to `new/` to `cur/`.

Owns in which order the disk is told what. A letter is written and synced in `tmp/`, gets its
place under the lock of `.seq`, is moved to `new/`, and `new/` is synced. Claims and acks are not
synced: a lost one is a letter that comes again.
"""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from culm.clock import Clock
from culm.errors import AppError
from culm.mail.base import (
    KEPT_MAX,
    ClaimedLetter,
    Delivered,
    LetterIdTaken,
    LetterState,
    MailboxFailed,
    MailboxFull,
    NoMailbox,
    read_letter,
)
from culm.mail.folders import (
    SEQ,
    ForeignFile,
    MailboxFolders,
    Subfolder,
    open_folders,
    read_all,
    write_at,
)
from culm.mail.letters import LETTER_BYTES_MAX, BadLetter, Letter, encode_letter
from culm.mail.order import (
    JOURNAL_BYTES_MAX,
    LETTERS_MAX,
    OrderJournal,
    is_ahead,
    journal_line,
    make_journal,
    name_of,
    next_position,
    parse_journal,
    parse_name,
)
from culm.wire.codec import printable

log = logging.getLogger(__name__)

TEMP_AGE_S: Final = 3600.0  # Nobody writes on one letter for an hour: its writer is dead.
REMOVE_TRIES: Final = 10  # As many deliveries may cross one removal.
# The fault of the process, not of the letter that it was about to read.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR})
# In the direction in which letters move, so that one on its way is not missed.
_PLACES: Final = (
    (Subfolder.NEW, LetterState.DELIVERED),
    (Subfolder.CUR, LetterState.CLAIMED),
    (Subfolder.DEAD, LetterState.DEAD),
    (Subfolder.CORRUPT, LetterState.CORRUPT),
    (Subfolder.NEW, LetterState.DELIVERED),  # It may have been put back meanwhile.
)


class Maildir:
    """Implements `Mailbox`; made by `MaildirPost`. Holds nothing open between two calls."""

    def __init__(
        self, root: Path, address: str, clock: Clock, boot_id: str, lock_wait_s: float
    ) -> None:
        self._root = root
        self._address = address
        self._clock = clock
        self._boot_id = boot_id
        self._lock_wait_s = lock_wait_s

    def deliver(self, letter: Letter) -> Delivered:
        """A repeated one is `again`, unless the owner just puts the first one back: then there
        are two files, of which `Seen` lets one pass."""
        data = encode_letter(letter)
        with self.opened() as box:
            temporary = f"{letter.id}.{threading.get_native_id()}"
            try:
                box.write(temporary, Subfolder.TMP, data)
                with box.locked(self._lock_wait_s) as seq:
                    delivered = self._accept(box, seq, letter, data, temporary)
            finally:
                with suppress(OSError):  # It was moved away; or it must go, now or by the owner.
                    box.drop(temporary, Subfolder.TMP)
            if delivered.again:
                os.fsync(box.part(Subfolder.CUR))
            try:
                os.fsync(box.part(Subfolder.NEW))
            except OSError:
                # It is not known to be safe. If somebody has claimed it, it has arrived.
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
                    claims += _take(box, name)
                except OSError as exc:  # One that cannot be moved keeps no other back.
                    problem = exc
            _trim(box)
            if problem is not None and not claims:
                raise problem
        return claims

    def recover(self) -> list[ClaimedLetter]:
        """Makes also what is missing of it, and removes what dead writers left in `tmp/`."""
        with self.opened() as box:
            box.make_missing()
            box.remove_older(Subfolder.TMP, self._clock.now_s() - TEMP_AGE_S)
            claims = [claim for name in box.names(Subfolder.CUR) for claim in _read(box, name)]
            _trim(box)
        return claims

    def ack(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            return box.drop(claim.name, Subfolder.CUR)

    def ack_id(self, letter_id: str) -> bool:
        with self.opened() as box:
            for name in box.names(Subfolder.CUR):
                if _has_id(name, letter_id) and _read(box, name):
                    return box.drop(name, Subfolder.CUR)
        return False

    def put_back(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            return box.move(claim.name, Subfolder.CUR, Subfolder.NEW)

    def bury(self, claim: ClaimedLetter) -> bool:
        with self.opened() as box:
            moved = box.move(claim.name, Subfolder.CUR, Subfolder.DEAD)
            _trim(box)
        return moved

    def is_empty(self) -> bool:
        with self.opened() as box:
            return not box.names(Subfolder.NEW)

    def is_fully_empty(self) -> bool:
        return self.pending_count() == 0

    def pending_count(self) -> int:
        with self.opened() as box:
            return len(box.names(Subfolder.NEW)) + len(box.names(Subfolder.CUR))

    def find(self, letter_id: str) -> LetterState | None:
        with self.opened() as box:
            for part, place in _PLACES:
                if any(_has_id(name, letter_id) for name in box.names(part)):
                    return place
        return None

    def remove(self) -> None:
        """With its lock: a delivery is either removed too, or finds no mailbox."""
        with self.opened() as box:
            for attempt in range(REMOVE_TRIES):
                with box.locked(self._lock_wait_s):
                    for part in Subfolder:
                        _remove_part(box, part)
                with suppress(FileNotFoundError):
                    os.unlink(SEQ, dir_fd=box.box)
                try:
                    return os.rmdir(self._address, dir_fd=box.root)
                except OSError as exc:
                    # A delivery that came too late made the lock's file anew, or its owner a part.
                    if exc.errno != errno.ENOTEMPTY or attempt == REMOVE_TRIES - 1:
                        raise

    @contextmanager
    def opened(self) -> Generator[MailboxFolders]:
        """Its directories, checked; what the disk says meanwhile becomes our words."""
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
        """Give it a place and move it there. The lock is held."""
        now_s = self._clock.now_s()
        journal = self._journal(box, seq, now_s)
        earlier = journal.find(letter.id)
        if earlier is not None and (there := _find_data(box, earlier)) is not None:
            if there != data:
                raise LetterIdTaken(letter.id)
            return Delivered(letter.id, earlier, again=True)
        if journal.count >= LETTERS_MAX:
            raise MailboxFull(self._address, letter.id)
        name = name_of(next_position(letter, journal.last, now_s), letter.id)
        # First, so that no place is given twice, wherever the writer is killed.
        write_at(seq, len(journal.data), journal_line(name))
        new = box.part(Subfolder.NEW)
        os.rename(temporary, name, src_dir_fd=box.part(Subfolder.TMP), dst_dir_fd=new)
        return Delivered(letter.id, name)

    def _journal(self, box: MailboxFolders, seq: int, now_s: float) -> OrderJournal:
        """What `.seq` says; made anew if that is damaged, too long, or cannot be true."""
        journal = parse_journal(read_all(seq, JOURNAL_BYTES_MAX), self._boot_id)
        if journal is None:
            # No delivery returns before the mailbox itself is safe; the journal stands for that.
            os.fsync(box.root)
            os.fsync(box.box)
        elif journal.count < LETTERS_MAX and not is_ahead(journal.last, now_s):
            return journal
        last = 0 if journal is None else journal.last
        names = (*box.names(Subfolder.NEW), *box.names(Subfolder.CUR))
        made = make_journal(names, self._boot_id, last, now_s)
        if journal is None or made.data != journal.data:
            os.ftruncate(seq, 0)
            # The first byte last: whoever is killed in between leaves a journal that is damaged.
            write_at(seq, 1, made.data[1:])
            write_at(seq, 0, made.data[:1])
        return made


def _remove_part(box: MailboxFolders, part: Subfolder) -> None:
    """Raises OSError."""
    for _ in range(REMOVE_TRIES):
        # Writers put one letter each into `tmp/` before they wait for the lock, which is ours.
        shutil.rmtree(part.value, ignore_errors=True, dir_fd=box.box)
        try:
            os.stat(part.value, dir_fd=box.box, follow_symlinks=False)
        except FileNotFoundError:
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def _has_id(name: str, letter_id: str) -> bool:
    found = parse_name(name)
    return found is not None and found[1] == letter_id


def _find_data(box: MailboxFolders, name: str) -> bytes | None:
    """What a letter that was accepted says, if it still waits or is claimed."""
    for part in (Subfolder.NEW, Subfolder.CUR):
        with suppress(FileNotFoundError, ForeignFile):
            return box.read(name, part, LETTER_BYTES_MAX)
    return None


def _take(box: MailboxFolders, name: str) -> list[ClaimedLetter]:
    """Claim it; nothing if somebody else has, or it is no letter. Raises OSError."""
    if not box.move(name, Subfolder.NEW, Subfolder.CUR):
        return []
    try:
        return _read(box, name)
    except OSError:
        with suppress(OSError):  # If not, the owner recovers it when it starts again.
            box.move(name, Subfolder.CUR, Subfolder.NEW)
        raise


def _read(box: MailboxFolders, name: str) -> list[ClaimedLetter]:
    """The claimed letter of that name; nothing if it is gone, or is no letter. Raises OSError."""
    try:
        return [
            ClaimedLetter(read_letter(name, box.read(name, Subfolder.CUR, LETTER_BYTES_MAX)), name)
        ]
    except FileNotFoundError:
        return []
    except (BadLetter, ForeignFile) as exc:
        reason = str(exc)
    except OSError as exc:
        if exc.errno in _OURS:
            raise
        reason = exc.strerror or str(exc)
    try:
        _quarantine(box, name)
        log.warning("moved to corrupt/: %s: %s", printable(name), reason)
    except (AppError, OSError) as exc:  # It stays claimed, and keeps no other back.
        log.warning("no letter, and it stays: %s: %s; %s", printable(name), reason, exc)
    return []


def _quarantine(box: MailboxFolders, name: str) -> None:
    try:
        box.move(name, Subfolder.CUR, Subfolder.CORRUPT)
    except OSError:  # No file takes the place of a directory, nor a directory that of a file.
        box.clear(name, Subfolder.CORRUPT)
        box.move(name, Subfolder.CUR, Subfolder.CORRUPT)


def _trim(box: MailboxFolders) -> None:
    """Where something was moved aside, remove the oldest: there is a bound to what is kept."""
    for part in (Subfolder.CORRUPT, Subfolder.DEAD):
        if box.is_open(part):
            for old in box.names(part)[:-KEPT_MAX]:
                with suppress(OSError):  # Then it stays; the next ones are bounded as well.
                    box.clear(old, part)
