"""Limits and usage of a run, retries, and loop detection. Pure."""

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
from culm.wire.runs import Ending, Limits, Used

ANSWER_BYTES = 4000  # A typical answer; reserved for a request without a limit of its own.
IMAGE_BYTES = 4000  # An image counts as about a thousand tokens, whatever its file size.

RETRIES_MAX = 3
RETRY_DELAYS_S = (5.0, 10.0, 20.0)
RETRY_AFTER_S_MAX = 60.0  # A provider that requests a longer wait is not retried.
JITTER = 0.25  # Relative to a delay: hundreds of runs that failed together must not retry together.

LOOP_STEPS = 10  # The number of recent steps to compare.
LOOP_REPEATS = 5  # The number of equal steps allowed among them.


# --- retries


def retry_delay_s(error: ModelFailed, attempt: int) -> float | None:
    """Return the delay before the next attempt, or None to give up. Attempts start at 0."""
    if not error.transient or attempt >= RETRIES_MAX:
        return None
    requested_s = error.retry_after_s
    if requested_s is None:
        return RETRY_DELAYS_S[attempt]
    return requested_s if requested_s <= RETRY_AFTER_S_MAX else None


def jittered(delay_s: float, chance: float) -> float:
    """Lengthen a delay a little. Never shorten it: a provider may have requested it."""
    return delay_s * (1 + JITTER * chance)


# --- usage


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
    """Return the usage of one answer. Without counts of the provider, estimate it at no cost."""
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


def estimate(history: Iterable[Message], answer: Sequence[Part], price: Price) -> Used:
    """Estimate the usage and cost of an answer that was cut off before it was counted."""
    used = _estimated(history, sum(map(_size, answer)))
    return used._replace(cost=_cost(used.prompt_tokens, used.completion_tokens, price))


def _cost(asked: int, answered: int, price: Price) -> float:
    return (asked * price.input + answered * price.output) / 1_000_000


def _estimated(asked: Iterable[Message], answer_size: int) -> Used:
    """Estimate the tokens at four bytes each, at no cost."""
    size = sum(_size(part) for message in asked for part in message.parts)
    return Used(math.ceil(size / 4), math.ceil(answer_size / 4), 0.0, estimated=True)


def _size(part: Part) -> int:
    """Return the approximate number of bytes that a model reads of a part."""
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
    """The expected usage of a model request."""

    tokens: int
    cost: float


def estimate_request(request: ModelRequest, price: Price) -> UsageEstimate:
    used = _estimated(request.messages, ANSWER_BYTES)
    asked, answer = used.prompt_tokens, request.max_tokens or used.completion_tokens
    return UsageEstimate(asked + answer, _cost(asked, answer, price))


# --- limits


def check_limits(limits: Limits) -> None:
    values = (limits.wall_s, limits.steps, limits.tokens, limits.cost)
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise InvalidRequest("limits must be numbers of at least 0")


def effective(asked: Limits, settings: Settings) -> Limits:
    """Bound the requested limits by those of the server. 0 means unlimited."""
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
        """Subtract, but never below zero: sums of fractions are not exact."""
        cost = max(0.0, self.cost - less.cost)
        return RunSpending(self.steps - less.steps, self.tokens - less.tokens, cost)


def used_up(spent: RunSpending, limits: Limits) -> str:
    """Describe the limit that is reached; empty if none is. Wall time has a timer instead."""
    for unit, used, limit in (
        ("steps", spent.steps, limits.steps),
        ("tokens", spent.tokens, limits.tokens),
        ("USD", spent.cost, limits.cost),
    ):
        if limit and used >= limit:
            return f"{limit:g} {unit.removesuffix('s') if limit == 1 else unit}"
    return ""


def over_limit(spent: RunSpending, limits: Limits) -> Ending | None:
    """Return the ending if a limit leaves no room for another step."""
    limit = used_up(spent, limits)
    return Ending("budget", "Limit reached", f"The run has used its {limit}.") if limit else None


# --- loops


class CallOutcome(NamedTuple):
    """A call and its result."""

    name: str
    input: str
    output: str


def fingerprint(step: Sequence[CallOutcome]) -> str:
    """Return the same hash for steps that did the same; empty for a step without calls."""
    return hashlib.sha256(encode(step)).hexdigest() if step else ""


def repeats_itself(fingerprints: Sequence[str]) -> bool:
    """Return True if more than five of the last ten steps were the same."""
    if len(fingerprints) < LOOP_STEPS:
        return False
    counts = Counter(mark for mark in fingerprints[-LOOP_STEPS:] if mark)
    return max(counts.values(), default=0) > LOOP_REPEATS


LOOPED = Ending(
    "loop",
    "The agent repeated itself",
    f"More than {LOOP_REPEATS} of its last {LOOP_STEPS} steps were the same.",
)
