"""The interface to language models: a request, and its streamed answer as provider-neutral events.

An adapter translates a `ModelRequest` into a provider's dialect and the provider's stream into
events. It does not retry, run tools or store anything; the caller does. Closing the iterator
ends the request.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field

from culm.errors import ModelFailed
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import Message
from culm.wire.runs import COST_MAX, TOKENS_MAX
from culm.wire.tools import ToolFacts, ToolInfo

if TYPE_CHECKING:
    import aiohttp  # Its import would take half of the time of `culm models`.

StopReason = Literal["end_turn", "max_tokens", "tool_use", "content_filter", "unknown"]


class ToolSpec(Struct, frozen=True):
    """A tool: its description for a model, and facts for rules and clients."""

    name: str
    description: str
    parameters: dict[str, Json]  # A JSON schema of an object.
    facts: ToolFacts = ToolFacts()  # Never sent to a model.

    def info(self, *, enabled: bool = True) -> ToolInfo:
        """Describe the tool to clients."""
        return ToolInfo(
            name=self.name,
            kind=self.facts.kind,
            path_arguments=self.facts.path_arguments,
            command_argument=self.facts.command_argument,
            shown_arguments=self.facts.shown_arguments or self.facts.subject,
            enabled=enabled,
        )


class ModelRequest(Struct, frozen=True):
    """One request to a model. In `messages` each call is directly followed by its result."""

    system: str
    messages: list[Message]
    tools: tuple[ToolSpec, ...] = ()
    settings: SelectedModel = field(default_factory=SelectedModel)
    max_tokens: int | None = None  # Of the answer; None: see `settings`.


class ProviderAccess(Struct, frozen=True):
    """Address and credentials of a provider. The key must never be shown, stored or logged."""

    type: str = "openai"  # The dialect.
    vendor: str = ""  # If known, for deviations from the dialect: "mistral", "deepseek", ...
    base_url: str = ""
    api_key: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: dict[str, Json] = field(default_factory=dict[str, Json])  # Merged into every request.

    def __repr__(self) -> str:
        return f"ProviderAccess(type={self.type!r}, vendor={self.vendor!r}, …)"


class ModelSetup(Struct, frozen=True):
    """The arguments of an adapter: one model of one provider, and how to reach it."""

    http: "aiohttp.ClientSession"  # Outlives the model, and does not limit connections.
    access: ProviderAccess
    info: ModelInfo  # Its id and its known abilities.
    first_byte_s: float  # The longest wait for the beginning of an answer.
    stall_s: float  # The longest silence in the middle of an answer.


# --- events. Structs without GC tracking, because there is one for every token.


class TextDelta(Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    text: str
    # Proof of the text that the provider wants back. Pieces are concatenated; only the adapter
    # that wrote it reads it.
    signature: str = ""


class CallStarted(Struct, frozen=True, gc=False):
    """The beginning of a call. `key` identifies it in this answer; parallel calls interleave."""

    key: int
    id: str  # From the provider; may be empty or a duplicate.
    name: str


class CallDelta(Struct, frozen=True, gc=False):
    """A piece of a call's arguments, which are valid JSON only once they are complete."""

    key: int
    text: str


class TokenUsage(Struct, frozen=True):
    """Tokens of one answer, as the provider counted them."""

    input: int = 0  # Without those read from or written to a cache.
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0  # Of the output.
    cost: float | None = None  # In USD, if the provider reports it.


def usage_of(
    *,
    input: int | None,
    output: int | None,
    cache_read: int | None = None,
    cache_write: int | None = None,
    reasoning: int | None = None,
    cost: float | None = None,
) -> TokenUsage:
    """A provider's counts, limited to plausible values because they are summed up forever."""
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
    """The answer and all of its calls are complete. Always the last event of a whole stream."""

    reason: StopReason
    usage: TokenUsage | None = None


ModelEvent = TextDelta | ReasoningDelta | CallStarted | CallDelta | AnswerDone


def joined(events: Iterable[ModelEvent]) -> Iterator[ModelEvent]:
    """The same events, with consecutive text deltas combined into one."""
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
        """Send the request and yield the answer as it arrives; raises `ModelFailed`."""
        ...


MakeModel = Callable[[ModelSetup], LanguageModel]
