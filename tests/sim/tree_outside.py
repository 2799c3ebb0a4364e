"""The random model and the tools of agents, with records of their calls.

They are used by runs of the server and of workers; `Asker` identifies the run.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ModelRequest,
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
    ResolvedAction,
    free_plan,
)
from culm.wire.asks import Question, QuestionRequest, QuestionResponse
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy
from tests.sim.runs_outside import (
    COSTS_MAX,
    NEARLY_FULL,
    Step,
    calls_and_results,
    draw_failure,
)
from tests.sim.tree_world import Asked, Effect, TreeWorld

STEPS = 4  # The maximum of steps with tool calls.
AGENTS_MAX = 16  # The maximum of agents in one world.
PAUSES_S = (0, 0, 0.0001, 0.02, 0.3, 2.0)


@dataclass(frozen=True)
class Asker:
    """The run that asks a model or calls a tool."""

    life: int
    run_id: str
    depth: int
    is_alive: Callable[[], bool]
    paid_by: Callable[[str], Sequence[str]]


class TreeModel:
    """A model with random answers."""

    def __init__(self, world: TreeWorld, find_asker: Callable[[str], Asker]) -> None:
        self._world = world
        self._find_asker = find_asker  # By the session.

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        if request.system == TITLE_SYSTEM:
            session_id = request.messages[0].session_id
            of_agent = self._world.rows("SELECT 1 FROM agents WHERE session_id = ?", session_id)
            self._world.expect(not of_agent, "EXC-22: an agent's title is asked for:", session_id)
            yield TextDelta("a title")
            yield AnswerDone("end_turn")
            return
        world = self._world
        asked = self._ask(request)
        is_summary = request.system == SUMMARY_SYSTEM
        names = {tool.name for tool in request.tools}
        try:
            for step in _draw(world, asked, names, is_summary=is_summary):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float | int):
                    await asyncio.sleep(step)
                    continue
                asked.is_done = isinstance(step, AnswerDone)
                if asked.is_done and not asked.depth:
                    asked.is_reported = True  # In the server it is reported at once.
                yield step
        finally:
            world.finish(asked)

    def _ask(self, request: ModelRequest) -> Asked:
        world, session_id = self._world, request.messages[0].session_id
        asker = self._find_asker(session_id)
        world.expect(asker.run_id, "asked before it was active:", session_id)
        paid_by = asker.paid_by(asker.run_id)
        asked = Asked(asker.run_id, session_id, asker.life, asker.depth, paid_by)
        world.begin(asked)
        calls, results = calls_and_results(request)
        world.expect(calls == results, "INV-82: calls and results differ", calls, results)
        return asked


def _draw(world: TreeWorld, asked: Asked, names: set[str], *, is_summary: bool) -> list[Step]:
    dice = world.dice
    plan: list[Step] = [dice.choice(PAUSES_S), TextDelta("so "), dice.choice(PAUSES_S)]
    if world.chance(0.06):
        return [*plan, *draw_failure(dice)]
    before = [one for one in world.asked if one.run_id == asked.run_id]
    reason = "end_turn"
    if not is_summary and len(before) <= STEPS and dice.random() < 0.75:
        for key in range(dice.choice((1, 1, 1, 2, 3))):
            plan += _call(world, asked, names, key)
        reason = "tool_use"
    else:
        plan += [TextDelta("it is done"), dice.choice(PAUSES_S)]
    usage = None
    if dice.random() < 0.85:
        n = len(before)
        asked.cost = 2.0**n if n < COSTS_MAX else 0.0
        is_full = not is_summary and dice.random() < 0.03
        asked.tokens = NEARLY_FULL if is_full else dice.randint(300, 1500)
        usage = TokenUsage(asked.tokens - 100, 100, cost=asked.cost)
    return [*plan, AnswerDone(reason, usage)]


def _call(world: TreeWorld, asked: Asked, names: set[str], key: int) -> list[Step]:
    """Draw a call of an available tool."""
    dice, token = world.dice, f"t{world.number()}"
    known = [row["id"] for row in world.rows("SELECT id FROM agents ORDER BY no DESC")]
    other = dice.choice(known[:5]) if known and dice.random() < 0.9 else "nobody"
    menu: list[tuple[str, dict[str, Json]]] = [
        ("look", {"token": token}),
        ("edit", {"token": token}),
        ("edit", {"token": token}),
    ]
    if "question" in names:
        menu.append(("question", {"token": token}))
    if "agent" in names and len(known) < AGENTS_MAX:
        menu += [("agent", _assignments(world)) for _ in range(4)]
    if "agent_wait" in names and known:
        until = dice.choice(("all", "any", "first_error"))
        timeout_s = dice.choice((0, 1, 600))
        wanted: list[Json] = [other] if dice.random() < 0.4 else []
        menu += [
            ("agent_wait", {"agents": wanted, "until": until, "timeout_s": timeout_s}),
            ("agent_send", {"agent": other, "message": token, "wait": dice.random() < 0.4}),
            ("agent_stop", {"agents": [other]}),
            ("agent_list", {}),
        ]
    if "mail" in names and known:
        menu.append(("mail", {"action": "send", "to": other, "text": f"l{token} read this"}))
    name, arguments = dice.choice(menu)
    pause = dice.choice(PAUSES_S)
    return [CallStarted(key, token, name), pause, CallDelta(key, json.dumps(arguments))]


def _assignments(world: TreeWorld) -> dict[str, Json]:
    dice = world.dice
    assignments: list[Json] = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        one: dict[str, Json] = {"prompt": f"w{world.number()}. do a part"}
        if dice.random() < 0.25:
            one["limits"] = dice.choice(
                ({"steps": 2}, {"tokens": 2_000}, {"wall_s": 1.5}, {"wall_s": 20.0})
            )
        if dice.random() < 0.2:
            one["role"] = dice.choice(("explorer", "reviewer", "stranger"))
        assignments.append(one)
    return {"assignments": assignments, "wait": dice.random() < 0.6}


# --- the tools


@dataclass(frozen=True)
class TreeTool:
    """A tool with an effect that takes a while and may fail. It asks unless it is free."""

    world: TreeWorld
    find_asker: Callable[[str], Asker]
    name: str
    is_free: bool
    parallel: bool = False
    crash: CrashPolicy = "ask"

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.name, {"type": "object"})

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        assert call.arguments is not None
        if self.is_free:
            return free_plan(call, lambda _: self._act(call))
        action = ResolvedAction(self.name, "do", resolved={"token": call.arguments["token"]})
        return CallPlan(action, lambda _: self._act(call))

    async def _act(self, call: CallRequest) -> CallResult:
        world = self.world
        assert call.arguments is not None
        token, asker = str(call.arguments["token"]), self.find_asker(call.session_id)
        effect = Effect(token, call.session_id, asker.run_id)
        world.expect(asker.is_alive(), "somebody dead acts", effect)
        is_new = token not in {one.token for one in world.effects}
        world.expect(is_new, "EXC-9: acted twice", effect)
        world.effects.append(effect)
        if not self.is_free:
            self._check_allowed(call)
            readers = "SELECT 1 FROM agents WHERE session_id = ? AND is_read_only = 1"
            may_write = not world.rows(readers, call.session_id)
            world.expect(may_write, "a read-only agent has written:", call.session_id)
        await asyncio.sleep(world.dice.choice((0, 0, 0.001, 0.1, 1.0, 5.0)))
        if world.chance(0.05):
            raise RuntimeError("the tool broke")
        return CallResult(f"did {token}")

    def _check_allowed(self, call: CallRequest) -> None:
        """Check that a person allowed this call in time."""
        asks = self.world.rows(
            "SELECT id, state, deadline FROM asks WHERE session_id = ? AND call_id = ?",
            *(call.session_id, call.id),
        )
        for ask in asks:
            for given in self.world.given[ask["id"]]:
                in_time = not ask["deadline"] or given.at_s <= ask["deadline"] + 1
                if given.allows and in_time and ask["state"] == "allowed":
                    return
        self.world.problems.append(f"nobody allowed {call.id}: {[tuple(ask) for ask in asks]}")


@dataclass(frozen=True)
class QuestionTool:
    """Asks people something."""

    world: TreeWorld
    parallel: bool = True
    crash: CrashPolicy = "again"

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec("question", "question", {"type": "object"})

    async def prepare(self, call: CallRequest) -> QuestionPlan:
        return QuestionPlan([Question("", "free_text", "which?")], self._answered)

    def _answered(self, asked: QuestionRequest, answers: Sequence[QuestionResponse]) -> CallResult:
        """Return the answer; check that a person gave it."""
        text = " ".join(answer.fill_in_text for answer in answers)
        is_given = any(given.text == text for given in self.world.given[asked.id])
        self.world.expect(is_given, "an answer that nobody gave:", asked, text)
        return CallResult(f"answered: {text}")
