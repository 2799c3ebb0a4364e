"""The agents of one workspace, their wait states, and the turns of their runs.

Owns the state that exists only while a server runs: slots, wait states, worker processes. The runs
belong to `run/`, the rows to the store, and requests between agents to `delegation.py`.
"""

import asyncio
import logging
import math
import weakref
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Generic, TypeVar, cast

import msgspec
from msgspec.structs import replace as with_

from culm.errors import AgentNotFound, AppError, BudgetReached
from culm.fleet.executor import ApprovalUnavailable, HostCallFailed
from culm.fleet.host.caller import WorkerAsk
from culm.fleet.host.dispatch import Fleet
from culm.ids import SessionId
from culm.permission.gate import NoApprover, PendingApproval
from culm.run.journal import TurnJournal
from culm.run.limits import UsageEstimate
from culm.run.live_run import AgentDuty, LiveRun
from culm.run.rules import ending_of_error
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.store.agents import (
    StoredAgent,
    children_of,
    find_agent,
    set_agent_activity,
    set_budget,
    set_worktree,
    shown_below,
)
from culm.store.messages import conversation
from culm.store.sessions import sessions_above
from culm.subagents.agent_worktrees import AgentWorktrees, WorktreeSweeper, stored_worktree
from culm.subagents.provisioning import AgentEnvironment
from culm.subagents.replay import ReplayContext, call_of
from culm.subagents.start_policy import AgentTerms, StartRefused, allowed_tools
from culm.subagents.worker_turn import WorkerTurnResult, WorkerTurns
from culm.tools.agent_tools import AgentRequest, Delegation, ReserveBudget, ReservedBudget
from culm.tools.base import CallRequest, CallResult, QuestionPlan, ResolvedAction
from culm.tools.question import QUESTION
from culm.wire.agents import Agent, AgentDetails, RawAgent, Waiting
from culm.wire.asks import Question
from culm.wire.codec import Json, decode, encode
from culm.wire.messages import full_text
from culm.wire.runs import Ending, Limits
from culm.worktrees import describe_outcome

log = logging.getLogger(__name__)

DONE_MAX = 10_000  # Ended runs for which the changed files are remembered.
GONE = Ending("error", "The agent is gone", "Its session was deleted.")

T = TypeVar("T")


class BoundedDict(Generic[T]):
    """A dict that evicts its oldest entry when it is full."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: dict[str, T] = {}

    def find(self, name: str) -> T | None:
        return self._entries.get(name)

    def put(self, name: str, value: T) -> None:
        self._entries[name] = value
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]


class _Questions(msgspec.Struct):
    """The arguments of a host call `question`."""

    questions: list[Question]
    confirm_title: str = ""
    confirm_description: str = ""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Facts about an ended run that are not stored."""

    files: tuple[str, ...] = ()
    note: str = ""


class AgentSlots:
    """Limits how many agents of one tree work at once. First come, first served.

    An agent that waits for its children gives up its slot, so no tree can deadlock. When it resumes
    it takes a slot without waiting, so the limit can be exceeded for a moment.
    """

    def __init__(self, slots_max: int) -> None:
        self._max = slots_max
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        return self._taken >= self._max

    async def acquire(self) -> None:
        """Wait for a slot. If this is cancelled, no slot is taken."""
        if self._taken < self._max and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # It was assigned to us at the same moment.
            raise

    def reacquire(self) -> None:
        """Take a slot without waiting, for an agent that resumes."""
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        while self._waiting and self._taken < self._max:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)


class AgentTree:
    """The agents of one workspace, created with it. Implements `ReplayHost`."""

    def __init__(
        self,
        context: TurnContext,
        fleet: Fleet,
        worktrees: AgentWorktrees,
        environment: Callable[[], AgentEnvironment],
    ) -> None:
        self._context = context
        self._worktrees = worktrees
        # By the top of a tree, while any of its agents works.
        self._slots: weakref.WeakValueDictionary[str, AgentSlots] = weakref.WeakValueDictionary()
        self._waits: dict[str, list[Waiting]] = {}  # The waits of each agent, the latest last.
        self._calls_waiting: Counter[LiveRun] = Counter()  # Calls of a run that wait for agents.
        self._done = BoundedDict[FinishedRun](DONE_MAX)  # By run.
        self.sweeper = WorktreeSweeper(worktrees, context.store, context.tasks, self._live)
        self.roots: set[str] = set()  # Sessions of agents that a client started.
        self._fleet = fleet
        self._environment = environment
        self.runs: Runs | None = None
        self.delegation: Delegation | None = None
        self._turns: WorkerTurns | None = None

    def join(self, runs: Runs, delegation: Delegation) -> None:
        """Connect the tree to the runs and the delegation, which in turn need the tree."""
        self.runs, self.delegation = runs, delegation
        replay = ReplayContext(self, self._context.publish, self._note)
        self._turns = WorkerTurns(
            self._fleet, self._context.models, runs, self._environment, replay
        )

    # --- turns

    async def run_turn(self, run: LiveRun, journal: TurnJournal) -> Ending:
        """Run the turn of an agent's run; raises nothing but a cancel, which ends the worker."""
        try:
            return await self._run_turn(run, journal)
        except AppError as exc:
            return ending_of_error(exc)
        except Exception:  # boundary: a bug in one run is an error of that run only
            log.exception("run %s failed", run.id)
            return Ending("error", "Internal error", "See the server's log.")

    async def _run_turn(self, run: LiveRun, journal: TurnJournal) -> Ending:
        assert self._turns is not None, "join was called"
        await self.sweeper.begin_work(_duty(run).path)
        stored = await self._context.store.read(find_agent(run.agent_id))
        if stored is None:
            return GONE
        try:
            stored = await self._ensure_worktree(stored)
        except StartRefused as exc:
            return Ending("error", "No worktree", str(exc))
        slots = self._slots_of(run)
        async with self._waiting(run, "slot", when=slots.is_full):
            await slots.acquire()
        try:
            result = await self._turns.run_turn(run, journal, stored)
        except AppError as exc:
            result = WorkerTurnResult(ending_of_error(exc))
        finally:
            slots.release()
        try:
            done = await self._finish(stored, result.files)
        except Exception:  # boundary: the ending of a turn does not depend on its worktree
            log.exception("cannot inspect the worktree of agent %s", run.agent_id)
            done = FinishedRun(result.files, "Its worktree could not be inspected; it is kept.")
        self._done.put(run.id, done)
        return result.ending

    async def forget(self, stored: StoredAgent) -> None:
        """Clean up after the session was deleted; remove the worktree unless work is in it."""
        self.roots.discard(stored.agent.session_id)
        await self._worktrees.finish(decode(stored.terms, AgentTerms))
        self.sweeper.sweep(stored.path[:-1])

    async def _ensure_worktree(self, stored: StoredAgent) -> StoredAgent:
        """Make a new worktree for an agent whose unchanged one was removed."""
        agent, terms = stored.agent, decode(stored.terms, AgentTerms)
        if terms.worktree is None or agent.worktree:
            return stored
        await self._worktrees.clear(agent.agent_id)  # A killed server may have left one behind.
        made = await self._worktrees.make([agent.agent_id])
        kept = stored_worktree(made[agent.agent_id])
        terms = with_(terms, worktree=kept)
        unit = set_worktree(
            agent.agent_id,
            worktree=kept.workspace,
            branch=kept.branch,
            terms=encode(terms).decode(),
        )
        await asyncio.shield(self._context.store.write(unit))
        return await self.get(agent.agent_id)

    async def _finish(self, stored: StoredAgent, files: tuple[str, ...]) -> FinishedRun:
        """Determine the changed files, by git in a worktree; remove an unchanged worktree."""
        terms = decode(stored.terms, AgentTerms)
        if terms.worktree is not None and self.sweeper.has_below(stored.agent.agent_id):
            note = f"Others still work in its worktree, {terms.worktree.path}."
            return FinishedRun(files, note)
        outcome = await self.sweeper.finish(stored)
        if outcome is None:
            return FinishedRun(tuple(map(self._relative_path, files)))
        return FinishedRun(tuple(outcome.files), describe_outcome(outcome))

    def _live(self) -> Sequence[LiveRun]:
        assert self.runs is not None, "join was called"
        return self.runs.live()

    def _relative_path(self, file: str) -> str:
        """Make the path of a file in the workspace relative to it."""
        inside = PurePosixPath(file)
        path = PurePosixPath(self._context.path)
        return str(inside.relative_to(path)) if inside.is_relative_to(path) else file

    def done(self, run_id: str) -> FinishedRun:
        return self._done.find(run_id) or FinishedRun()

    def _slots_of(self, run: LiveRun) -> AgentSlots:
        """Return the slots that all agents below the same top share."""
        top = _duty(run).path[0]
        return self._slots.setdefault(top, AgentSlots(self._context.settings.agents_at_once))

    @asynccontextmanager
    async def waiting_for_agents(self, run: LiveRun) -> AsyncGenerator[None]:
        """Mark a run as waiting for agents; an agent's run gives up its slot meanwhile."""
        if run.duty is None:
            yield
            return
        slots = self._slots_of(run)
        async with self._waiting(run, "agents"):
            self._calls_waiting[run] += 1
            if self._calls_waiting[run] == 1:  # Parallel calls of a run share its one slot.
                slots.release()
            try:
                yield
            finally:
                self._calls_waiting[run] -= 1
                if not self._calls_waiting[run]:
                    del self._calls_waiting[run]
                    slots.reacquire()

    # --- wait states

    @asynccontextmanager
    async def _waiting(
        self, run: LiveRun, reason: Waiting, *, when: bool = True
    ) -> AsyncGenerator[None]:
        if not when:
            yield
            return
        waits = self._waits.setdefault(run.agent_id, [])
        waits.append(reason)
        self._note(run)
        try:
            yield
        finally:
            waits.remove(reason)
            if not waits:
                self._waits.pop(run.agent_id, None)
            self._note(run)

    def _note(self, run: LiveRun) -> None:
        """Store and publish the agent's wait state and process id."""
        waits = self._waits.get(run.agent_id)
        waiting_for: Waiting = waits[-1] if waits else ""
        if run.stop is None:
            unit = set_agent_activity(run.agent_id, waiting_for=waiting_for, pid=run.pid)
            self._context.store.write(unit)

    # --- requests of workers to their host

    async def decide(self, run: LiveRun, message_id: str, ask: WorkerAsk) -> bool:
        duty, body = _duty(run), ask.body
        call = call_of(run, _text(body, "tool_call_id"), ask.tool_name, message_id)
        grains = body.get("grains")
        action = ResolvedAction(
            tool=ask.tool_name,
            name=ask.permission,
            description=ask.question,
            path=_text(body, "path"),
            params=body.get("params"),
            coverage=tuple(map(str, cast("list[Json]", grains)))
            if isinstance(grains, list)
            else (),
        )
        pending = PendingApproval(
            call,
            action,
            digest=_text(body, "digest"),
            why=_text(body, "why"),
            deadline=math.ceil(ask.deadline_s or 0),
            path=duty.path,
        )
        approval = run.asked.approval
        try:
            async with self._waiting(run, "ask"):
                return await self._context.gate.allow_agent(pending, approval, duty.above)
        except NoApprover as exc:
            raise ApprovalUnavailable(str(exc)) from exc

    def on_allowed(self, run: LiveRun, call_id: str, by: str) -> None:
        """Publish that the worker's rules allowed a call without an approval request."""
        self._context.gate.notify_allowed(call_of(run, call_id, ""), by)

    async def carry_out(self, run: LiveRun, call: CallRequest, args: Mapping[str, Json]) -> Json:
        try:
            match args.get("op"):
                case "reserve":
                    return await self._reserve(run, msgspec.convert(args, ReserveBudget))
                case "question":
                    return await self._ask_people(run, call, msgspec.convert(args, _Questions))
                case _:
                    request = msgspec.convert(args, AgentRequest)
        except msgspec.ValidationError as exc:
            raise HostCallFailed(f"invalid host call: {exc}") from exc
        assert self.delegation is not None, "join was called"
        result = await self.delegation.do(call, request, lambda _: None)
        return {
            "content": result.content,
            "is_error": result.is_error,
            "metadata": result.metadata,
        }

    async def _reserve(self, run: LiveRun, wanted: ReserveBudget) -> Json:
        try:
            reservation = await run.account.reserve(UsageEstimate(wanted.tokens, wanted.cost))
        except BudgetReached as exc:
            return msgspec.to_builtins(ReservedBudget(refused=exc.message))
        return msgspec.to_builtins(ReservedBudget(id=reservation))

    async def _ask_people(self, run: LiveRun, call: CallRequest, asked: _Questions) -> Json:
        if not await self._may_ask(run):
            raise HostCallFailed(f"there is no tool {QUESTION!r} for this agent")
        inquiry = QuestionPlan(
            asked.questions,
            lambda _request, _responses: CallResult(""),  # The worker builds the result itself.
            asked.confirm_title,
            asked.confirm_description,
        )
        async with self._waiting(run, "question"):
            answered = await self._context.gate.ask_people(
                inquiry, call, run.asked.approval, _duty(run).path
            )
        if isinstance(answered, CallResult):
            if answered.ends_turn is None:
                raise HostCallFailed(answered.content)
            return {"declined": answered.content}
        request, responses = answered
        return msgspec.to_builtins({"request": request, "responses": list(responses)})

    async def _may_ask(self, run: LiveRun) -> bool:
        """Check that the agent has the tool; as with requests, the worker is not trusted."""
        terms = decode((await self.get(run.agent_id)).terms, AgentTerms)
        has_tool = QUESTION in allowed_tools(self._context.tools(), terms)
        return has_tool and not run.asked.approval.headless

    # --- queries and budgets

    async def get(self, agent_id: str) -> StoredAgent:
        stored = await self._context.store.read(find_agent(agent_id))
        if stored is None:
            raise AgentNotFound(agent_id)
        return stored

    async def list(self, agent_id: str = "") -> list[RawAgent]:
        """List all agents, or those below one, in the order they were started, as JSON."""
        return await self._context.store.read(shown_below(agent_id))

    async def details(self, agent_id: str) -> AgentDetails:
        stored = await self.get(agent_id)
        agent = stored.agent
        children = await self._context.store.read(children_of(agent.agent_id))
        found = await self._context.store.read(conversation(agent.session_id))
        messages = () if found is None else found[1]
        users = [message for message in messages if message.role == "user"]
        answers = [message for message in messages if message.role == "assistant"]
        return AgentDetails(
            agent=agent,
            path=list(stored.path),
            children=children,
            assignment=full_text(users[0].parts) if users else "",
            result=full_text(answers[-1].parts) if answers else "",
        )

    async def children(self, agent_id: str) -> Sequence[Agent]:
        return await self._context.store.read(children_of(agent_id))

    async def sessions_above(self, session_id: SessionId) -> tuple[SessionId, ...]:
        """List the ancestors of a session, from the top."""
        return tuple(reversed(await self._context.store.read(sessions_above(session_id))))

    def has_session(self, session_id: str) -> bool:
        """Return True if the session belongs to an agent, not to people."""
        return "$$" in session_id or session_id in self.roots

    async def find_duty(self, agent_id: str) -> tuple[Agent, AgentDuty] | None:
        """Find an agent by its id or its session's, with the duty of a run from outside."""
        stored = await self._context.store.read(find_agent(agent_id))
        if stored is None:
            return None
        above = await self.sessions_above(stored.agent.session_id)
        return stored.agent, AgentDuty(stored.agent.agent_id, stored.path, above, is_detached=True)

    async def set_budget(self, agent_id: str, budget: Limits) -> Agent:
        """Set the budget of its current and later assignments; raises `AgentNotFound`."""
        agent = (await self.get(agent_id)).agent
        assert self.runs is not None, "join was called"
        for run in self.runs.line(agent.session_id):
            if run.agent_id == agent.agent_id:
                self.runs.set_limits(run, budget)
        return await asyncio.shield(self._context.store.write(set_budget(agent.agent_id, budget)))


def _duty(run: LiveRun) -> AgentDuty:
    assert run.duty is not None, "only runs of agents get here"
    return run.duty


def _text(body: Mapping[str, Json], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""
