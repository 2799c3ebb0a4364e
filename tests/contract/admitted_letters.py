"""A reader that admits each letter once, for readers without a run that has the letter's id.

Delivery is at least once. The ids are stored in the same commit as the effects of the letters,
before a letter is acknowledged.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

# A letter is delivered twice when a crash falls between the commit and the acknowledgement, so
# only recent ids matter. A mailbox holds at most a quarter of this.
ADMITTED_MAX: Final = 4096


class AdmittedLetters:
    """Letter ids in the order of admission; the oldest are evicted."""

    def __init__(self, letter_ids: Iterable[str] = ()) -> None:
        self._ids: dict[str, None] = {}
        for letter_id in letter_ids:
            self.add(letter_id)

    def add(self, letter_id: str) -> bool:
        """Return True if the id is new. A known id keeps its age."""
        if letter_id in self._ids:
            return False
        self._ids[letter_id] = None
        if len(self._ids) > ADMITTED_MAX:
            del self._ids[next(iter(self._ids))]
        return True

    def __contains__(self, letter_id: str) -> bool:
        return letter_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self) -> bytes:
        """Encode the ids as a JSON array, the oldest first."""
        return msgspec.json.encode([*self._ids])


def parse_admitted(data: bytes) -> AdmittedLetters:
    """Parse the output of `encode`; raises `msgspec.ValidationError`."""
    return AdmittedLetters(msgspec.json.decode(data, type=list[str]))
