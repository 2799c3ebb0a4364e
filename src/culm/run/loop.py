"""One turn: ask the model, run the calls it made, repeat until it makes none.

Sees a model, tools, a journal and limits, and knows nothing of HTTP, SQL or WebSocket, so that a
worker of the fleet runs the same loop. Cancelling the task that runs it ends the turn at once;
whoever awaits that task writes the end, so nothing here cleans up after itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import msgspec

from culm.errors import ModelFailed
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    LanguageModel,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolSpec,
)
from culm.run.limits import (
    LOOPED,
    CallOutcome,
    Price,
    RunSpending,
    UsageEstimate,
    estimate_request,
    fingerprint,
    over_limit,
    repeats_itself,
    retry_delay_s,
    used_of,
)
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, Watch
from culm.wire.codec import Json
from culm.wire.config import SelectedModel
from culm.wire.endings import Ending
from culm.wire.messages import Message
from culm.wire.runs import Limits, Outcome, Used

PARALLEL_MAX = 5
Growth = TextDelta | ReasoningDelta | CallStarted | CallDelta
# Waits so many seconds, because of a failure.
Pause = Callable[[float, ModelFailed], Awaitable[None]]
RESULT_CHARS_MAX = 1 << 20  # No model reads more, and every client is sent it.
RESULT_CUT = "\n[The rest of this result was cut off.]"
BAD_ARGUMENTS = "The arguments of this call are not a JSON object. Repeat it with valid ones."


class GrowingAnswer(Protocol):
    """An answer while it comes."""

    def grow(self, event: Growth) -> None:
        """Let the answer grow, for everybody to see."""
        ...

    async def clear(self) -> None:
        """Take the answer back, before the question is asked again."""
        ...


class LoopJournal(GrowingAnswer, Protocol):
    """Where a turn is written down. What is awaited is durable when the wait is over."""

    async def begin_step(self) -> list[Message]:
        """Take in what waits to join, begin an empty answer; returns what the model shall read."""
        ...

    async def know_calls(self) -> list[CallRequest]:
        """The answer is complete: its calls, each with its whole input."""
        ...

    def known_results(self) -> Mapping[str, CallResult]:
        """Of the calls that an earlier server had answered in this step."""
        ...

    async def start_call(self, call: CallRequest) -> None: ...

    async def answer_call(self, call: CallRequest, result: CallResult) -> None: ...

    def count(self, used: Used) -> None:
        """Note what the answer used; written down with the end of the step."""
        ...

    async def end_step(self) -> None:
        """All calls are answered and another step follows."""
        ...


class UsageMeter(Protocol):
    """What a turn and all others of its tree may use up together."""

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Set something aside for one question; raises `BudgetReached`.

        What is never settled, because its answer was cut off, stays set aside.
        """
        ...

    def settle(self, reservation: str, used: Used) -> None: ...

    def forfeit(self, reservation: str) -> None:
        """It was cut off, and is asked again: what it used is not known and stays charged."""
        ...


class ModelChain(Protocol):
    """Who answers now, and who does when that one fails."""

    @property
    def current(self) -> "ActiveModel": ...

    async def fall_back(self, failure: ModelFailed) -> bool:
        """Let the next one speak, with nothing said yet; False if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """A model, and how it is asked."""

    model: LanguageModel
    settings: SelectedModel
    price: Price
    system: str


@dataclass(frozen=True, slots=True)
class TurnInput:
    """Everything one turn needs."""

    models: ModelChain
    tools: Mapping[str, Tool]
    # Whether a call goes ahead, and as what; a person may have to be asked first.
    admit: Callable[[Tool | CallResult, CallRequest], Awaitable[CallPlan | CallResult]]
    watch: Callable[[CallRequest], Watch]  # Who is told what a call puts out.
    journal: LoopJournal
    limits: Callable[[], Limits]  # As they are now: they may be changed while it goes on.
    meter: UsageMeter
    pause: Pause
    spent: RunSpending  # Before this turn began, or went on.
    # Called between steps: replaces what the model reads by a summary if the context is nearly
    # full. With an ending the turn is over; without one it goes on from the summary.
    compact: Callable[[Ending | None], Awaitable[None]]


async def take_turn(turn: TurnInput, reentered: Sequence[CallRequest] = ()) -> Ending:
    """Run one turn to its end; raises `ModelFailed` and what the journal raises.

    It begins with the calls of a step that an earlier server had begun, if there are any.
    """
    spent = turn.spent
    fingerprints: list[str] = []
    calls = reentered
    while True:
        if not calls:
            request_of = partial(_request, turn, await turn.journal.begin_step())
            asking = ask(turn.models, request_of, turn.journal, turn.pause, turn.meter)
            done, used = await asking
            turn.journal.count(used)
            spent = spent.plus(used)
            calls = await turn.journal.know_calls()
            if not calls or done.reason == "max_tokens":
                ending = _ending_of(done)
                await turn.compact(ending)
                return ending
        results = await _run_calls(turn, calls)
        if (outcome := _ends_turn(results)) is not None:
            return Ending(outcome)
        fingerprints.append(fingerprint(_interactions(calls, results)))
        if repeats_itself(fingerprints):
            return LOOPED
        if (ending := over_limit(spent, turn.limits())) is not None:
            return ending
        await turn.journal.end_step()
        await turn.compact(None)
        calls = ()


def _request(turn: TurnInput, messages: list[Message], active: ActiveModel) -> ModelRequest:
    specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in turn.tools.values())
    return ModelRequest(active.system, messages, specs, active.settings)


def _ending_of(done: AnswerDone) -> Ending:
    match done.reason:
        case "max_tokens":
            return Ending("max_tokens")
        case "end_turn" | "tool_use":
            return Ending("end_turn")
        case "content_filter" | "unknown":
            return Ending("end_turn", stop=done.reason)


# --- asking


async def ask(
    models: ModelChain,
    request_of: Callable[[ActiveModel], ModelRequest],
    journal: GrowingAnswer,
    pause: Pause,
    meter: UsageMeter,
) -> tuple[AnswerDone, Used]:
    """Ask one after the other until there is a whole answer; raises the last `ModelFailed`."""
    while True:
        asking = _Asking(models.current, request_of(models.current), journal, meter)
        try:
            return await asking.insist(pause)
        except ModelFailed as exc:
            if not await models.fall_back(exc):
                raise
            asking.forfeit()


class _Asking:
    """One question to one model, and what is set aside for it."""

    def __init__(
        self, active: ActiveModel, request: ModelRequest, journal: GrowingAnswer, meter: UsageMeter
    ) -> None:
        self._active = active
        self._request = request
        self._journal = journal
        self._meter = meter
        self._reservation = ""

    async def insist(self, pause: Pause) -> tuple[AnswerDone, Used]:
        """Ask until there is a whole answer, or until asking again makes no sense."""
        attempt = 0
        while True:
            await self._reserve()
            heard = ReceivedAnswer(self._journal.grow)
            try:
                done = await heard.listen(self._active.model.stream(self._request))
            except ModelFailed as exc:
                failure, delay_s = exc, retry_delay_s(exc, attempt)
                if delay_s is None:
                    raise
            else:
                used = used_of(done.usage, self._active.price, self._request, heard.size)
                self._meter.settle(self._reservation, used)
                return done, used
            if heard.size:  # It was paid for. Who was only refused asks again with the same.
                self.forfeit()
            attempt += 1
            await self._journal.clear()
            await pause(delay_s, failure)

    async def _reserve(self) -> None:
        if not self._reservation:
            estimate = estimate_request(self._request, self._active.price)
            self._reservation = await self._meter.reserve(estimate)

    def forfeit(self) -> None:
        if self._reservation:
            self._meter.forfeit(self._reservation)
            self._reservation = ""


@dataclass(slots=True)
class ReceivedAnswer:
    """An answer while it comes: passed on, and counted."""

    grow: Callable[[Growth], None]
    size: int = 0  # In bytes.

    async def listen(self, stream: AsyncGenerator[ModelEvent]) -> AnswerDone:
        """Until its end; raises `ModelFailed`."""
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, AnswerDone):
                    return event
                if not isinstance(event, CallStarted):
                    self.size += len(event.text.encode())
                self.grow(event)
        raise ModelFailed("Answer cut off", "The model's answer ended before it was complete.")


# --- calling


async def _run_calls(turn: TurnInput, calls: Sequence[CallRequest]) -> list[CallResult]:
    """Run them in order, neighbours that allow it side by side; a result may end the turn."""
    results: list[CallResult] = []
    for batch in _batches(calls, turn.tools):
        if len(batch) == 1:
            results.append(await _run_call(turn, batch[0]))
        else:
            results += await _run_together(turn, batch)
        if _ends_turn(results) is not None:
            break
    return results


def _ends_turn(results: Sequence[CallResult]) -> Outcome | None:
    return next((result.ends_turn for result in results if result.ends_turn), None)


def _batches(
    calls: Sequence[CallRequest], tools: Mapping[str, Tool]
) -> Iterator[list[CallRequest]]:
    batch: list[CallRequest] = []
    for call in calls:
        tool = tools.get(call.name)
        if tool is not None and tool.parallel:
            batch.append(call)
            continue
        if batch:
            yield batch
            batch = []
        yield [call]
    if batch:
        yield batch


async def _run_together(turn: TurnInput, batch: list[CallRequest]) -> list[CallResult]:
    room = asyncio.Semaphore(PARALLEL_MAX)

    async def run(call: CallRequest) -> CallResult:
        async with room:
            return await _run_call(turn, call)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call), name=f"call {call.id}") for call in batch]
    except ExceptionGroup as exc:
        raise exc.exceptions[0] from exc  # All have one cause: the journal cannot write.
    return [task.result() for task in tasks]


async def _run_call(turn: TurnInput, call: CallRequest) -> CallResult:
    known = turn.journal.known_results().get(call.id)
    if known is not None:
        return known
    plan = await turn.admit(_tool_of(turn, call), call)
    if isinstance(plan, CallResult):
        result = plan
    else:
        await turn.journal.start_call(call)
        result = await _effect(plan, turn.watch(call))
    await turn.journal.answer_call(call, result)
    return result


def _tool_of(turn: TurnInput, call: CallRequest) -> Tool | CallResult:
    """The tool that is called, or what the model reads because there is none, or no call."""
    tool = turn.tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(turn.tools)) or "none"
        return CallResult(f"There is no tool {call.name!r}. Tools: {known}.", is_error=True)
    return CallResult(BAD_ARGUMENTS, is_error=True) if call.arguments is None else tool


async def _effect(plan: CallPlan, watch: Watch) -> CallResult:
    try:
        result = await plan.run(watch)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        result = CallResult("The tool was cancelled from inside.", is_error=True)
    except Exception as exc:  # boundary: what a tool raises is for the model to read
        result = CallResult(f"{type(exc).__name__}: {exc}", is_error=True)
    if len(result.content) > RESULT_CHARS_MAX:
        result = replace(result, content=result.content[:RESULT_CHARS_MAX] + RESULT_CUT)
    return result


def _interactions(calls: Sequence[CallRequest], results: Sequence[CallResult]) -> list[CallOutcome]:
    return [
        CallOutcome(call.name, call.input, result.content)
        for call, result in zip(calls, results, strict=False)
    ]


def parse_arguments(text: str) -> dict[str, Json] | None:
    """The arguments of a call, or None if the model did not write a JSON object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return cast("dict[str, Json]", value) if isinstance(value, dict) else None
