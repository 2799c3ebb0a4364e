"""Letters between agents, people and programs, and their file format.

Owns the fields, the bodies of the four kinds, and the checks before delivery and after reading.
Storage belongs to `base.py`; callers decide which senders are allowed and how a letter is handled.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from culm.clock import parse_time
from culm.errors import InvalidRequest, TooLarge
from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.ids import LetterId
from culm.wire.agents import LetterKind, LetterShown
from culm.wire.codec import Json, encodable, encode, is_deeper, printable

# A letter is text that a model reads in one round. Longer text belongs in a file that the letter
# names.
LETTER_BYTES_MAX: Final = 256 << 10

# Deeper nesting is useless to a reader, and recursive code would reach its own limits.
BODY_LEVELS_MAX: Final = 32

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
