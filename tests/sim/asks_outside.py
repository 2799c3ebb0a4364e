"""Tools that need permission, a tool that asks questions, and the answers people gave.

`AskWorld` records what people did, outside of any crash; each call that acts is compared with it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from culm.tools.base import CallPlan, CallRequest, CallResult, QuestionPlan, ResolvedAction, Watch
from culm.wire.asks import (
    Choice,
    Question,
    QuestionRequest,
    QuestionResponse,
)
from culm.wire.codec import decode
from tests.sim.runs_disk import Life
from tests.sim.runs_outside import SimTool, World

ASKING = ("edit", "fetch", "fetch", "drift", "drift", "question")
Answer = Literal["allow", "allow_session", "allow_workspace", "deny", "answer", "cancel"]
STATES: dict[Answer, str] = {
    "allow": "allowed",
    "allow_session": "allowed",
    "allow_workspace": "allowed",
    "deny": "denied",
    "answer": "answered",
    "cancel": "canceled",
}


@dataclass(eq=False)
class AnswerAttempt:
    """An attempt to answer an ask."""

    ask_id: str
    answer: Answer
    by: str
    fits: bool = True  # The digest, or the questions, are those of the ask.
    text: str = ""  # The answer to a question.
    resolved: bool | None = None  # None if the result never arrived.

    @property
    def state(self) -> str:
        return STATES[self.answer]


@dataclass
class Skip:
    """A period of skip mode, in which calls run without an ask."""

    session_id: str  # Empty: everywhere.
    life: int
    ended_s: float | None = None


@dataclass
class AskWorld(World):
    """Everything outside of a server that asks."""

    calls_share: float = 0.85
    given: dict[str, list[AnswerAttempt]] = field(  # By the id of the ask.
        default_factory=lambda: defaultdict(list)
    )
    skips: list[Skip] = field(default_factory=list[Skip])
    revoked: set[str] = field(default_factory=set[str])  # Grants, also if only tried.
    let_through: set[str] = field(default_factory=set[str])  # Calls that need no ask.
    answers: dict[str, str] = field(default_factory=dict[str, str])  # Received answers by token.
    version: int = 0  # What a call would do changes with it.

    def tool_names(self) -> list[str]:
        return [*super().tool_names(), *ASKING * 2]

    def is_skipped(self, session_id: str, life: Life) -> bool:
        """Return True if skip mode may apply to a call now."""
        now_s = self.loop.time()
        return any(
            skip.life == life.number
            and skip.session_id in ("", session_id)
            and (skip.ended_s is None or now_s <= skip.ended_s)
            for skip in self.skips
        )


@dataclass
class AskTool(SimTool):
    """Acts only with permission."""

    has_grains: bool = True
    drifts: bool = False  # Its action changes with the version of the world.

    @property
    def asks(self) -> AskWorld:
        assert isinstance(self.world, AskWorld)
        return self.world

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        world, dice = self.asks, self.world.random
        if self.life.dead:
            raise asyncio.CancelledError
        await asyncio.sleep(dice.choice((0, 0, 0.0001, 0.01)))
        if world.faulty and dice.random() < 0.03:
            return CallResult("it cannot be done", is_error=True)
        assert call.arguments is not None
        token = str(call.arguments["token"])
        action = ResolvedAction(
            self.name,
            "do",
            resolved={"token": token, "version": world.version if self.drifts else 0},
            coverage=(f"{self.name}:{int(token[1:]) % 2}",) if self.has_grains else (),
        )
        if unasked := self._goes_unasked(action, call):
            world.let_through.add(token)
        return CallPlan(action, lambda watch: self._act(call, action, watch, unasked=unasked))

    def _goes_unasked(self, action: ResolvedAction, call: CallRequest) -> bool:
        """Decide in the same step as the gate, which is called next."""
        if self.asks.is_skipped(call.session_id, self.life):
            return True
        approve = self.server.file.rows("SELECT approve FROM runs WHERE id = ?", call.run_id)
        if approve[0][0] == '"allow"':
            return True
        rows = self.server.file.rows(
            """SELECT grains FROM grants WHERE tool = ? AND action = ?
            AND (scope = 'workspace' OR session_id = ?)""",
            *(action.tool, action.name, call.session_id),
        )
        granted = {grain for row in rows for grain in decode(row[0], list[str])}
        return bool(action.coverage) and set(action.coverage) <= granted

    async def _act(
        self, call: CallRequest, action: ResolvedAction, watch: Watch, *, unasked: bool
    ) -> CallResult:
        if not self.life.dead and not unasked:
            self._check_allowed(call, action)
        return await self.run(call, watch)

    def _check_allowed(self, call: CallRequest, action: ResolvedAction) -> None:
        """Check that a person allowed exactly this action."""
        world = self.asks
        rows = self.server.file.rows(
            "SELECT id, state, digest FROM asks WHERE message_id = ? AND call_id = ?",
            *(call.message_id, call.id),
        )
        allowed = {row["id"] for row in rows if (row["state"], row["digest"]) == _allowed(action)}
        by_whom = [g for i in allowed for g in world.given[i] if g.fits and g.state == "allowed"]
        world.expect(bool(allowed), "it acts, and nothing allows it", call, list(map(tuple, rows)))
        world.expect(bool(by_whom), "it acts, and nobody allowed it", call)


def _allowed(action: ResolvedAction) -> tuple[str, str]:
    return "allowed", action.digest


@dataclass
class AskerTool(SimTool):
    """Asks a person a question and returns the answer to the model."""

    async def prepare(self, call: CallRequest) -> QuestionPlan:
        assert call.arguments is not None
        token = str(call.arguments["token"])
        choices = [Choice("a", "A"), Choice("b", "B")]
        count = 1 + int(token[1:]) % 2
        questions = [
            Question("", "single_choice", f"which {n}?", "", "", choices) for n in range(count)
        ]
        return QuestionPlan(questions, lambda asked, answers: self._answered(token, asked, answers))

    def _answered(
        self, token: str, asked: QuestionRequest, answers: Sequence[QuestionResponse]
    ) -> CallResult:
        world = cast("AskWorld", self.world)
        text = " ".join(answer.fill_in_text for answer in answers)
        same = world.answers.setdefault(token, text) == text  # A crash may have lost the result.
        world.expect(same, "one question, two answers", token)
        known = {question.id for question in asked.questions}
        fits = {answer.request_id for answer in answers} <= known
        world.expect(fits, "answers to other questions", asked, answers)
        given = [one for one in world.given[asked.id] if one.fits and one.text == text]
        world.expect(bool(given), "an answer that nobody gave", asked, text)
        rows = self.server.file.rows("SELECT state FROM asks WHERE id = ?", asked.id)
        stored = self.life.dead or all(row[0] == "answered" for row in rows)
        world.expect(stored, "an answer counts, and is not stored", asked)
        return CallResult(f"answered: {text}")
