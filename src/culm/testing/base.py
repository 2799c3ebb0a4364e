"""What a provider's dialect is given to say: blocks in pieces, and how the answer ends.

A dialect turns these words into bytes and nothing else: it sends nothing and knows no time.
"""

from typing import Literal, NamedTuple, Protocol

from msgspec import Raw, Struct

from culm.testing.script import ScriptedUsage
from culm.wire.codec import Json, decode, encode

Kind = Literal["reasoning", "text", "call"]


class ScriptBlock(Struct, frozen=True, gc=False):
    """One stretch of an answer: its reasoning, its text, or one of its calls."""

    kind: Kind
    index: int  # Among all blocks of the answer.
    number: int = 0  # Of a call, among the calls.
    id: str = ""
    name: str = ""


class FilledBlock(NamedTuple):
    """A block with all of its text, for an answer that is not streamed."""

    block: ScriptBlock
    text: str


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class RequestShape(Struct, frozen=True):
    """What of a request decides the shape of its answer; both dialects name it alike."""

    messages: Raw
    system: Raw = Raw(b"null")
    model: str = "scripted"
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def text(self) -> str:
        """System prompt and messages as JSON, spelled alike whichever client wrote them."""
        parts: list[Json] = [decode(self.system, object), decode(self.messages, object)]
        return encode(parts).decode()


class AnswerHeader(Struct, frozen=True):
    """What an answer says of itself."""

    n: int  # The request's number.
    model: str
    created_s: int
    include_usage: bool


class Dialect(Protocol):
    """One answer in a provider's words. Everything but `whole` is bytes of an event stream."""

    def __init__(self, answer: AnswerHeader) -> None: ...

    def head(self, usage: ScriptedUsage | None) -> bytes:
        """What comes before everything."""
        ...

    def began(self, block: ScriptBlock) -> bytes: ...

    def delta(self, block: ScriptBlock, text: str) -> bytes:
        """One piece of a block, as one event."""
        ...

    def ended(self, block: ScriptBlock) -> bytes: ...

    def tail(self, finish: str, usage: ScriptedUsage | None) -> bytes:
        """What comes after everything."""
        ...

    def malformed(self) -> bytes:
        """An event whose data is not JSON."""
        ...

    def unknown(self) -> bytes:
        """An event of a type that no client knows, which it should pass over."""
        ...

    def failed(self) -> bytes:
        """An error that comes when the answer has begun."""
        ...

    def whole(self, content: list[FilledBlock], finish: str, usage: ScriptedUsage | None) -> bytes:
        """The answer to a client that did not ask for a stream."""
        ...

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        """The body of an error."""
        ...
