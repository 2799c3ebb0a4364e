"""The mailbox interface: durable letters, delivered by any process and read by one owner.

A letter is delivered, claimed by the owner of the mailbox, and acknowledged when its effect is
committed; until then it is delivered again. Delivery is therefore at least once, and the reader
ensures that a letter is admitted once: a workspace starts a run with the letter's id. Any number
of processes may deliver at the same time. Only the owner claims, recovers, puts back and buries.
All methods block on disk I/O.
"""

from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct

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
from culm.files import STEM_CHARS_MAX, is_safe_stem
from culm.ids import LetterId
from culm.mail.letters import LETTERS_MAX, Letter

# Limit for dead and for corrupt letters: as many as can be waiting, so that one burst does not
# hide another. The oldest are removed.
KEPT_MAX: Final = LETTERS_MAX
MAILBOXES_MAX: Final = 100_000  # Per scan; a tree of agents has at most ten thousand.


class UnsafeAddress(InvalidRequest):
    """The address is not safe as a file name."""

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
    """Nothing was delivered; retry after the owner has read some letters."""

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
            f"another letter with the id {letter_id} is in the mailbox", hint="use a new id"
        )
        self.letter_id = letter_id


class ForeignMailbox(Denied):
    """Another user could read, forge or remove its letters, so it is not used."""

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
    """An I/O error. If it occurred during a delivery, nothing was delivered."""

    code = "mailbox_failed"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"mailbox {address} cannot be used: {reason}",
            hint="check the permissions and the free space of the data directory",
        )
        self.address = address


class LetterState(StrEnum):
    """The state of a letter that has not been acknowledged."""

    DELIVERED = "delivered"
    CLAIMED = "claimed"
    DEAD = "dead"
    CORRUPT = "corrupt"


class Delivered(Struct, frozen=True):
    letter_id: LetterId
    name: str  # Names sort in the order of acceptance.
    again: bool = False  # The same letter was already in the mailbox and was not added again.


class ClaimedLetter(Struct, frozen=True):
    """A letter that the owner is processing, with its unique name in the mailbox."""

    letter: Letter
    name: str


class Mailbox(Protocol):
    """Every method may raise `NoMailbox`, `ForeignMailbox`, `MailboxFailed`."""

    def deliver(self, letter: Letter) -> Delivered:
        """Append a letter; it survives a crash once this returns.

        Delivering the same letter again has no effect until it is acknowledged. Raises
        `BadLetter`, `LetterTooLarge`, `MailboxFull`, `LetterIdTaken` or `MailboxBusy`, and
        then leaves nothing behind.
        """
        ...

    def claim(self, letters_max: int) -> list[ClaimedLetter]:
        """Claim the first letters, in order. Unreadable ones become corrupt and are skipped."""
        ...

    def recover(self) -> list[ClaimedLetter]:
        """Return all claimed letters, in order. The owner calls this first."""
        ...

    def ack(self, claim: ClaimedLetter) -> bool:
        """Remove exactly this letter. False if it was already removed."""
        ...

    def put_back(self, claim: ClaimedLetter) -> bool:
        """Undo the claim; the letter keeps its position. False if it is not claimed."""
        ...

    def bury(self, claim: ClaimedLetter) -> bool:
        """Keep the letter as dead, for inspection only. False if it is not claimed."""
        ...

    def pending_count(self) -> int:
        """Count the letters that are waiting or claimed."""
        ...

    def find(self, letter_id: str) -> LetterState | None:
        """Return the letter's state; None if it was never delivered or was acknowledged."""
        ...


class PostOffice(Protocol):
    """The mailboxes of a project. Every method that takes an address may raise `UnsafeAddress`."""

    def open(self, address: str) -> Mailbox:
        """Open an existing mailbox; raises `NoMailbox`, `ForeignMailbox`."""
        ...

    def make(self, address: str) -> Mailbox:
        """Open a mailbox; create it or its missing parts first if necessary."""
        ...

    def addresses(self, *, claimed: bool = False) -> list[str]:
        """List the addresses with waiting letters; with `claimed`, also claimed ones. Sorted."""
        ...

    def remove(self, address: str) -> bool:
        """Remove a mailbox with all its letters. False if it did not exist."""
        ...


def has_mailbox(post: PostOffice, address: str) -> bool:
    """Return True if the mailbox exists and is safe to use."""
    try:
        post.open(address)
    except AppError:
        return False
    return True


def check_address(address: str) -> str:
    """Return the address unchanged; raises `UnsafeAddress`."""
    if not is_safe_stem(address):
        raise UnsafeAddress
    return address
