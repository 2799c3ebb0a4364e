"""In-memory mailboxes, for simulations and for use within one process.

Letters and their order are the same as on disk, and so are the faults: foreign files (`plant`)
and power loss (`lose_power`), which undoes everything that no delivery has synced. A crash of
only the server loses nothing: open the mailbox again and call `recover`.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from msgspec import Struct, field

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
)
from culm.mail.letters import (
    LETTERS_MAX,
    BadLetter,
    Letter,
    encode_letter,
    has_id,
    is_ahead,
    name_of,
    next_position,
    parse_name,
    read_letter,
)

_Files = dict[str, tuple[LetterState, bytes]]  # State and contents by file name.


class _Disk(Struct):
    """The stored state of one mailbox."""

    files: _Files = field(default_factory=_Files)
    last: int = 0  # The last position assigned.
    synced: _Files | None = None  # Survives power loss; None if the mailbox itself does not.

    def names(self, *states: LetterState) -> list[str]:
        found = (name for name, (state, _) in self.files.items() if state in states)
        return sorted(name for name in found if not name.startswith("."))

    def has(self, name: str, state: LetterState) -> bool:
        return name in self.files and self.files[name][0] == state

    def move(self, name: str, source: LetterState, target: LetterState) -> bool:
        if not self.has(name, source):
            return False
        self.files[name] = (target, self.files[name][1])
        return True

    def keep(self, name: str, state: LetterState) -> bool:
        moved = self.move(name, LetterState.CLAIMED, state)
        for old in self.names(state)[:-KEPT_MAX]:
            del self.files[old]
        return moved

    def read(self, name: str) -> list[ClaimedLetter]:
        try:
            return [ClaimedLetter(read_letter(name, self.files[name][1]), name)]
        except BadLetter:
            self.keep(name, LetterState.CORRUPT)
            return []


class MemoryPostOffice:
    """Implements `PostOffice`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._disks: dict[str, _Disk] = {}
        self._lock = threading.Lock()  # Callers run in threads, because the interface blocks.

    def open(self, address: str) -> "MemoryMailbox":
        with self.opened(check_address(address)):
            return MemoryMailbox(self, address, self._clock)

    def make(self, address: str) -> "MemoryMailbox":
        with self._lock:
            self._disks.setdefault(check_address(address), _Disk())
        return self.open(address)

    def addresses(self, *, claimed: bool = False) -> list[str]:
        states = (
            (LetterState.DELIVERED, LetterState.CLAIMED) if claimed else (LetterState.DELIVERED,)
        )
        with self._lock:
            return sorted(one for one, disk in self._disks.items() if disk.names(*states))

    def remove(self, address: str) -> bool:
        with self._lock:
            return self._disks.pop(check_address(address), None) is not None

    def lose_power(self) -> None:
        """Undo the claims, acknowledgements and moves since the last delivery to each mailbox."""
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
    """Implements `Mailbox`; created by `MemoryPostOffice`."""

    def __init__(self, post: MemoryPostOffice, address: str, clock: Clock) -> None:
        self._post = post
        self._address = address
        self._clock = clock

    def deliver(self, letter: Letter) -> Delivered:
        data = encode_letter(letter)
        with self._post.opened(self._address) as disk:
            pending = disk.names(LetterState.DELIVERED, LetterState.CLAIMED)
            for name in pending:
                if has_id(name, letter.id):
                    if disk.files[name][1] != data:
                        raise LetterIdTaken(letter.id)
                    return Delivered(letter.id, name, again=True)
            if len(pending) >= LETTERS_MAX:
                raise MailboxFull(self._address, letter.id)
            now_s = self._clock.now_s()
            found = [parsed[0] for parsed in map(parse_name, pending) if parsed is not None]
            likely = (at for at in (disk.last, *found) if not is_ahead(at, now_s))
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

    def put_back(self, claim: ClaimedLetter) -> bool:
        with self._post.opened(self._address) as disk:
            return disk.move(claim.name, LetterState.CLAIMED, LetterState.DELIVERED)

    def bury(self, claim: ClaimedLetter) -> bool:
        with self._post.opened(self._address) as disk:
            return disk.keep(claim.name, LetterState.DEAD)

    def pending_count(self) -> int:
        with self._post.opened(self._address) as disk:
            return len(disk.names(LetterState.DELIVERED, LetterState.CLAIMED))

    def find(self, letter_id: str) -> LetterState | None:
        with self._post.opened(self._address) as disk:
            for state in LetterState:
                if any(has_id(name, letter_id) for name in disk.names(state)):
                    return state
        return None

    def plant(self, name: str, data: bytes) -> None:
        """Add a file as a foreign program would: with any name and any bytes, in no order."""
        with self._post.opened(self._address) as disk:
            disk.files[name] = (LetterState.DELIVERED, data)
