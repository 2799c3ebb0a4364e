"""The interface of a provider's dialect: blocks in pieces, and the end of an answer.

A dialect only converts them to bytes; it does not send anything.
"""

from typing import Literal, NamedTuple, Protocol

from msgspec import Raw, Struct

from culm.testing.script import ScriptedUsage
from culm.wire.codec import Json, decode, encode

Kind = Literal["reasoning", "text", "call"]


class ScriptBlock(Struct, frozen=True, gc=False):
    """A section of an answer: its reasoning, its text, or one of its calls."""

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
    """The fields of a request that affect its answer; they are the same in both dialects."""

    messages: Raw
    system: Raw = Raw(b"null")
    model: str = "scripted"
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def text(self) -> str:
        """System prompt and messages as normalized JSON."""
        parts: list[Json] = [decode(self.system, object), decode(self.messages, object)]
        return encode(parts).decode()


class AnswerHeader(Struct, frozen=True):
    """Metadata of an answer."""

    n: int  # The request's number.
    model: str
    created_s: int
    include_usage: bool


class Dialect(Protocol):
    """One answer in a provider's format. All but `whole` and `problem` return parts of a stream."""

    def __init__(self, answer: AnswerHeader) -> None: ...

    def head(self, usage: ScriptedUsage | None) -> bytes:
        """The beginning of the stream."""
        ...

    def began(self, block: ScriptBlock) -> bytes: ...

    def delta(self, block: ScriptBlock, text: str) -> bytes:
        """One piece of a block, as one event."""
        ...

    def ended(self, block: ScriptBlock) -> bytes: ...

    def tail(self, finish: str, usage: ScriptedUsage | None) -> bytes:
        """The end of the stream."""
        ...

    def malformed(self) -> bytes:
        """An event whose data is not JSON."""
        ...

    def unknown(self) -> bytes:
        """An event of an unknown type, which clients should ignore."""
        ...

    def failed(self) -> bytes:
        """An error after the beginning of the answer."""
        ...

    def whole(self, content: list[FilledBlock], finish: str, usage: ScriptedUsage | None) -> bytes:
        """The answer to a request without streaming."""
        ...

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        """The body of an error response."""
        ...
