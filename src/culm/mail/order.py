"""The order of a mailbox's letters: file names, and the journal that keeps positions unique.

A letter's file is named `<20 digits>-<id>.json`. The digits are its position: the sender's time
in nanoseconds since 1970, or the previous letter's position plus one, whichever is greater. Names
therefore sort in the order of acceptance, regardless of the senders' clocks.

The journal is the text of `.seq`. Its first line has the boot id of the machine and the last
position assigned before the journal was rebuilt; the other lines are the names, without suffix, of
the letters accepted since. The journal saves a delivery from listing directories: its last line has
the last position, its line count bounds the number of letters, and a repeated delivery is found in
it. Except for the last position it can be rebuilt from a listing, so it need not be durable: after
a crash of the machine the boot id differs. All functions here are pure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from culm.clock import parse_time
from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.ids import LetterId
from culm.mail.letters import Letter

LETTERS_MAX: Final = 1000  # Delivered or claimed, per mailbox; no agent reads more.
DIGITS: Final = 20
POSITION_MAX: Final = 10**DIGITS - 1
SUFFIX: Final = ".json"
# A position is at most this far ahead of our clock. Otherwise one sender with a wrong clock would
# determine the positions of all later letters, and a five-digit year would not fit.
AHEAD_MAX_NS: Final = 60 * 10**9
# Setting the clock back by less than this must not decrease positions. A position further ahead,
# for example of a foreign file, is ignored: otherwise no position would be left after it.
ABSURD_NS: Final = 86_400 * 10**9
JOURNAL_BYTES_MAX: Final = (LETTERS_MAX + 2) * (DIGITS + STEM_CHARS_MAX + 2)
_STEM = re.compile(r"([0-9]{20})-(.+)")


def name_of(position: int, letter_id: str) -> str:
    return f"{position:0{DIGITS}d}-{letter_id}{SUFFIX}"


def parse_name(name: str) -> tuple[int, LetterId] | None:
    """Parse the position and the id; None if this is not the file name of a letter."""
    found = _STEM.fullmatch(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    if found is None or not is_safe_stem(found[2]):
        return None
    return int(found[1]), LetterId(found[2])


def next_position(letter: Letter, last: int, now_s: float) -> int:
    """Return the position of a new letter, where `last` is the last position assigned."""
    created_ns = _nanoseconds(parse_time(letter.created_at) or 0.0)
    soonest = min(created_ns, _nanoseconds(now_s) + AHEAD_MAX_NS)
    return min(max(soonest, last + 1, 0), POSITION_MAX)


def is_ahead(position: int, now_s: float) -> bool:
    """Return True for a position so far ahead that a clock or the journal must have been wrong."""
    return position > _nanoseconds(now_s) + ABSURD_NS


@dataclass(frozen=True, slots=True)
class OrderJournal:
    last: int  # The last position assigned; 0 initially.
    count: int  # An upper bound of the number of letters.
    data: bytes

    def find(self, letter_id: str) -> str | None:
        """Return the file name under which a letter was last accepted."""
        wanted = f"-{letter_id}\n".encode()
        at = self.data.rfind(wanted)
        while at >= 0:
            start = self.data.rfind(b"\n", 0, at) + 1
            # Otherwise the match is the end of a longer id.
            if at - start == DIGITS:
                return self.data[start : at + len(wanted) - 1].decode() + SUFFIX
            at = self.data.rfind(wanted, 0, at + 1)
        return None


def parse_journal(data: bytes, boot_id: str) -> OrderJournal | None:
    """Parse a journal; None if it is damaged, or of another boot and so possibly incomplete."""
    head = _head(boot_id)
    if not data.startswith(head) or not data.endswith(b"\n") or len(data) > JOURNAL_BYTES_MAX:
        return None
    first, _, lines = data.partition(b"\n")
    earlier = first[len(head) :].decode("utf-8", "replace")
    if len(earlier) != DIGITS or not (earlier.isascii() and earlier.isdigit()):
        return None
    if not lines:
        return OrderJournal(int(earlier), 0, data)
    line = lines[lines.rfind(b"\n", 0, -1) + 1 : -1]
    found = parse_name(line.decode("utf-8", "replace") + SUFFIX)
    if found is None:
        return None
    return OrderJournal(max(found[0], int(earlier)), lines.count(b"\n"), data)


def make_journal(names: Iterable[str], boot_id: str, last: int, now_s: float) -> OrderJournal:
    """Build a journal of the existing letters; positions continue after `last`."""
    stems = sorted(name.removesuffix(SUFFIX) for name in names if parse_name(name) is not None)
    positions = [last, *(int(stem[:DIGITS]) for stem in stems)]
    last = max((at for at in positions if not is_ahead(at, now_s)), default=0)
    lines = "".join(f"{stem}\n" for stem in stems)
    return OrderJournal(last, len(stems), _head(boot_id) + f"{last:0{DIGITS}d}\n{lines}".encode())


def journal_line(name: str) -> bytes:
    return f"{name.removesuffix(SUFFIX)}\n".encode()


def _head(boot_id: str) -> bytes:
    return f"culm {boot_id} ".encode()


def _nanoseconds(at_s: float) -> int:
    # A float is precise to microseconds and rounds anything smaller.
    return round(at_s * 1e6) * 1000
