"""The order of a mailbox's letters: their file names, and the journal that keeps them unique.

A letter's name is `<20 digits>-<id>.json`. The digits are its place: the sender's nanoseconds
since 1970, or one more than the letter before it has, whichever is more. So the order of names
is the order of acceptance, whatever the clocks of senders say.

The journal is the text of `.seq`: which boot of the machine it was written in and the last place
that was given before it was made anew, then the names of the letters accepted since, without
their suffix. It saves a delivery from listing directories: its last line is the last place given,
the number of its lines bounds the number of letters, and a letter that is delivered twice is found
in it. But for the place it can be made from a listing, so it need not be durable: after a crash of
the machine the boot is another one. Pure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.fleet.times import parse_time
from culm.ids import LetterId
from culm.mail.letters import Letter

LETTERS_MAX: Final = 1000  # Delivered or claimed, in one mailbox: nobody reads so many.
DIGITS: Final = 20
POSITION_MAX: Final = 10**DIGITS - 1
SUFFIX: Final = ".json"
# A place is not further ahead of our clock: one sender with a wrong clock would else decide the
# numbers of all later letters, and a year of five digits would not fit.
AHEAD_MAX_NS: Final = 60 * 10**9
# A clock that is put back by less must not make places go back. One that is further ahead, such as
# that of a file which somebody has put there, counts for nothing: no place would be behind it.
ABSURD_NS: Final = 86_400 * 10**9
JOURNAL_BYTES_MAX: Final = (LETTERS_MAX + 2) * (DIGITS + STEM_CHARS_MAX + 2)
_STEM = re.compile(r"([0-9]{20})-(.+)")


def name_of(place: int, letter_id: str) -> str:
    return f"{place:0{DIGITS}d}-{letter_id}{SUFFIX}"


def parse_name(name: str) -> tuple[int, LetterId] | None:
    """The place and the id; None if no letter has such a name."""
    found = _STEM.fullmatch(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    if found is None or not is_safe_stem(found[2]):
        return None
    return int(found[1]), LetterId(found[2])


def next_position(letter: Letter, last: int, now_s: float) -> int:
    """Where the letter comes to stand, if `last` is the last place given."""
    created_ns = _nanoseconds(parse_time(letter.created_at) or 0.0)
    soonest = min(created_ns, _nanoseconds(now_s) + AHEAD_MAX_NS)
    return min(max(soonest, last + 1, 0), POSITION_MAX)


def is_ahead(place: int, now_s: float) -> bool:
    """Whether nobody can have given it, unless a clock or the journal was wrong."""
    return place > _nanoseconds(now_s) + ABSURD_NS


@dataclass(frozen=True, slots=True)
class OrderJournal:
    last: int  # The last place given; 0 if there is none.
    count: int  # At least as many as there are letters.
    data: bytes

    def find(self, letter_id: str) -> str | None:
        """The name under which a letter was accepted last."""
        wanted = f"-{letter_id}\n".encode()
        at = self.data.rfind(wanted)
        while at >= 0:
            start = self.data.rfind(b"\n", 0, at) + 1
            # Otherwise it is the end of a longer id.
            if at - start == DIGITS:
                return self.data[start : at + len(wanted) - 1].decode() + SUFFIX
            at = self.data.rfind(wanted, 0, at + 1)
        return None


def parse_journal(data: bytes, boot_id: str) -> OrderJournal | None:
    """None if it is damaged, or of another boot: what was written last may be missing from it."""
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
    """Of the letters that are there; places go on from the `last` one given."""
    stems = sorted(name.removesuffix(SUFFIX) for name in names if parse_name(name) is not None)
    places = [last, *(int(stem[:DIGITS]) for stem in stems)]
    last = max((place for place in places if not is_ahead(place, now_s)), default=0)
    lines = "".join(f"{stem}\n" for stem in stems)
    return OrderJournal(last, len(stems), _head(boot_id) + f"{last:0{DIGITS}d}\n{lines}".encode())


def journal_line(name: str) -> bytes:
    return f"{name.removesuffix(SUFFIX)}\n".encode()


def _head(boot_id: str) -> bytes:
    return f"culm {boot_id} ".encode()


def _nanoseconds(at_s: float) -> int:
    # A float has microseconds, and rounds what is below them.
    return round(at_s * 1e6) * 1000
