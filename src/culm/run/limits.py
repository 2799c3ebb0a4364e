"""How much a run may use up, what it has used, and when it only repeats itself. Pure."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from culm.errors import InvalidRequest, ModelFailed
from culm.model.base import ModelRequest, TokenUsage
from culm.settings import Settings
from culm.wire.codec import encode
from culm.wire.config import Model
from culm.wire.endings import Ending
from culm.wire.messages import (
    BinaryPart,
    FinishPart,
    ImageUrlPart,
    Message,
    Part,
    ReasoningPart,
    ShellCommandPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from culm.wire.runs import Limits, Used

ANSWER_BYTES = 4000  # A usual answer; what is set aside for one that has no bound of its own.
IMAGE_BYTES = 4000  # A picture is read as some thousand tokens, whatever its file weighs.

RETRIES_MAX = 3
RETRY_DELAYS_S = (5.0, 10.0, 20.0)
RETRY_AFTER_S_MAX = 60.0  # A provider that wishes for more is not waited for.
JITTER = 0.25  # Of a delay: hundreds of runs that failed together do not come back together.

LOOP_STEPS = 10  # The steps looked at ...
LOOP_REPEATS = 5  # ... of which this many may be the same.


# --- retries


def retry_delay_s(error: ModelFailed, attempt: int) -> float | None:
    """How long to wait before the question is asked again; None if it is not. From attempt 0."""
    if not error.transient or attempt >= RETRIES_MAX:
        return None
    wished = error.retry_after_s
    if wished is None:
        return RETRY_DELAYS_S[attempt]
    return wished if wished <= RETRY_AFTER_S_MAX else None


def jittered(delay_s: float, chance: float) -> float:
    """A delay made a little longer, never shorter: a provider may have wished for it."""
    return delay_s * (1 + JITTER * chance)


# --- use


class Price(NamedTuple):
    """USD per million tokens."""

    input: float
    output: float
    cache_read: float
    cache_write: float


FREE = Price(0.0, 0.0, 0.0, 0.0)


def price_of(model: Model, *, flat_rate: bool) -> Price:
    if flat_rate:
        return FREE
    return Price(
        model.cost_per_1m_in,
        model.cost_per_1m_out,
        model.cost_per_1m_out_cached,
        model.cost_per_1m_in_cached,
    )


def used_of(
    usage: TokenUsage | None, price: Price, request: ModelRequest, answer_bytes: int
) -> Used:
    """What one answer used. Where the provider did not count, an estimate that costs nothing."""
    if usage is None or not (usage.input or usage.output or usage.cache_read or usage.cache_write):
        return _estimated(request.messages, answer_bytes)
    cost = usage.cost
    if cost is None:
        cost = (
            usage.input * price.input
            + usage.output * price.output
            + usage.cache_read * price.cache_read
            + usage.cache_write * price.cache_write
        ) / 1_000_000
    prompt = usage.input + usage.cache_read
    return Used(prompt, usage.output, cost, estimated=False, cached_tokens=usage.cache_write)


def estimate(history: Iterable[Message], answer: Sequence[Part]) -> Used:
    """What an answer used that was cut off before anybody counted."""
    return _estimated(history, sum(map(_size, answer)))


def _estimated(asked: Iterable[Message], answer_size: int) -> Used:
    """A token has about four bytes. What is only estimated costs nothing."""
    size = sum(_size(part) for message in asked for part in message.parts)
    return Used(math.ceil(size / 4), math.ceil(answer_size / 4), 0.0, estimated=True)


def _size(part: Part) -> int:
    """About how many bytes a model reads of it."""
    match part:
        case TextPart(data=text):
            return len(text.text.encode())
        case ReasoningPart(data=reasoning):
            return len(reasoning.thinking.encode())
        case ToolCallPart(data=call):
            return len(call.name) + len(call.input.encode())
        case ToolResultPart(data=result):
            return len(result.content.encode())
        case BinaryPart(data=file) if file.mime_type.startswith("text/"):
            return len(file.data)
        case BinaryPart() | ImageUrlPart():
            return IMAGE_BYTES
        case ShellCommandPart(data=shell):
            return len(shell.command.encode()) + len(shell.output.encode())
        case FinishPart():
            return 0


class UsageEstimate(NamedTuple):
    """What a question to a model may use, before it is asked."""

    tokens: int
    cost: float


def estimate_request(request: ModelRequest, price: Price) -> UsageEstimate:
    used = _estimated(request.messages, ANSWER_BYTES)
    asked, answer = used.prompt_tokens, request.max_tokens or used.completion_tokens
    cost = (asked * price.input + answer * price.output) / 1_000_000
    return UsageEstimate(asked + answer, cost)


# --- limits


def check_limits(limits: Limits) -> None:
    values = (limits.wall_s, limits.steps, limits.tokens, limits.cost)
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise InvalidRequest("limits must be numbers of at least 0")


def effective(asked: Limits, settings: Settings) -> Limits:
    """What a caller asked for, within what the server allows; 0 is no limit."""
    return Limits(
        wall_s=_lower(asked.wall_s, settings.run_wall_s),
        steps=int(_lower(asked.steps, settings.run_steps_max)),
        tokens=int(_lower(asked.tokens, settings.run_tokens_max)),
        cost=_lower(asked.cost, settings.run_cost_max),
    )


def _lower(asked: float, allowed: float) -> float:
    return min(asked, allowed) if asked and allowed else asked or allowed


class RunSpending(NamedTuple):
    steps: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, used: Used) -> "RunSpending":
        return self.and_(RunSpending(1, used.all_tokens, used.cost))

    def and_(self, more: "RunSpending") -> "RunSpending":
        return RunSpending(
            self.steps + more.steps, self.tokens + more.tokens, self.cost + more.cost
        )

    def without(self, less: "RunSpending") -> "RunSpending":
        """Never below nothing: sums of fractions are not exact."""
        cost = max(0.0, self.cost - less.cost)
        return RunSpending(self.steps - less.steps, self.tokens - less.tokens, cost)


def used_up(spent: RunSpending, limits: Limits) -> str:
    """Which limit is reached, in words; empty if none is. Wall time has a timer instead."""
    for what, has, limit in (
        ("steps", spent.steps, limits.steps),
        ("tokens", spent.tokens, limits.tokens),
        ("USD", spent.cost, limits.cost),
    ):
        if limit and has >= limit:
            return f"{limit:g} {what.removesuffix('s') if limit == 1 else what}"
    return ""


def over_limit(spent: RunSpending, limits: Limits) -> Ending | None:
    """Whether another step is one too many."""
    limit = used_up(spent, limits)
    return Ending("budget", "Limit reached", f"The run has used its {limit}.") if limit else None


# --- loops


class CallOutcome(NamedTuple):
    """A call and what came of it."""

    name: str
    input: str
    output: str


def fingerprint(step: Sequence[CallOutcome]) -> str:
    """The same for steps that did the same; empty for one that called nothing."""
    return hashlib.sha256(encode(step)).hexdigest() if step else ""


def repeats_itself(fingerprints: Sequence[str]) -> bool:
    """Whether more than five of the last ten steps were one and the same."""
    if len(fingerprints) < LOOP_STEPS:
        return False
    counts = Counter(mark for mark in fingerprints[-LOOP_STEPS:] if mark)
    return max(counts.values(), default=0) > LOOP_REPEATS


LOOPED = Ending(
    "loop",
    "The agent repeated itself",
    f"More than {LOOP_REPEATS} of its last {LOOP_STEPS} steps were the same.",
)
