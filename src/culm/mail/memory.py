"""Mailboxes without files: for simulations, and within one process.

The same letters in the same order as on a disk, with the faults of one: what others put there
(`plant`), and a loss of power (`lose_power`), which undoes all that no delivery has synced. When
only the server crashes nothing is lost: open the mailbox again, and recover.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from culm.clock import Clock
from culm.mail.base import (
    KEPT_MAX,
    ClaimedLetter,
    Delivered,
    LetterIdTaken,
    LetterState,
    MailboxFull,
    NoMailbox,
    check_address,
    read_letter,
)
from culm.mail.letters import BadLetter, Letter, encode_letter
from culm.mail.order import LETTERS_MAX, is_ahead, name_of, next_position, parse_name

_Files = dict[str, tuple[LetterState, bytes]]  # By name: where it is, and what it says.


@dataclass(slots=True)
class _Disk:
    """What there is of one mailbox."""

    files: _Files = field(default_factory=_Files)
    last: int = 0  # The last place given.
    synced: _Files | None = None  # As a loss of power leaves it; None if not even the mailbox.

    def names(self, *places: LetterState) -> list[str]:
        found = (name for name, (place, _) in self.files.items() if place in places)
        return sorted(name for name in found if not name.startswith("."))

    def has(self, name: str, place: LetterState) -> bool:
        return name in self.files and self.files[name][0] == place

    def move(self, name: str, source: LetterState, target: LetterState) -> bool:
        if not self.has(name, source):
            return False
        self.files[name] = (target, self.files[name][1])
        return True

    def keep(self, name: str, place: LetterState) -> bool:
        moved = self.move(name, LetterState.CLAIMED, place)
        for old in self.names(place)[:-KEPT_MAX]:
            del self.files[old]
        return moved

    def read(self, name: str) -> list[ClaimedLetter]:
        try:
            return [ClaimedLetter(read_letter(name, self.files[name][1]), name)]
        except BadLetter:
            self.keep(name, LetterState.CORRUPT)
            return []


class MemoryPostOffice:
    """Implements `Post`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._disks: dict[str, _Disk] = {}
        self._lock = threading.Lock()  # Callers are in threads, as the seam blocks.

    def open(self, address: str) -> "MemoryMailbox":
        with self.opened(check_address(address)):
            return MemoryMailbox(self, address, self._clock)

    def make(self, address: str) -> "MemoryMailbox":
        with self._lock:
            self._disks.setdefault(check_address(address), _Disk())
        return self.open(address)

    def addresses(self, *, claimed: bool = False) -> list[str]:
        places = (
            (LetterState.DELIVERED, LetterState.CLAIMED) if claimed else (LetterState.DELIVERED,)
        )
        with self._lock:
            return sorted(one for one, disk in self._disks.items() if disk.names(*places))

    def remove(self, address: str) -> bool:
        with self._lock:
            return self._disks.pop(check_address(address), None) is not None

    def lose_power(self) -> None:
        """Claims, acks and moves since the last delivery to a mailbox are undone."""
        with self._lock:
            for address, disk in [*self._disks.items()]:
                if disk.synced is None:
                    del self._disks[address]
                else:
                    disk.files = dict(disk.synced)

    @contextmanager
    def opened(self, address: str) -> Generator[_Disk]:
        with self._lock:
            if address not in self._disks:
                raise NoMailbox(address)
            yield self._disks[address]


class MemoryMailbox:
    """Implements `Mailbox`; made by `MemoryPost`."""

    def __init__(self, post: MemoryPostOffice, address: str, clock: Clock) -> None:
        self._post = post
        self._address = address
        self._clock = clock

    def deliver(self, letter: Letter) -> Delivered:
        data = encode_letter(letter)
        with self._post.opened(self._address) as disk:
            pending = disk.names(LetterState.DELIVERED, LetterState.CLAIMED)
            for name in pending:
                if _has_id(name, letter.id):
                    if disk.files[name][1] != data:
                        raise LetterIdTaken(letter.id)
                    return Delivered(letter.id, name, again=True)
            if len(pending) >= LETTERS_MAX:
                raise MailboxFull(self._address, letter.id)
            now_s = self._clock.now_s()
            found = [place[0] for place in map(parse_name, pending) if place is not None]
            likely = (place for place in (disk.last, *found) if not is_ahead(place, now_s))
            disk.last = next_position(letter, max(likely, default=0), now_s)
            name = name_of(disk.last, letter.id)
            disk.files[name] = (LetterState.DELIVERED, data)
            disk.synced = dict(disk.files)
        return Delivered(letter.id, name)

    def claim(self, letters_max: int) -> list[ClaimedLetter]:
        claims: list[ClaimedLetter] = []
        with self._post.opened(self._address) as disk:
            for name in disk.names(LetterState.DELIVERED):
                if len(claims) >= letters_max:
                    break
                disk.move(name, LetterState.DELIVERED, LetterState.CLAIMED)
                claims += disk.read(name)
        return claims

    def recover(self) -> list[ClaimedLetter]:
        with self._post.opened(self._address) as disk:
            return [claim for name in disk.names(LetterState.CLAIMED) for claim in disk.read(name)]

    def ack(self, claim: ClaimedLetter) -> bool:
        with self._post.opened(self._address) as disk:
            if not disk.has(claim.name, LetterState.CLAIMED):
                return False
            del disk.files[claim.name]
            return True

    def ack_id(self, letter_id: str) -> bool:
        for claim in self.recover():
            if claim.letter.id == letter_id:
                return self.ack(claim)
        return False

    def put_back(self, claim: ClaimedLetter) -> bool:
        with self._post.opened(self._address) as disk:
            return disk.move(claim.name, LetterState.CLAIMED, LetterState.DELIVERED)

    def bury(self, claim: ClaimedLetter) -> bool:
        with self._post.opened(self._address) as disk:
            return disk.keep(claim.name, LetterState.DEAD)

    def is_empty(self) -> bool:
        with self._post.opened(self._address) as disk:
            return not disk.names(LetterState.DELIVERED)

    def is_fully_empty(self) -> bool:
        return self.pending_count() == 0

    def pending_count(self) -> int:
        with self._post.opened(self._address) as disk:
            return len(disk.names(LetterState.DELIVERED, LetterState.CLAIMED))

    def find(self, letter_id: str) -> LetterState | None:
        with self._post.opened(self._address) as disk:
            for place in LetterState:
                if any(_has_id(name, letter_id) for name in disk.names(place)):
                    return place
        return None

    def plant(self, name: str, data: bytes) -> None:
        """As a program would that is not ours: with any name and any bytes, and no order."""
        with self._post.opened(self._address) as disk:
            disk.files[name] = (LetterState.DELIVERED, data)


def _has_id(name: str, letter_id: str) -> bool:
    found = parse_name(name)
    return found is not None and found[1] == letter_id
