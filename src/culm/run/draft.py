"""An open message: its growing text, its stored state, and the state that clients have."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from culm.errors import LimitExceeded
from culm.store.base import Unit
from culm.store.messages import TextChunk
from culm.wire.codec import encodable, encode
from culm.wire.events import MessageDelta
from culm.wire.messages import Message, Part, growing_of, set_text, text_of

MESSAGE_CHARS_MAX = 4 << 20  # A model that writes more is looping.
PARTS_MAX = 10_000  # A model that makes more parts is looping.


@dataclass(frozen=True, slots=True)
class DraftEnd:
    """The units that are committed with the end of a message, however often that is retried."""

    before: Unit | None
    after: Unit | None
    on_commit: Callable[[], None] | None


@dataclass(eq=False, slots=True)
class Draft:
    """An open message. Created by `Messages.open`; changed only through `Messages`."""

    message: Message
    # Writes of this message are numbered. A later one may fail before an earlier one commits.
    last_sent: int = 0
    last_failed: int = 0
    last_published: int = 0  # The last published write that contained the whole message.
    in_flight: int = 0  # Durable changes that are submitted and not yet published.
    published: bytes | None = None  # The message that clients have while newer changes are pending.
    # Deltas that are published after the pending changes.
    held_deltas: list[MessageDelta] = field(default_factory=list[MessageDelta])
    pieces: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    # The length of each part's text, in code points.
    lengths: list[int] = field(default_factory=list[int])
    # The length of each part's text that was submitted to the store.
    submitted: list[int] = field(default_factory=list[int])
    size: int = 0  # The length of all texts together.
    loose: int = 0  # Code points that were not submitted to the store yet.
    deleting: int = 0  # Deletions in flight; text added meanwhile is published only if they fail.
    chunk_in_flight: bool = False  # The next chunk waits for it, so that there is no gap.
    ended: bool = False
    end: DraftEnd | None = None
    # Its end is published, or it was dropped.
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def fold(self) -> Message:
        """Join the pieces and return the message with its whole text."""
        for n, pieces in self.pieces.items():
            part = self.message.parts[n]
            kind = growing_of(part)
            assert kind is not None, "only growing parts have pieces"
            set_text(part, (text_of(part, kind) or "") + "".join(pieces))
        self.pieces.clear()
        return self.message

    @property
    def damaged(self) -> bool:
        """Return True if a write failed and no later one has stored the whole message."""
        return self.last_failed > self.last_published

    @property
    def is_pending(self) -> bool:
        """Return True if clients have the `published` message instead of the current one."""
        return self.in_flight > 0 or self.deleting > 0 or self.damaged

    def damage(self, number: int) -> None:
        """Record a failed write. Clients keep the published message until the next full save."""
        if not self.is_pending:
            self.published = encode(self.fold())
        self.last_failed = max(self.last_failed, number)

    def send(self) -> int:
        """Return the number of the next write."""
        self.last_sent += 1
        return self.last_sent

    def take_chunks(self) -> list[TextChunk]:
        """Return the text added since the last submission, and mark it as submitted."""
        message = self.fold()
        chunks: list[TextChunk] = []
        for n, (submitted, length) in enumerate(zip(self.submitted, self.lengths, strict=True)):
            if length > submitted:
                kind = growing_of(message.parts[n])
                assert kind is not None, "only growing parts grow"
                text = text_of(message.parts[n], kind) or ""
                chunks.append(
                    TextChunk(message.id, message.rev, n, submitted, kind, text[submitted:])
                )
        self.submitted = list(self.lengths)
        self.loose = 0
        return chunks

    def measure(self) -> None:
        """Recount after a change other than growth. The whole message goes to the store."""
        texts = [text_of(p, kind) if (kind := growing_of(p)) else "" for p in self.message.parts]
        self.lengths = [len(text or "") for text in texts]
        self.submitted = list(self.lengths)
        self.size = sum(self.lengths)
        self.loose = 0


def check_size(chars: int) -> None:
    """Raise `LimitExceeded` if a message may not have this much text."""
    if chars > MESSAGE_CHARS_MAX:
        raise LimitExceeded("characters in one message", MESSAGE_CHARS_MAX)


def check_part(part: int) -> None:
    """Raise `LimitExceeded` if a message may not have a part with this number."""
    if part >= PARTS_MAX:
        raise LimitExceeded("parts in one message", PARTS_MAX)


def put_parts(message: Message, parts: Mapping[int, Part]) -> None:
    """Set the given parts; a part with the next number is appended."""
    for part, value in sorted(parts.items()):
        assert part <= len(message.parts), "a part follows the one before it"
        # A file name may contain bytes that are not text.
        message.parts[part : part + 1] = [encodable(value)]
