"""The seam towards mailboxes: durable letters, delivered by anybody, read by one owner.

A letter is delivered, claimed by the owner of the mailbox, and acknowledged when what it led to
is committed; until then it comes again. So delivery is at least once, and whoever reads makes
admission once: a workspace by a run with the letter's id, others by `seen.py`. Any number of
processes may deliver at once. Only the owner claims, recovers, puts back and buries. All of it
blocks as the disk does.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from culm.errors import (
    AppError,
    Conflict,
    Denied,
    Failed,
    InvalidRequest,
    NotFound,
    Rejected,
    Unavailable,
)
from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.ids import LetterId
from culm.mail.letters import BadLetter, Letter, parse_letter
from culm.mail.order import LETTERS_MAX, parse_name

# Of the dead and of the corrupt ones: as many as can be waiting, so that no burst of them hides
# another. The oldest are removed.
KEPT_MAX: Final = LETTERS_MAX
MAILBOXES_MAX: Final = 100_000  # Looked at in one scan; a tree of agents has ten thousand.


class UnsafeAddress(InvalidRequest):
    """It may not touch a path."""

    code = "unsafe_address"

    def __init__(self) -> None:
        super().__init__(
            f"a mailbox's id has 1 to {STEM_CHARS_MAX} letters, digits, _ - . and no ..",
            hint="a mailbox has the id of its agent: see `culm agents`",
        )


class NoMailbox(NotFound):
    code = "mailbox_not_found"

    def __init__(self, address: str) -> None:
        super().__init__(f"no mailbox: {address}", hint="see `culm agents` for who there is")
        self.address = address


class MailboxFull(Rejected):
    """Nothing was delivered; it may be when its owner has read."""

    code, status, retryable = "mailbox_full", 429, True

    def __init__(self, address: str, letter_id: str) -> None:
        super().__init__(
            f"letter {letter_id} was not delivered: mailbox {address} is full with"
            f" {LETTERS_MAX} letters",
            hint="send it again when the agent has read some of them",
        )
        self.address = address
        self.letter_id = letter_id


class LetterIdTaken(Conflict):
    code = "letter_id_taken"

    def __init__(self, letter_id: str) -> None:
        super().__init__(
            f"another letter with the id {letter_id} is in the mailbox", hint="give a new id"
        )
        self.letter_id = letter_id


class ForeignMailbox(Denied):
    """Somebody else could read, forge or remove its letters, so nobody uses it."""

    code = "mailbox_foreign"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"mailbox {address} is not safe to use: {reason}",
            hint="its directories must be yours and writable by nobody else, and no links",
        )
        self.address = address


class MailboxBusy(Unavailable):
    code = "mailbox_busy"

    def __init__(self, address: str) -> None:
        super().__init__(f"mailbox {address} is locked by another process", hint="try again")
        self.address = address


class MailboxFailed(Failed):
    """The disk said no. If that was at a delivery, nothing was delivered."""

    code = "mailbox_failed"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"mailbox {address} cannot be used: {reason}",
            hint="check the permissions and the free space of the data directory",
        )
        self.address = address


class LetterState(StrEnum):
    """Where a letter is that is not gone."""

    DELIVERED = "delivered"
    CLAIMED = "claimed"
    DEAD = "dead"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Delivered:
    letter_id: LetterId
    name: str  # Names sort as the letters were accepted.
    again: bool = False  # The same letter was there already; it is there once.


@dataclass(frozen=True, slots=True)
class ClaimedLetter:
    """A letter that its owner works on, by the one name it has in the mailbox."""

    letter: Letter
    name: str


class Mailbox(Protocol):
    """Every method may raise `NoMailbox`, `ForeignMailbox`, `MailboxFailed`."""

    def deliver(self, letter: Letter) -> Delivered:
        """Put it behind all that were accepted before; when this returns it survives a crash.

        The same letter again is delivered once, as long as it was not acknowledged. Raises
        `BadLetter`, `LetterTooLarge`, `MailboxFull`, `LetterIdTaken`, `MailboxBusy`; then
        nothing is left of it.
        """
        ...

    def claim(self, letters_max: int) -> list[ClaimedLetter]:
        """Take the first letters, in order. What cannot be read is corrupt, and the rest comes."""
        ...

    def recover(self) -> list[ClaimedLetter]:
        """All that is claimed and not acknowledged, in order: the owner's first act."""
        ...

    def ack(self, claim: ClaimedLetter) -> bool:
        """Remove exactly this one. False if it was removed before."""
        ...

    def ack_id(self, letter_id: str) -> bool:
        """Remove the first claimed letter with that id. False if there is none."""
        ...

    def put_back(self, claim: ClaimedLetter) -> bool:
        """Claimed no more; it keeps its place. False if it is not claimed."""
        ...

    def bury(self, claim: ClaimedLetter) -> bool:
        """Nobody will read it, and it is kept for people to see. False if it is not claimed."""
        ...

    def is_empty(self) -> bool:
        """Whether nothing waits to be claimed."""
        ...

    def is_fully_empty(self) -> bool:
        """Whether nothing waits or is claimed."""
        ...

    def pending_count(self) -> int:
        """How many wait or are claimed."""
        ...

    def find(self, letter_id: str) -> LetterState | None:
        """Where the letter is; None if it never came, or was acknowledged."""
        ...


class PostOffice(Protocol):
    """The mailboxes of a project. Every method that takes an address may raise `UnsafeAddress`."""

    def open(self, address: str) -> Mailbox:
        """Raises `NoMailbox`, `ForeignMailbox`."""
        ...

    def make(self, address: str) -> Mailbox:
        """Open it; make it, or what is missing of it, if need be."""
        ...

    def addresses(self, *, claimed: bool = False) -> list[str]:
        """Whose mailboxes are not empty; with `claimed`, not fully empty. Sorted."""
        ...

    def remove(self, address: str) -> bool:
        """With all letters in it. False if there was none."""
        ...


def has_mailbox(post: PostOffice, address: str) -> bool:
    """Whether there is one that can be used."""
    try:
        post.open(address)
    except AppError:
        return False
    return True


def check_address(address: str) -> str:
    """The address itself; raises `UnsafeAddress`."""
    if not is_safe_stem(address):
        raise UnsafeAddress
    return address


def read_letter(name: str, data: bytes) -> Letter:
    """The letter in a file of that name; raises `BadLetter`."""
    found = parse_name(name)
    if found is None:
        raise BadLetter("its file is not named like one")
    letter = parse_letter(data)
    if letter.id != found[1]:
        raise BadLetter("its file is named after another one")
    return letter
