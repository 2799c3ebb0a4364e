"""The seam towards language models: what one is asked, and its streamed answer in our own words.

An adapter turns a `Request` into a provider's dialect and the provider's stream into events. It
does not retry, run tools or store anything: whoever iterates decides. Closing the iterator ends
the request.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field

from culm.errors import ModelFailed
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import Message
from culm.wire.runs import COST_MAX, TOKENS_MAX

if TYPE_CHECKING:
    import aiohttp  # Half of the time that `culm models` takes would go into importing it.

StopReason = Literal["end_turn", "max_tokens", "tool_use", "content_filter", "unknown"]


_DEFAULTS = SelectedModel()


class ToolSpec(Struct, frozen=True):
    """A tool as a model is told of it."""

    name: str
    description: str
    parameters: dict[str, Json]  # A JSON schema of an object.


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One question to a model. In `messages` every call has its result right behind it."""

    system: str
    messages: list[Message]
    tools: tuple[ToolSpec, ...] = ()
    settings: SelectedModel = _DEFAULTS
    max_tokens: int | None = None  # Of the answer; else what `settings` say, else the provider.


class ProviderAccess(Struct, frozen=True):
    """How to reach a provider. Holds its key: never shown, stored or logged."""

    type: str = "openai"  # Which dialect it speaks ...
    vendor: str = ""  # ... and whose accent it has, if that is known: "mistral", "deepseek", ...
    base_url: str = ""
    api_key: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: dict[str, Json] = field(default_factory=dict[str, Json])  # Merged into every request.

    def __repr__(self) -> str:
        return f"Access(type={self.type!r}, vendor={self.vendor!r}, …)"


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What an adapter is made with: one model of one provider, and how to reach it."""

    http: "aiohttp.ClientSession"  # Outlives the model, and does not limit connections.
    access: ProviderAccess
    info: ModelInfo  # Its id, and what is known of its abilities.
    first_byte_s: float  # The longest wait for the beginning of an answer ...
    stall_s: float  # ... and the longest silence in the middle of one.


# --- what comes back. Structs without GC tracking: one is made for every token.


class TextDelta(Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    text: str
    # What the provider wants to see again to believe the text. Pieces are joined; only the adapter
    # that made it reads it.
    signature: str = ""


class CallStarted(Struct, frozen=True, gc=False):
    """The model begins a call. `key` names it within this answer; parallel calls interleave."""

    key: int
    id: str  # The provider's; may be empty, or the same as another call's.
    name: str


class CallDelta(Struct, frozen=True, gc=False):
    """More of a call's arguments, which are JSON only once all of them have come."""

    key: int
    text: str


class TokenUsage(Struct, frozen=True):
    """Tokens of one answer, as the provider counted them."""

    input: int = 0  # Without those read from or written to a cache.
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0  # Of the output.
    cost: float | None = None  # In USD, if the provider itself says.


def usage_of(
    *,
    input: int | None,
    output: int | None,
    cache_read: int | None = None,
    cache_write: int | None = None,
    reasoning: int | None = None,
    cost: float | None = None,
) -> TokenUsage:
    """What a provider counted, as far as it makes sense: its numbers are summed up for ever."""
    sane = cost is not None and 0 <= cost <= COST_MAX
    return TokenUsage(
        _count(input),
        _count(output),
        _count(cache_read),
        _count(cache_write),
        _count(reasoning),
        cost if sane else None,
    )


def _count(tokens: int | None) -> int:
    return min(max(0, tokens or 0), TOKENS_MAX)


class AnswerDone(Struct, frozen=True):
    """The answer and every call in it are complete; always the last event.

    Without it the stream was cut.
    """

    reason: StopReason
    usage: TokenUsage | None = None


ModelEvent = TextDelta | ReasoningDelta | CallStarted | CallDelta | AnswerDone


def joined(events: Iterable[ModelEvent]) -> Iterator[ModelEvent]:
    """The same events, with text that came together told together."""
    texts: list[str] = []
    try:
        for event in events:
            if isinstance(event, TextDelta):
                texts.append(event.text)
                continue
            if texts:
                yield TextDelta("".join(texts))
                texts.clear()
            yield event
    except ModelFailed:
        if texts:
            yield TextDelta("".join(texts))
        raise
    if texts:
        yield TextDelta("".join(texts))


class LanguageModel(Protocol):
    """One model of one provider."""

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Ask, and yield the answer as it comes; raises `ModelFailed`."""
        ...


MakeModel = Callable[[ModelSetup], LanguageModel]
