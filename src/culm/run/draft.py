"""An open message: its text as it grows, what the store has of it, and what clients were told."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from culm.errors import LimitExceeded
from culm.store.base import Unit
from culm.store.messages import TextChunk
from culm.wire.codec import encodable, encode
from culm.wire.events import MessageDelta
from culm.wire.messages import Message, Part, growing_of, set_text, text_of

MESSAGE_CHARS_MAX = 4 << 20  # A model that writes more is looping ...
PARTS_MAX = 10_000  # ... and so is one that makes more parts.


@dataclass(frozen=True, slots=True)
class DraftEnd:
    """What is committed in one transaction with a message's end, however often that is tried."""

    before: Unit | None
    after: Unit | None
    on_commit: Callable[[], None] | None


@dataclass(eq=False, slots=True)
class Draft:
    """An open message. Made by `Messages.open`; changed only through `Messages`."""

    message: Message
    # Writes of this message are numbered. One may fail at once, before an earlier one commits.
    last_sent: int = 0
    last_failed: int = 0
    last_told: int = 0  # Of those that brought the whole message.
    in_flight: int = 0  # Durable changes submitted and not yet told.
    told: bytes | None = None  # What clients have, while it is unsettled.
    held: list[MessageDelta] = field(default_factory=list[MessageDelta])  # Told after it.
    pieces: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    lengths: list[int] = field(default_factory=list[int])  # Of each part's text, in code points.
    kept: list[int] = field(default_factory=list[int])  # How much of it was given to the store.
    size: int = 0  # Of all text together.
    loose: int = 0  # Code points not given to the store yet.
    deleting: int = 0  # Deletions in flight; what grows meanwhile is told only if they fail.
    keeping: bool = False  # A chunk is in flight; the next one waits, so that none is missing.
    ended: bool = False
    end: DraftEnd | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # Its end is told, or nobody's care.

    def fold(self) -> Message:
        """The message with all its text in place."""
        for n, pieces in self.pieces.items():
            part = self.message.parts[n]
            kind = growing_of(part)
            assert kind is not None, "only growing parts have pieces"
            set_text(part, (text_of(part, kind) or "") + "".join(pieces))
        self.pieces.clear()
        return self.message

    @property
    def damaged(self) -> bool:
        """A write failed, and none since then has brought the whole message."""
        return self.last_failed > self.last_told

    @property
    def unsettled(self) -> bool:
        """Clients have `told`, not the message as it is here."""
        return self.in_flight > 0 or self.deleting > 0 or self.damaged

    def damage(self, number: int) -> None:
        """A write failed; until the whole message is saved, clients see what they were told."""
        if not self.unsettled:
            self.told = encode(self.fold())
        self.last_failed = max(self.last_failed, number)

    def send(self) -> int:
        """The number of the next write."""
        self.last_sent += 1
        return self.last_sent

    def take_chunks(self) -> list[TextChunk]:
        """What has grown since it was last given to the store."""
        message = self.fold()
        chunks: list[TextChunk] = []
        for n, (kept, length) in enumerate(zip(self.kept, self.lengths, strict=True)):
            if length > kept:
                kind = growing_of(message.parts[n])
                assert kind is not None, "only growing parts grow"
                text = text_of(message.parts[n], kind) or ""
                chunks.append(TextChunk(message.id, message.rev, n, kept, kind, text[kept:]))
        self.kept = list(self.lengths)
        self.loose = 0
        return chunks

    def measure(self) -> None:
        """Count anew after parts changed other than by growing; all of it goes to the store."""
        texts = [text_of(p, kind) if (kind := growing_of(p)) else "" for p in self.message.parts]
        self.lengths = [len(text or "") for text in texts]
        self.kept = list(self.lengths)
        self.size = sum(self.lengths)
        self.loose = 0


def check_size(chars: int) -> None:
    """Raises `LimitExceeded` if no message may have so much text."""
    if chars > MESSAGE_CHARS_MAX:
        raise LimitExceeded("characters in one message", MESSAGE_CHARS_MAX)


def check_part(part: int) -> None:
    """Raises `LimitExceeded` if no message may have a part of that number."""
    if part >= PARTS_MAX:
        raise LimitExceeded("parts in one message", PARTS_MAX)


def put_parts(message: Message, parts: Mapping[int, Part]) -> None:
    """Set each, or add it if it is the next one."""
    for part, value in sorted(parts.items()):
        assert part <= len(message.parts), "a part follows the one before it"
        # A file name may hold bytes that are no text.
        message.parts[part : part + 1] = [encodable(value)]
