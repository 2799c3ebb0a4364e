"""An open message: its growing text, its stored state, and the state that clients have.

`Draft` is any open message. `OpenAnswer` is a model's answer, which assigns each piece of text to a
part of its draft.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct, field, structs

from culm.clock import Clock
from culm.errors import LimitExceeded, ModelFailed
from culm.model.base import CallDelta, CallStarted, ReasoningDelta, TextDelta
from culm.run.loop import Growth, parse_arguments
from culm.store.base import Unit
from culm.store.messages import TextChunk
from culm.store.text_tail import ShownOutput, TailRecord
from culm.tools.base import CallRequest
from culm.wire.codec import decode, encodable, encode
from culm.wire.events import MessageDelta
from culm.wire.messages import (
    Growing,
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
    growing_of,
    new_part,
    set_text,
    text_of,
)

MESSAGE_CHARS_MAX = 16 << 20  # A model that writes more is looping.
PARTS_MAX = 10_000  # A model that makes more parts is looping.
SIGNATURE_CHARS_MAX = 32 << 20  # Providers expect it back; allows twice the longest reasoning.
CALLS_MAX = 64  # A model that makes more in one answer is looping.

Track = Callable[[asyncio.Future[None]], asyncio.Future[None]]


class PendingWrites:
    """Writes to the store that are not durable yet."""

    def __init__(self) -> None:
        self._writes: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._writes)

    def track(self, write: asyncio.Future[None]) -> asyncio.Future[None]:
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def wait(self) -> None:
        """Wait for those present now, also if they fail."""
        if self._writes:
            await asyncio.wait(self._writes)


class DraftEnd(Struct, frozen=True):
    """The units that are committed with the end of a message, however often that is retried."""

    before: Unit | None
    after: Unit | None
    on_commit: Callable[[], None] | None


class Draft(Struct, eq=False):
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
    # The length of each part's text that clients may have: it is stored, or in the tail.
    shown: list[int] = field(default_factory=list[int])
    # The first file of the tail with text that no commit contains; None if a commit has all.
    tail_from: int | None = None
    # The output of each running call; the tail has it until a commit contains the result.
    outputs: dict[str, ShownOutput] = field(default_factory=dict[str, ShownOutput])
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

    def visible(self) -> Message:
        """Return the message with the text that clients may have."""
        message = self.fold()
        if self.shown == self.lengths:
            return message
        parts = [
            part if shown == length else _cut(part, shown)
            for part, shown, length in zip(message.parts, self.shown, self.lengths, strict=True)
            if shown or not length
        ]
        return structs.replace(message, parts=parts)

    def show(self, delta: MessageDelta) -> None:
        """Record that clients may have this text."""
        self._show_upto(delta.rev, delta.part, delta.offset + len(delta.text))

    def show_stored(self, chunk: TextChunk) -> None:
        self._show_upto(chunk.rev, chunk.part, chunk.pos + len(chunk.text))

    def _show_upto(self, rev: int, part: int, length: int) -> None:
        if rev == self.message.rev:
            self.shown[part] = max(self.shown[part], length)

    def output_record(self, call_id: str, offset: int, text: str) -> TailRecord:
        message = self.message
        return TailRecord(message.session_id, message.id, 0, 0, "text", offset, text, call_id)

    def add_part(self, kind: Growing) -> None:
        self.message.parts.append(new_part(kind))
        for lengths in (self.lengths, self.shown, self.submitted):
            lengths.append(0)

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
            self.published = encode(self.visible())
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
        self.shown = list(self.lengths)  # It is published only after its commit.
        self.submitted = list(self.lengths)
        self.size = sum(self.lengths)
        self.loose = 0


def _cut(part: Part, length: int) -> Part:
    (copied,) = decode(encode([part]), list[Part])
    kind = growing_of(part)
    assert kind is not None, "only growing parts grow"
    set_text(copied, (text_of(part, kind) or "")[:length])
    return copied


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


def calls_in(message: Message) -> list[CallRequest]:
    """Return the calls of a stored answer, each with its whole input."""
    return [
        CallRequest(
            part.data.id,
            part.data.name,
            part.data.input,
            parse_arguments(part.data.input),
            session_id=message.session_id,
            message_id=message.id,
        )
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]


class MessageWriter(Protocol):
    """The storage of an open message: `Messages`, or a worker, which stores nothing."""

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None: ...

    def put(self, draft: Draft, part: int, value: Part) -> asyncio.Future[None]: ...

    def put_all(
        self, draft: Draft, parts: Mapping[int, Part], *, after: Unit | None = None
    ) -> asyncio.Future[None]: ...

    def clear(
        self, draft: Draft, *, model: str = "", provider: str = ""
    ) -> asyncio.Future[None]: ...


class OpenAnswer:
    """One open message. Clients expect at most one text part and one reasoning part."""

    def __init__(self, draft: Draft, messages: MessageWriter, clock: Clock, track: Track) -> None:
        self.draft = draft
        self._messages = messages
        self._clock = clock
        self._track = track  # Receives every write, so that the owner can wait for it.
        self._text: int | None = None
        self._reasoning: int | None = None
        self._calls: dict[int, int] = {}  # Part numbers by the model's key of the call.

    def grow(self, event: Growth) -> None:
        if isinstance(event, TextDelta):
            text = event.text
            if self._text is None:
                text = text.removeprefix("\n")
                if not text:
                    return
                self.end_reasoning()
                self._text = len(self.draft.message.parts)
            self._messages.append(self.draft, self._text, "text", text)
        elif isinstance(event, CallDelta):
            self._messages.append(self.draft, self._calls[event.key], "input", event.text)
        elif isinstance(event, ReasoningDelta):
            self._grow_reasoning(event)
        else:
            self._begin_call(event)

    def _grow_reasoning(self, event: ReasoningDelta) -> None:
        if self._reasoning is None:
            self._reasoning = len(self.draft.message.parts)
            reasoning = Reasoning(started_at=int(self._clock.now_s()))
            self._put(self._reasoning, ReasoningPart(reasoning))
        self._messages.append(self.draft, self._reasoning, "reasoning", event.text)
        if event.signature:
            reasoning = self._reasoning_at(self._reasoning)
            reasoning.signature += event.signature
            if len(reasoning.signature) > SIGNATURE_CHARS_MAX:
                raise ModelFailed(
                    "Signature too long", "The model sent a signature over the limit."
                )

    def _reasoning_at(self, part: int) -> Reasoning:
        found = self.draft.fold().parts[part]
        assert isinstance(found, ReasoningPart), "a part keeps its kind"
        return found.data

    def end_reasoning(self) -> None:
        if self._reasoning is None:
            return
        reasoning = self._reasoning_at(self._reasoning)
        if not reasoning.finished_at:
            reasoning.finished_at = int(self._clock.now_s())
            self._put(self._reasoning, ReasoningPart(reasoning))

    def _begin_call(self, event: CallStarted) -> None:
        if len(self._calls) >= CALLS_MAX:
            raise ModelFailed(
                "Too many calls", f"The model made more than {CALLS_MAX} calls in one answer."
            )
        self.end_reasoning()
        parts = self.draft.message.parts
        taken = {part.data.id for part in parts if isinstance(part, ToolCallPart)}
        index = self._calls[event.key] = len(parts)
        # Some providers reject a conversation in which two calls share an id.
        call_id = event.id or f"call_{index}_{self.draft.message.id[:8]}"
        while call_id in taken:  # Every call has its own result, so it needs its own id.
            call_id += "~"
        self._put(index, ToolCallPart(ToolCall(call_id, event.name)))

    def _put(self, part: int, value: ReasoningPart | ToolCallPart) -> None:
        self._track(self._messages.put(self.draft, part, value))

    async def clear(self, *, model: str = "", provider: str = "") -> None:
        """Discard the whole answer. With `model`, that model answers from now on."""
        self._text = self._reasoning = None
        self._calls = {}
        cleared = self._messages.clear(self.draft, model=model, provider=provider)
        await asyncio.shield(self._track(cleared))

    def calls(self) -> list[CallRequest]:
        """Return the calls in order; arguments that are not a JSON object become `{}`."""
        parts = self.draft.fold().parts
        calls: list[CallRequest] = []
        for index in sorted(self._calls.values()):
            part = parts[index]
            assert isinstance(part, ToolCallPart), "a part keeps its kind"
            arguments = parse_arguments(part.data.input)
            text = part.data.input if arguments else "{}"
            message = self.draft.message
            calls.append(
                CallRequest(
                    part.data.id,
                    part.data.name,
                    text,
                    arguments,
                    session_id=message.session_id,
                    message_id=message.id,
                )
            )
        return calls

    def complete(self, calls: list[CallRequest], after: Unit | None = None) -> asyncio.Future[None]:
        """Store every call with its whole input, and `after` in the same transaction.

        The future completes when both are durable, and must not be cancelled.
        """
        parts: dict[int, Part] = {
            index: ToolCallPart(ToolCall(call.id, call.name, call.input, finished=True))
            for index, call in zip(sorted(self._calls.values()), calls, strict=True)
        }
        return self._track(self._messages.put_all(self.draft, parts, after=after))
