"""The world outside of the server: a model, tools, and records that survive a crash.

Questions and effects are recorded here and compared with the final state. Immediate errors (a
question asked twice, an effect too early) are recorded as they happen.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from culm.errors import ModelFailed
from culm.ids import SessionId
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenUsage,
    ToolSpec,
)
from culm.run.context import SUMMARY_SYSTEM, TITLE_SYSTEM
from culm.tools.base import (
    CallPlan,
    CallRequest,
    CallResult,
    QuestionPlan,
    Watch,
    free_plan,
)
from culm.wire.codec import encode
from culm.wire.messages import ToolCallPart, ToolResultPart
from culm.wire.runs import CrashPolicy, Limits
from tests.sim.loop import SimLoop
from tests.sim.runs_disk import Killed, Life, SimFile

WINDOW = 100_000  # Tokens the model's context holds ...
NEARLY_FULL = 90_000  # ... and the usage that makes it nearly full.
TITLE_COST = 2.0**50  # Unique: the cost of a session shows its number of titles.
COSTS_MAX = 48  # Each answer costs another power of two, so a sum identifies its answers.


@dataclass(eq=False)
class Question:
    """One call of the model."""

    n: int
    life: int
    run_id: str
    session_id: str
    kind: Literal["turn", "summary", "title"]
    key: bytes  # Equal for equal questions.
    read: str  # All text in it.
    text: str = ""  # Streamed so far.
    cost: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    full: bool = False  # It reported a nearly full context: a summary follows.
    calls: dict[str, str] = field(default_factory=dict[str, str])  # Token → complete input.
    state: Literal["open", "done", "transient", "broken"] = "open"
    reason: StopReason | None = None


@dataclass(frozen=True)
class Effect:
    token: str
    run_id: str
    life: int


@dataclass
class Sent:
    """A prompt that a client tried to send."""

    token: str
    session_id: SessionId
    given: str
    text: str
    limits: Limits | None = None
    answered: str = ""  # Its run id, if an answer arrived.
    approve: Literal["allow", "deny"] | None = None  # The approval policy of the caller.
    interactive: bool = False  # A person is present.


@dataclass
class World:
    """Everything outside of the server."""

    loop: SimLoop
    sent: dict[str, Sent] = field(default_factory=dict[str, Sent])  # By token.
    questions: list[Question] = field(default_factory=list[Question])
    effects: list[Effect] = field(default_factory=list[Effect])
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # Of calls → the run's id.
    outputs: dict[str, str] = field(default_factory=dict[str, str])  # Sent of calls, by token.
    deleted: set[str] = field(default_factory=set[str])  # Sessions, also if only tried.
    sessions: list[SessionId] = field(default_factory=list[SessionId])
    tried: set[str] = field(default_factory=set[str])  # Runs that a cancel may have covered.
    covered: set[str] = field(default_factory=set[str])  # Runs that an answered cancel saw live.
    sealed: set[str] = field(default_factory=set[str])  # The covered runs that it marked.
    cancels: Counter[str] = field(default_factory=Counter[str])  # Cancels that covered a run.
    ordered: set[str] = field(default_factory=set[str])  # Reordered sessions.
    costs: Counter[str] = field(default_factory=Counter[str])  # Questions by session.
    cancel_results: dict[str, str] = field(default_factory=dict[str, str])  # By run.
    problems: list[str] = field(default_factory=list[str])
    store_failed: bool = False  # At any time.
    faulty: bool = True  # Models and tools misbehave now and then.
    stubborn: bool = False  # A tool ignores its cancel.
    calls_share: float = 0.6  # The share of answers with tool calls.
    reentered: dict[str, set[int]] = field(  # Runs that waited for a person, and the lives that
        default_factory=lambda: defaultdict(set)  # took them on.
    )
    lacked_model: bool = False  # At any time.
    count: int = 0

    @property
    def random(self) -> random.Random:
        return self.loop.random

    def number(self) -> int:
        self.count += 1
        return self.count

    def expect(self, holds: bool, what: str, *about: object) -> None:  # noqa: FBT001
        """Record a violation, in places where an assertion would be swallowed."""
        if not holds:
            self.problems.append(f"at {self.loop.time():.4f}: {what} {about or ''}")

    def on_problem(self, _: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            self.problems.append(str(context))

    def tool_names(self) -> list[str]:
        """Names of the tools that the model calls."""
        names = ["look", "look", "write", "send", "nothing"]
        names.append("deny" if self.random.random() < 0.2 else "look")
        return names + ["stubborn"] * 3 * self.stubborn

    def cost(self, session_id: str) -> float:
        n = self.costs[session_id]
        self.costs[session_id] += 1
        return 2.0**n if n < COSTS_MAX else 0.0


# --- the model


Step = ModelEvent | float | Exception


class Asker(Protocol):
    """The parts of the server that the world uses: its store and the model script."""

    @property
    def file(self) -> SimFile: ...
    @property
    def plan(self) -> "Callable[[Question], Sequence[Step]]": ...

    def active_run(self, session_id: str) -> str: ...


class SimModel:
    """A model with random answers that records its questions."""

    def __init__(self, world: World, server: Asker, life: Life) -> None:
        self._world = world
        self._server = server
        self._life = life

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        life, world = self._life, self._world
        if life.dead:
            raise asyncio.CancelledError
        question = self._ask(request)
        if question.kind != "title":
            life.streams[question.session_id] += 1
            one = life.streams[question.session_id] == 1
            world.expect(one, "INV-32: two streams of one session", question)
        try:
            for step in self._server.plan(question):
                if isinstance(step, Exception):
                    is_transient = isinstance(step, ModelFailed) and step.transient
                    question.state = "transient" if is_transient else "broken"
                    raise step
                if isinstance(step, float | int):
                    await asyncio.sleep(step)
                    continue
                if isinstance(step, TextDelta):
                    question.text += step.text
                if isinstance(step, AnswerDone):
                    question.state, question.reason = "done", step.reason
                yield step
            if question.state == "open":
                question.state = "broken"
        finally:
            if question.kind != "title":
                life.streams[question.session_id] -= 1

    def _ask(self, request: ModelRequest) -> Question:
        world = self._world
        key = encode(request.messages) + request.system.encode()
        session_id = request.messages[0].session_id
        world.expect(not self._life.left, "a server that has left asks", session_id)
        if request.system == TITLE_SYSTEM:
            about = (world.number(), self._life.number, "", session_id)
            question = Question(*about, "title", key, "")
        else:
            name = self._server.active_run(session_id)
            world.expect(name != "", "asked before it was active", session_id)
            about = (world.number(), self._life.number, name, session_id)
            kind = "summary" if request.system == SUMMARY_SYSTEM else "turn"
            read = " ".join(str(message.parts) for message in request.messages)
            question = Question(*about, kind, key, read)
            self._check(question, request)
        world.questions.append(question)
        return question

    def _check(self, question: Question, request: ModelRequest) -> None:
        world = self._world
        world.expect(question.run_id not in world.covered, "asked after its cancel", question)
        before = [q for q in world.questions if q.run_id == question.run_id]
        same = [q for q in before if q.key == question.key]
        repeats = all(q.state == "transient" for q in same)
        world.expect(repeats, "the same question twice", question)
        went_on = question.life in world.reentered[question.run_id]
        one_life = all(q.life == question.life for q in before)
        world.expect(one_life or went_on, "asked in two lives", question)
        calls, results = calls_and_results(request)
        world.expect(calls == results, "INV-82: calls and results differ", calls, results)


def calls_and_results(request: ModelRequest) -> tuple[list[str], list[str]]:
    """The call ids of a request, and the call ids of its results."""
    parts = [part for message in request.messages for part in message.parts]
    calls = [part.data.id for part in parts if isinstance(part, ToolCallPart)]
    return calls, [part.data.tool_call_id for part in parts if isinstance(part, ToolResultPart)]


# --- the tools


@dataclass
class SimTool:
    """A tool with an effect recorded in the world; it takes a while and may fail."""

    world: World
    server: Asker
    life: Life
    name: str
    crash: CrashPolicy = "ask"
    parallel: bool = False

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.name, {"type": "object"})

    async def prepare(self, call: CallRequest) -> CallPlan | QuestionPlan | CallResult:
        return free_plan(call, lambda watch: self.run(call, watch))

    async def run(self, call: CallRequest, watch: Watch) -> CallResult:
        world, life = self.world, self.life
        if life.dead:
            raise asyncio.CancelledError
        assert call.arguments is not None
        token = str(call.arguments["token"])
        run_id = world.tokens[token]
        effect = Effect(token, run_id, life.number)
        world.expect(not life.left, "a server that has left acts", effect)
        world.expect(run_id not in world.covered, "EXC-8: a call after its cancel", effect)
        world.expect(token not in {e.token for e in world.effects}, "EXC-9: acted twice", effect)
        started = self.server.file.rows(
            "SELECT 1 FROM calls WHERE run_id = ? AND call_id = ? AND state = 'started'",
            *(run_id, call.id),
        )
        world.expect(bool(started), "acted before `started` was committed", effect)
        world.effects.append(effect)
        return await self._take_time(token, watch)

    async def _take_time(self, token: str, watch: Watch) -> CallResult:
        world = self.world
        delay_s = world.random.choice((0, 0, 0.0001, 0.05, 1.0, 7.0))
        watch(f"{token} begins\n")
        try:
            await asyncio.sleep(delay_s / 2)
            watch(f"{token} goes on\n")
            await asyncio.sleep(delay_s / 2)
        except asyncio.CancelledError:
            if self.name not in ("stubborn", "deaf") or self.life.dead:
                raise
            # The `deaf` tool is abandoned before it is done.
            await asyncio.sleep(8 if self.name == "deaf" else world.random.choice((0, 0.5, 4, 8)))
            if self.life.dead:
                raise
            return CallResult(f"did not stop {token}")
        if self.name == "deny":
            return CallResult("no", is_error=True, ends_turn="denied")
        if world.faulty and world.random.random() < 0.1:
            raise RuntimeError("the tool broke")
        return CallResult(f"did {token}")


# --- answers of the model


def draw_plan(world: World, question: Question) -> list[Step]:
    """Draw a random answer."""
    dice = world.random
    before = sum(q.run_id == question.run_id for q in world.questions)
    roll = dice.random()
    pauses = dice.choice(((0,), (0, 0, 0.0001), (0, 0.01, 0.2), (0.1, 1.0)))
    plan: list[Step] = [dice.choice(pauses)]
    if world.faulty and roll < 0.08:
        return [*plan, *_text_steps(question, dice, pauses), *draw_failure(dice)]
    if world.faulty and roll < 0.1:
        return [
            *plan,
            *_text_steps(question, dice, pauses),
            90.0,
            AnswerDone("end_turn"),
        ]  # A stall.
    if question.kind == "title":
        done = AnswerDone(
            "end_turn", TokenUsage(1, 1, cost=TITLE_COST) if dice.random() < 0.5 else None
        )
        return [*plan, TextDelta(f"title {question.n}"), done]
    if dice.random() < 0.2:
        plan += [ReasoningDelta("hmm "), dice.choice(pauses), ReasoningDelta("so", "sig")]
    reason: StopReason = "end_turn"
    if question.kind == "turn" and before < 5 and dice.random() < world.calls_share:
        if dice.random() < 0.5:
            plan += _text_steps(question, dice, pauses)
        plan += _calls(world, question, pauses)
        reason = "tool_use"
    else:
        plan += _text_steps(question, dice, pauses)
    if dice.random() < 0.05:
        reason = dice.choice(("max_tokens", "unknown", "content_filter"))
    usage = None
    if dice.random() < 0.7:
        question.cost = world.cost(question.session_id)
        question.full = dice.random() < 0.08
        used = NEARLY_FULL if question.full else dice.randint(1, 99)
        question.tokens = (used, dice.randint(1, 9))
        usage = TokenUsage(*question.tokens, cost=question.cost)
    return [*plan, AnswerDone(reason, usage)]


def _text_steps(question: Question, dice: random.Random, pauses: Sequence[float]) -> list[Step]:
    steps: list[Step] = [TextDelta(f"a{question.n}:")]
    for _ in range(dice.choice((0, 1, 3, 8))):
        steps += [dice.choice(pauses), TextDelta(dice.choice((" wörd", " 🌱", " x" * 60)))]
    return steps


def _calls(world: World, question: Question, pauses: Sequence[float]) -> list[Step]:
    dice = world.random
    names = world.tool_names()
    began: list[Step] = []
    grew: list[Step] = []
    for key in range(dice.choice((1, 1, 2, 3, 7))):
        token = f"t{world.number()}"
        world.tokens[token] = question.run_id
        text = f'{{"token":"{token}"}}'
        if world.faulty and dice.random() < 0.05:
            text = text[:-1]  # Not JSON.
        question.calls[token] = text
        id_ = dice.choice((token, token, token, "", "same"))
        began += [CallStarted(key, id_, dice.choice(names)), dice.choice(pauses)]
        grew += [CallDelta(key, text[:4]), dice.choice(pauses), CallDelta(key, text[4:])]
    return [*began, *grew]


def draw_failure(dice: random.Random) -> list[Step]:
    match dice.randrange(5):
        case 0:
            return []  # The stream was cut.
        case 1:
            return [ModelFailed("Refused", "the key is not valid")]
        case 2:
            return [RuntimeError("a bug in an adapter")]
        case 3:
            return [ModelFailed("Busy", "come back", transient=True, retry_after_s=0.5)]
        case _:
            return [ModelFailed("Busy", "come back", transient=True)]
