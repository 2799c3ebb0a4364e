"""One turn: ask the model, run its calls, and repeat until it makes none.

Uses a model, tools, a journal and limits only, without HTTP, SQL or WebSocket, so that a fleet
worker runs the same loop. Cancelling the task ends the turn at once. The owner of the task stores
the end, so nothing here cleans up. Summaries of long conversations are requested here, too.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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
from culm.run.context import SUMMARY_SYSTEM, summary_prompt, user_message
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
from culm.wire.messages import Message, Session
from culm.wire.runs import Ending, Limits, Outcome, Used

PARALLEL_MAX = 5
Growth = TextDelta | ReasoningDelta | CallStarted | CallDelta
# Waits for a number of seconds after a failure.
Pause = Callable[[float, ModelFailed], Awaitable[None]]
RESULT_CHARS_MAX = 1 << 20  # Models read no more, and every client receives it.
RESULT_CUT = "\n[The rest of this result was cut off.]"
BAD_ARGUMENTS = "The arguments of this call are not a JSON object. Repeat it with valid ones."


class GrowingAnswer(Protocol):
    """An answer that is being received."""

    def grow(self, event: Growth) -> None:
        """Append to the answer, visibly to all clients."""
        ...

    async def clear(self) -> None:
        """Discard the answer before the request is repeated."""
        ...


class LoopJournal(GrowingAnswer, Protocol):
    """The record of a turn. A write is durable when its await returns."""

    async def begin_step(self) -> list[Message]:
        """Admit waiting runs and open an empty answer; return the messages that the model reads."""
        ...

    async def record_calls(self) -> list[CallRequest]:
        """Complete the answer and return its calls, each with its whole input."""
        ...

    def known_results(self) -> Mapping[str, CallResult]:
        """Return the results that an earlier server has stored for this step."""
        ...

    async def start_call(self, call: CallRequest) -> None: ...

    async def answer_call(self, call: CallRequest, result: CallResult) -> None: ...

    def count(self, used: Used) -> None:
        """Record the usage of the answer; stored with the end of the step."""
        ...

    async def end_step(self) -> None:
        """End the step: all calls have results, and another step follows."""
        ...


class SummaryJournal(GrowingAnswer, Protocol):
    @property
    def session(self) -> Session: ...

    async def begin_summary(self) -> Sequence[Message]: ...

    async def end_summary(self, used: Used, prompt: str) -> None: ...


class UsageMeter(Protocol):
    """The shared budget of a tree of runs."""

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Reserve the estimate for one request; raises `BudgetReached`.

        A reservation that is never settled, because its answer was cut off, stays charged.
        """
        ...

    def settle(self, reservation: str, used: Used) -> None: ...

    def forfeit(self, reservation: str) -> None:
        """Give up a request that was cut off. Its usage is unknown, so it stays charged."""
        ...


class ModelChain(Protocol):
    """The model in use and its fallbacks."""

    @property
    def current(self) -> "ActiveModel": ...

    async def fall_back(self, failure: ModelFailed) -> bool:
        """Switch to the next model, with an empty answer; return False if there is none."""
        ...


class ActiveModel(Struct, frozen=True):
    """A model with its settings and its system prompt."""

    model: LanguageModel
    settings: SelectedModel
    price: Price
    system: str


class TurnInput(Struct, frozen=True):
    """Everything one turn needs."""

    models: ModelChain
    tools: Mapping[str, Tool]
    # Decides whether a call may run, and with which plan; may have to ask a person.
    admit: Callable[[Tool | CallResult, CallRequest], Awaitable[CallPlan | CallResult]]
    watch: Callable[[CallRequest], Watch]  # Receives the output of a call.
    journal: LoopJournal
    limits: Callable[[], Limits]  # Read at every step, as they may change during the turn.
    meter: UsageMeter
    pause: Pause
    spent: RunSpending  # Spent before this turn began or continued.
    # Called between steps: replaces the history with a summary if the context is nearly full. With
    # an ending the turn is over; without one it continues from the summary.
    compact: Callable[[Ending | None], Awaitable[None]]


async def take_turn(turn: TurnInput, reentered: Sequence[CallRequest] = ()) -> Ending:
    """Run one turn to its end; raises `ModelFailed` and the errors of the journal.

    Starts with the calls of a step that an earlier server began, if there are any.
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
            calls = await turn.journal.record_calls()
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


# --- asking the model


async def ask(
    models: ModelChain,
    request_of: Callable[[ActiveModel], ModelRequest],
    journal: GrowingAnswer,
    pause: Pause,
    meter: UsageMeter,
) -> tuple[AnswerDone, Used]:
    """Ask the models of the chain in order until one answers; raises the last `ModelFailed`."""
    while True:
        request = _PendingRequest(models.current, request_of(models.current), journal, meter)
        try:
            return await request.run(pause)
        except ModelFailed as exc:
            if not await models.fall_back(exc):
                raise
            request.forfeit()


class _PendingRequest:
    """One request to one model, and its reservation."""

    def __init__(
        self, active: ActiveModel, request: ModelRequest, journal: GrowingAnswer, meter: UsageMeter
    ) -> None:
        self._active = active
        self._request = request
        self._journal = journal
        self._meter = meter
        self._reservation = ""

    async def run(self, pause: Pause) -> tuple[AnswerDone, Used]:
        """Repeat the request until there is a whole answer or a retry is pointless."""
        attempt = 0
        while True:
            await self._reserve()
            received = ReceivedAnswer(self._journal.grow)
            try:
                done = await received.receive(self._active.model.stream(self._request))
            except ModelFailed as exc:
                delay_s = retry_delay_s(exc, attempt)
                if delay_s is None:
                    raise
                failure = exc
            else:
                used = used_of(done.usage, self._active.price, self._request, received.size)
                self._meter.settle(self._reservation, used)
                return done, used
            # A partial answer is charged. A refused request keeps its reservation.
            if received.size:
                self.forfeit()
            attempt += 1
            await self._journal.clear()
            await pause(delay_s, failure)
            del failure  # Its traceback refers to this frame and so to the whole turn.

    async def _reserve(self) -> None:
        if not self._reservation:
            estimate = estimate_request(self._request, self._active.price)
            self._reservation = await self._meter.reserve(estimate)

    def forfeit(self) -> None:
        if self._reservation:
            self._meter.forfeit(self._reservation)
            self._reservation = ""


class ReceivedAnswer(Struct):
    """Receives an answer: forwards its events and counts their bytes."""

    grow: Callable[[Growth], None]
    size: int = 0  # In bytes.

    async def receive(self, stream: AsyncGenerator[ModelEvent]) -> AnswerDone:
        """Receive to the end; raises `ModelFailed`."""
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, AnswerDone):
                    return event
                if not isinstance(event, CallStarted):
                    self.size += len(event.text.encode())
                self.grow(event)
        raise ModelFailed("Answer cut off", "The model's answer ended before it was complete.")


# --- summaries


async def summarize(
    models: ModelChain, journal: SummaryJournal, pause: Pause, meter: UsageMeter, prompt: str = ""
) -> None:
    """Replace the history with a summary. With `prompt`, the turn continues from there."""
    session = journal.session
    history = await journal.begin_summary()
    question = user_message(session.id, summary_prompt(session.todos))

    def request_of(active: ActiveModel) -> ModelRequest:
        return ModelRequest(SUMMARY_SYSTEM, [*history, question], (), active.settings)

    _, used = await ask(models, request_of, journal, pause, meter)
    await journal.end_summary(used, prompt)


# --- calls


async def _run_calls(turn: TurnInput, calls: Sequence[CallRequest]) -> list[CallResult]:
    """Run the calls in order, adjacent parallel ones together. A result may end the turn."""
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
        raise exc.exceptions[0] from exc  # They have one cause: the journal cannot write.
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
    """Return the tool, or a result for the model if the tool or valid arguments are missing."""
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
    except Exception as exc:  # boundary: the model reads the errors of a tool
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
    """Return the arguments of a call, or None if they are not a JSON object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return cast("dict[str, Json]", value) if isinstance(value, dict) else None
