"""Mailboxes as directories: `<directory>/<address>/{tmp,new,cur,corrupt,dead}` and a `.seq`.

Owns that layout: making it, finding who has mail, removing it. What happens within one of them
is `maildir_box.py`'s.
"""

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from culm.clock import Clock
from culm.fleet.names import is_safe_stem
from culm.mail.base import MAILBOXES_MAX, MailboxFailed, NoMailbox, check_address
from culm.mail.folders import Subfolder, open_private
from culm.mail.maildir_box import Maildir
from culm.processes.linux import read_boot_id

LOCK_WAIT_S: Final = 5.0  # Whoever holds it so long is stopped, or its disk is.


class MaildirPostOffice:
    """Implements `Post`: a directory `<address>` a mailbox. Many processes use it at once."""

    def __init__(self, directory: Path, clock: Clock, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._directory = directory
        self._clock = clock
        self._boot_id = read_boot_id()
        self._lock_wait_s = lock_wait_s

    def open(self, address: str) -> Maildir:
        mailbox = self._mailbox(address)
        with mailbox.opened():
            return mailbox

    def make(self, address: str) -> Maildir:
        """The first delivery syncs the mailbox; nothing is lost with one that had no letter."""
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
            for part in Subfolder:
                box.part(part)
        return mailbox

    def addresses(self, *, claimed: bool = False) -> list[str]:
        parts = (Subfolder.NEW, Subfolder.CUR) if claimed else (Subfolder.NEW,)
        try:
            with os.scandir(self._directory) as entries:
                return sorted(
                    entry.name
                    for entry in islice(entries, MAILBOXES_MAX)
                    if is_safe_stem(entry.name) and any(_has_files(entry.path, p) for p in parts)
                )
        except FileNotFoundError:
            return []  # Nobody has made one.
        except OSError as exc:
            raise MailboxFailed(self._directory.name, exc.strerror or str(exc)) from exc

    def remove(self, address: str) -> bool:
        try:
            self._mailbox(address).remove()
        except NoMailbox:
            return False
        return True

    def _mailbox(self, address: str) -> Maildir:
        check_address(address)
        return Maildir(self._directory, address, self._clock, self._boot_id, self._lock_wait_s)


def _make_synced(directory: Path) -> None:
    """With its parents, each of which is private, and safe before anything is put into it."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def _has_files(mailbox: str, part: Subfolder) -> bool:
    """A mailbox that is not to be used is nobody's; whoever opens it is told."""
    with suppress(OSError), os.scandir(f"{mailbox}/{part}") as entries:
        return any(not entry.name.startswith(".") for entry in entries)
    return False
