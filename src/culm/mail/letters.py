"""A letter: what one agent, person or program writes to another, and how it looks as a file.

Owns the fields, the bodies of the four kinds and what makes a letter unfit to be delivered or
read. Where it lies is `base.py`'s; who may send it, and what becomes of it, is the caller's.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct, field

from culm.errors import InvalidRequest, TooLarge
from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.fleet.times import parse_time
from culm.ids import LetterId
from culm.wire.agents import LetterKind, LetterShown
from culm.wire.codec import Json, encodable, encode, is_deeper, printable

# A letter is text that a model reads in one round. Whoever has more writes it to a file, and
# says where that is.
LETTER_BYTES_MAX: Final = 256 << 10

# Deeper ones say nothing to a reader, and what walks through them would reach its own bounds.
BODY_LEVELS_MAX: Final = 32

# As others write it: answered on a copy that is forgotten, or a turn like any. Here both are that.
AskMode = Literal["query", "steer"]
QUERY: Final[AskMode] = "query"


class BadLetter(InvalidRequest):
    """It is no letter, or none that may be delivered. Says why."""

    code = "bad_letter"

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a letter: {reason}", hint="docs/mail.md shows what a letter has")


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
    agent_id: str | None = None  # Ours alone: the mailbox that an answer goes to.


class Letter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: LetterId
    from_: Sender = field(name="from")
    kind: LetterKind
    body: dict[str, Json]
    created_at: str  # Times are RFC 3339, kept as they were written.
    correlation_id: str | None = None  # Of a reply: the ask that it answers.
    expires_at: str | None = None  # Ours alone: nobody wants to read it later than that.


_NonBlank = Annotated[str, Meta(pattern=r"\S")]  # There is something to do.


class _Task(Struct):
    assignment: _NonBlank


class _Ask(Struct):
    question: _NonBlank
    mode: AskMode = QUERY


class _Reply(Struct):
    answer: str


class _Handoff(Struct):
    """Others put what they like into it."""

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
    """The body of a letter that says `text`; only an ask has a mode."""
    body: dict[str, Json] = {_TEXT_FIELDS[kind]: text}
    if kind == "ask" and mode != QUERY:
        body["mode"] = mode
    return body


def unanswered(why: str) -> dict[str, Json]:
    """The body of a reply that is no answer: a program must not take it for one."""
    return {"answer": f"It was not answered: {why}", "failed": True}


def text_of(letter: Letter) -> str:
    """What an agent reads of it. Of a handoff that says nothing in our words, all of its body."""
    text = letter.body.get(_TEXT_FIELDS[letter.kind])
    # Not indented: what is nested would become a thousand times as long.
    return text if isinstance(text, str) else encode(letter.body).decode()


def mode_of(letter: Letter) -> AskMode:
    """How an ask is to be answered: `query` if it does not say."""
    found = letter.body.get("mode", QUERY)
    return found if found in get_args(AskMode) else QUERY


def expires_s_of(letter: Letter) -> float | None:
    """The time after which nobody wants to read it."""
    return None if letter.expires_at is None else parse_time(letter.expires_at)


def is_expired(letter: Letter, now_s: float) -> bool:
    at_s = expires_s_of(letter)
    return at_s is not None and at_s <= now_s


def shown_of(letter: Letter, to: str) -> LetterShown:
    """A letter that lies in a mailbox, as whoever asks about it is told."""
    return LetterShown(
        letter_id=letter.id,
        from_=printable(letter.from_.agent_id or letter.from_.session_id)[:STEM_CHARS_MAX],
        to=to,
        kind=letter.kind,
        correlation_id=letter.correlation_id or "",
        created_at=int(parse_time(letter.created_at) or 0),
    )


def encode_letter(letter: Letter) -> bytes:
    """The letter as its file has it, for people to read; raises `BadLetter`, `LetterTooLarge`."""
    _check(letter)
    try:
        try:
            data = encode(letter)
        except UnicodeEncodeError:  # Half a character, such as a command line may hold.
            data = encode(encodable(letter))
        pretty = _pretty(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise BadLetter(f"its body is no JSON: {exc}") from exc
    if len(pretty) > LETTER_BYTES_MAX:
        raise LetterTooLarge(letter.id, len(pretty))
    return pretty


def parse_letter(data: bytes) -> Letter:
    """Read what anybody wrote; raises `BadLetter`."""
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
    """Raises `BadLetter` for what the types of its fields do not say."""
    if not is_safe_stem(letter.id):
        raise BadLetter(
            f"its id is not safe: 1 to {STEM_CHARS_MAX} letters, digits, _ - . and no .."
        )
    for name, text in (("created_at", letter.created_at), ("expires_at", letter.expires_at)):
        if text is not None and parse_time(text) is None:
            raise BadLetter(f"{name} is no time as in RFC 3339")
    if is_deeper(letter.body, BODY_LEVELS_MAX):
        raise BadLetter(f"its body is nested more than {BODY_LEVELS_MAX} levels deep")
    try:
        msgspec.convert(letter.body, _BODIES[letter.kind])
    except msgspec.ValidationError as exc:
        raise BadLetter(f"the body of a letter of kind {letter.kind}: {exc}") from exc


def _pretty(data: bytes) -> bytes:
    return msgspec.json.format(data, indent=2) + b"\n"
