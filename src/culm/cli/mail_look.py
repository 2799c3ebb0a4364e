"""What lies in the mailboxes of a project, looked at without touching it.

Only the owner of a mailbox claims its letters; here they are counted and read where they are.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from culm.errors import AppError
from culm.fleet.names import is_safe_stem
from culm.mail.base import MAILBOXES_MAX, MailboxFailed, NoMailbox, read_letter
from culm.mail.folders import ForeignFile, MailboxFolders, Subfolder, open_folders
from culm.mail.letters import LETTER_BYTES_MAX, BadLetter, Letter, shown_of, text_of
from culm.mail.order import parse_name
from culm.wire.agents import LetterShown

_WAITING = (Subfolder.NEW, Subfolder.CUR)
# In the direction in which letters move, so that one on its way is not missed.
_PARTS = (*_WAITING, Subfolder.DEAD, Subfolder.CORRUPT)


@dataclass(frozen=True, slots=True)
class MailboxSummary:
    """One mailbox, and how much is in it; or why it is not to be used."""

    address: str
    waiting: int = 0  # Delivered or claimed.
    dead: int = 0
    corrupt: int = 0
    problem: str = ""


def addresses_in(mailboxes: Path) -> list[str]:
    """Of every mailbox there is, also of those with nothing in them; raises `MailboxFailed`."""
    try:
        with os.scandir(mailboxes) as entries:
            found = (entry.name for entry in islice(entries, MAILBOXES_MAX))
            return sorted(name for name in found if is_safe_stem(name))
    except FileNotFoundError:
        return []  # Nobody has made one.
    except OSError as exc:
        raise MailboxFailed(mailboxes.name, exc.strerror or str(exc)) from exc


def summarize_mailbox(mailboxes: Path, address: str) -> MailboxSummary:
    """A mailbox that cannot be used is no error here: it says so."""
    try:
        with open_folders(mailboxes, address) as box:
            counts = {part: len(box.names(part)) for part in _PARTS}
    except AppError as exc:
        return MailboxSummary(address, problem=exc.message)
    except OSError as exc:
        return MailboxSummary(address, problem=f"mailbox {address} cannot be read: {exc.strerror}")
    waiting = counts[Subfolder.NEW] + counts[Subfolder.CUR]
    return MailboxSummary(address, waiting, counts[Subfolder.DEAD], counts[Subfolder.CORRUPT])


class UnreadLetter(NamedTuple):
    """A letter that nobody has read yet, and what it says."""

    shown: LetterShown
    text: str


def letters_in(mailboxes: Path, address: str) -> Iterator[UnreadLetter]:
    """Those that wait or are claimed, in their order; what cannot be read is left out."""
    with suppress(AppError, OSError), open_folders(mailboxes, address) as box:
        for part in _WAITING:
            for name in box.names(part):
                if (letter := _find_letter(box, name, part)) is not None:
                    yield UnreadLetter(shown_of(letter, address), text_of(letter))


def find_in(mailboxes: Path, address: str, letter_id: str) -> LetterShown | None:
    """What a mailbox says of a letter; nothing if it was read, never came, or is unsafe."""
    with suppress(AppError, OSError), open_folders(mailboxes, address) as box:
        for part in (*_PARTS, Subfolder.NEW):  # It may have been put back meanwhile.
            for name in box.names(part):
                found = parse_name(name)
                if found is not None and found[1] == letter_id:
                    letter = _find_letter(box, name, part)
                    shown = LetterShown(letter_id, from_="", to=address)
                    shown = shown if letter is None else shown_of(letter, address)
                    # A corrupt one is never read, either.
                    shown.state = "delivered" if part in _WAITING else "dead"
                    return shown
    return None


def _find_letter(box: MailboxFolders, name: str, part: Subfolder) -> Letter | None:
    try:
        return read_letter(name, box.read(name, part, LETTER_BYTES_MAX))
    except (BadLetter, NoMailbox, ForeignFile, OSError):
        return None
