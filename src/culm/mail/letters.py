"""Letters between agents, people and programs, their file format and their order in a mailbox.

Owns the fields, the bodies of the four kinds, the checks before delivery and after reading, and the
names of the files. All functions are pure. Storage belongs to `base.py`; callers decide which
senders are allowed and how a letter is handled.

A letter's file is named `<20 digits>-<id>.json`. The digits are its position: the sender's time
in nanoseconds since 1970, or the previous letter's position plus one, whichever is greater. Names
therefore sort in the order of acceptance, regardless of the senders' clocks.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from culm.clock import parse_time
from culm.errors import InvalidRequest, TooLarge
from culm.files import STEM_CHARS_MAX, is_safe_stem
from culm.ids import LetterId
from culm.wire.agents import LetterKind, LetterShown
from culm.wire.codec import Json, encodable, encode, is_deeper, printable

# A letter is text that a model reads in one round. Longer text belongs in a file that the letter
# names.
LETTER_BYTES_MAX: Final = 256 << 10

# Deeper nesting is useless to a reader, and recursive code would reach its own limits.
BODY_LEVELS_MAX: Final = 32

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

# Other programs distinguish a query, answered on a discarded copy of the conversation, from a
# regular turn. culm handles both as regular turns.
AskMode = Literal["query", "steer"]
QUERY: Final[AskMode] = "query"


class BadLetter(InvalidRequest):
    """The data is not a valid letter, or the letter must not be delivered."""

    code = "bad_letter"

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a letter: {reason}", hint="see docs/mail.md for the fields")


class LetterTooLarge(TooLarge):
    code = "letter_too_large"

    def __init__(self, letter_id: str, bytes_found: int) -> None:
        super().__init__(
            f"letter {letter_id} has {bytes_found} bytes; at most {LETTER_BYTES_MAX} are delivered",
            hint="put the text into a file, and name the file in the letter",
        )
        self.letter_id = letter_id


class Sender(Struct, frozen=True, omit_defaults=True):
    session_id: str
    role: str | None = None
    agent_id: str | None = None  # culm only: the mailbox for replies.


class Letter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: LetterId
    from_: Sender = field(name="from")
    kind: LetterKind
    body: dict[str, Json]
    created_at: str  # Times are RFC 3339, stored exactly as they were written.
    correlation_id: str | None = None  # In a reply: the ask that it answers.
    expires_at: str | None = None  # culm only: after this time the letter is not read.


_NonBlank = Annotated[str, Meta(pattern=r"\S")]


class _Task(Struct):
    assignment: _NonBlank


class _Ask(Struct):
    question: _NonBlank
    mode: AskMode = QUERY


class _Reply(Struct):
    answer: str


class _Handoff(Struct):
    """Other programs put arbitrary fields into a handoff."""

    summary: str | None = None


_BODIES: Final[Mapping[LetterKind, type[Struct]]] = {
    "task": _Task,
    "ask": _Ask,
    "handoff": _Handoff,
    "reply": _Reply,
}
_TEXT_FIELDS: Final[Mapping[LetterKind, str]] = {
    "task": "assignment",
    "ask": "question",
    "handoff": "summary",
    "reply": "answer",
}
_decoder = msgspec.json.Decoder(Letter)


def body_of(kind: LetterKind, text: str, *, mode: AskMode = QUERY) -> dict[str, Json]:
    """Build the body of a letter with this text; only an ask has a mode."""
    body: dict[str, Json] = {_TEXT_FIELDS[kind]: text}
    if kind == "ask" and mode != QUERY:
        body["mode"] = mode
    return body


def unanswered(why: str) -> dict[str, Json]:
    """Build the body of a failure reply, marked so that programs do not take it for an answer."""
    return {"answer": f"It was not answered: {why}", "failed": True}


def text_of(letter: Letter) -> str:
    """Return the text for an agent; the whole body of a handoff without a summary."""
    text = letter.body.get(_TEXT_FIELDS[letter.kind])
    # Not indented: nested values would become a thousand times as long.
    return text if isinstance(text, str) else encode(letter.body).decode()


def mode_of(letter: Letter) -> AskMode:
    """Return the mode of an ask; `query` by default."""
    found = letter.body.get("mode", QUERY)
    return found if found in get_args(AskMode) else QUERY


def expires_s_of(letter: Letter) -> float | None:
    """Return the expiry time in seconds since the epoch."""
    return None if letter.expires_at is None else parse_time(letter.expires_at)


def is_expired(letter: Letter, now_s: float) -> bool:
    at_s = expires_s_of(letter)
    return at_s is not None and at_s <= now_s


def shown_of(letter: Letter, to: str) -> LetterShown:
    """Describe a letter in a mailbox for clients."""
    return LetterShown(
        letter_id=letter.id,
        from_=printable(letter.from_.agent_id or letter.from_.session_id)[:STEM_CHARS_MAX],
        to=to,
        kind=letter.kind,
        correlation_id=letter.correlation_id or "",
        created_at=int(parse_time(letter.created_at) or 0),
    )


def encode_letter(letter: Letter) -> bytes:
    """Encode a letter as indented JSON for its file; raises `BadLetter`, `LetterTooLarge`."""
    _check(letter)
    try:
        try:
            data = encode(letter)
        except UnicodeEncodeError:  # A lone surrogate, which a command line may contain.
            data = encode(encodable(letter))
        pretty = _pretty(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise BadLetter(f"its body cannot be encoded as JSON: {exc}") from exc
    if len(pretty) > LETTER_BYTES_MAX:
        raise LetterTooLarge(letter.id, len(pretty))
    return pretty


def parse_letter(data: bytes) -> Letter:
    """Parse untrusted data; raises `BadLetter`."""
    if len(data) > LETTER_BYTES_MAX:
        raise BadLetter(f"it has more than {LETTER_BYTES_MAX} bytes")
    try:
        letter = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadLetter(str(exc)) from exc
    except RecursionError as exc:
        raise BadLetter("it is nested too deeply") from exc
    _check(letter)
    return letter


def _check(letter: Letter) -> None:
    """Check the constraints that the field types do not express; raises `BadLetter`."""
    if not is_safe_stem(letter.id):
        raise BadLetter(
            f"its id is not safe: 1 to {STEM_CHARS_MAX} letters, digits, _ - . and no .."
        )
    for name, text in (("created_at", letter.created_at), ("expires_at", letter.expires_at)):
        if text is not None and parse_time(text) is None:
            raise BadLetter(f"{name} is not an RFC 3339 time")
    if is_deeper(letter.body, BODY_LEVELS_MAX):
        raise BadLetter(f"its body is nested more than {BODY_LEVELS_MAX} levels deep")
    try:
        msgspec.convert(letter.body, _BODIES[letter.kind])
    except msgspec.ValidationError as exc:
        raise BadLetter(f"the body of a letter of kind {letter.kind}: {exc}") from exc


def _pretty(data: bytes) -> bytes:
    return msgspec.json.format(data, indent=2) + b"\n"


# --- the order of a mailbox


def name_of(position: int, letter_id: str) -> str:
    return f"{position:0{DIGITS}d}-{letter_id}{SUFFIX}"


def parse_name(name: str) -> tuple[int, LetterId] | None:
    """Parse the position and the id; None if this is not the file name of a letter."""
    found = _STEM.fullmatch(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    if found is None or not is_safe_stem(found[2]):
        return None
    return int(found[1]), LetterId(found[2])


def read_letter(name: str, data: bytes) -> Letter:
    """Parse the letter in a file of that name; raises `BadLetter`."""
    found = parse_name(name)
    if found is None:
        raise BadLetter("its file name is not that of a letter")
    letter = parse_letter(data)
    if letter.id != found[1]:
        raise BadLetter("its file name has the id of another letter")
    return letter


def has_id(name: str, letter_id: str) -> bool:
    found = parse_name(name)
    return found is not None and found[1] == letter_id


def next_position(letter: Letter, last: int, now_s: float) -> int:
    """Return the position of a new letter, where `last` is the last position assigned."""
    created_ns = _nanoseconds(parse_time(letter.created_at) or 0.0)
    soonest = min(created_ns, _nanoseconds(now_s) + AHEAD_MAX_NS)
    return min(max(soonest, last + 1, 0), POSITION_MAX)


def is_ahead(position: int, now_s: float) -> bool:
    """Return True for a position so far ahead that a clock or the journal must have been wrong."""
    return position > _nanoseconds(now_s) + ABSURD_NS


class OrderJournal(Struct, frozen=True):
    """The letters that a mailbox accepted, as stored in its `.seq`.

    The first line has the boot id of the machine and the last position assigned before the journal
    was rebuilt; the other lines are the names, without suffix, of the letters accepted since. The
    journal saves a delivery from listing directories: its last line has the last position, its line
    count bounds the number of letters, and a repeated delivery is found in it. Except for the last
    position it can be rebuilt from a listing, so it need not be durable: after a crash of the
    machine the boot id differs.
    """

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
