"""Which letters a reader has admitted already: delivery is at least once, admission is once.

For readers that have no run with the letter's id to know it by.
It is kept with what the letters led to, in the same commit, before a letter is acknowledged.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

# A letter comes twice when a crash fell between the commit and the ack: what was just read.
# A mailbox holds a quarter of this.
SEEN_MAX: Final = 4096


class AdmittedLetters:
    """Ids in the order they were added; the oldest are forgotten."""

    def __init__(self, letter_ids: Iterable[str] = ()) -> None:
        self._ids: dict[str, None] = {}
        for letter_id in letter_ids:
            self.add(letter_id)

    def add(self, letter_id: str) -> bool:
        """Whether it is new. One that is known keeps its age."""
        if letter_id in self._ids:
            return False
        self._ids[letter_id] = None
        if len(self._ids) > SEEN_MAX:
            del self._ids[next(iter(self._ids))]
        return True

    def __contains__(self, letter_id: str) -> bool:
        return letter_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self) -> bytes:
        """A JSON array, the oldest first."""
        return msgspec.json.encode([*self._ids])


def parse_seen(data: bytes) -> AdmittedLetters:
    """What `encode` wrote; raises `msgspec.ValidationError`."""
    return AdmittedLetters(msgspec.json.decode(data, type=list[str]))
