"""The agents of one workspace: who there is, what each waits for, and the turns of their runs.

Owns what is only true while a server runs: slots, what an agent waits for, which process works for
it. Their runs are `run/`'s, their rows the store's; what agents want of each other is `office.py`.
"""

import asyncio
import logging
import math
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import cast

import msgspec
from msgspec.structs import replace as with_

from culm.errors import AgentNotFound, AppError, BudgetReached
from culm.fleet.executor import ApprovalUnavailable, HostCallFailed
from culm.fleet.host.callbacks import WorkerAsk
from culm.fleet.host.dispatch import Fleet
from culm.ids import SessionId
from culm.permission.gate import NoApprover, PendingApproval
from culm.run.journal import TurnJournal
from culm.run.limits import UsageEstimate
from culm.run.live_run import AgentDuty, LiveRun
from culm.run.rules import ending_of_error
from culm.run.runs import Runs
from culm.run.turn import World
from culm.store.agents import (
    StoredAgent,
    children_of,
    find_agent,
    note_agent,
    set_budget,
    set_worktree,
    shown_below,
)
from culm.store.messages import conversation
from culm.store.sessions import sessions_above
from culm.subagents.agent_worktrees import AgentWorktrees, stored_worktree
from culm.subagents.bounded_dict import BoundedDict
from culm.subagents.provisioning import AgentPlace
from culm.subagents.replay import ReplayContext, call_of
from culm.subagents.slots import AgentSlots
from culm.subagents.start_policy import AgentTerms, StartRefused, allowed_tools
from culm.subagents.worker_turn import WorkerTurnResult, WorkerTurns
from culm.subagents.worktree_sweeper import WorktreeSweeper
from culm.tools.agent_requests import AgentRequest, Delegation, ReserveBudget, ReservedBudget
from culm.tools.base import CallRequest, CallResult, QuestionPlan, ResolvedAction
from culm.tools.question import QUESTION
from culm.wire.agents import Agent, AgentDetails, RawAgent, Waiting
from culm.wire.asks import Question
from culm.wire.codec import Json, decode, encode
from culm.wire.endings import Ending
from culm.wire.messages import full_text
from culm.wire.runs import Limits
from culm.worktrees.worktree import describe

log = logging.getLogger(__name__)

DONE_MAX = 10_000  # Runs of which it is known which files they changed.
GONE = Ending("error", "The agent is gone", "Its session was deleted.")


class _Questions(msgspec.Struct):
    """A host call `question`."""

    questions: list[Question]
    confirm_title: str = ""
    confirm_description: str = ""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What is known of a run that has ended here, beyond what is stored."""

    files: tuple[str, ...] = ()
    note: str = ""


class AgentTree:
    """Made with its workspace. Implements `Desk`."""

    def __init__(
        self,
        world: World,
        fleet: Fleet,
        worktrees: AgentWorktrees,
        place: Callable[[], AgentPlace],
    ) -> None:
        self._world = world
        self._worktrees = worktrees
        # By the top of a tree, as long as somebody works in it.
        self._slots: weakref.WeakValueDictionary[str, AgentSlots] = weakref.WeakValueDictionary()
        self._waits: dict[str, list[Waiting]] = {}  # By agent, what it waits for, the latest last.
        self._away: Counter[LiveRun] = Counter()  # Calls of a run that wait for agents.
        self._done = BoundedDict[FinishedRun](DONE_MAX)  # By run.
        self.sweeper = WorktreeSweeper(worktrees, world.store, world.tasks, self._live)
        self.roots: set[str] = set()  # Sessions of agents that a client started.
        self._fleet = fleet
        self._place = place
        self.runs: Runs | None = None
        self.delegation: Delegation | None = None
        self._holder: WorkerTurns | None = None

    def join(self, runs: Runs, delegation: Delegation) -> None:
        """Know who accepts their runs, and who does what they want of each other."""
        self.runs, self.delegation = runs, delegation
        around = ReplayContext(self, self._world.publish, self._note)
        self._holder = WorkerTurns(self._fleet, self._world.models, runs, self._place, around)

    # --- a turn

    async def run_turn(self, run: LiveRun, journal: TurnJournal) -> Ending:
        """Hold the turn of an agent's run; only a cancel gets out of here as an exception.

        To cancel this ends its worker.
        """
        try:
            return await self._run_turn(run, journal)
        except AppError as exc:
            return ending_of_error(exc)
        except Exception:  # boundary: a bug in one run is that run's error
            log.exception("run %s failed", run.id)
            return Ending("error", "Internal error", "See the server's log.")

    async def _run_turn(self, run: LiveRun, journal: TurnJournal) -> Ending:
        assert self._holder is not None, "they were joined"
        await self.sweeper.make_way(_duty(run).path)
        stored = await self._world.store.read(find_agent(run.agent_id))
        if stored is None:
            return GONE
        try:
            stored = await self._placed(stored)
        except StartRefused as exc:
            return Ending("error", "There is nowhere to work", str(exc))
        slots = self._slots_of(run)
        async with self._waiting(run, "slot", when=slots.is_full):
            await slots.acquire()
        try:
            held = await self._holder.run_turn(run, journal, stored)
        except AppError as exc:
            held = WorkerTurnResult(ending_of_error(exc))
        finally:
            slots.leave()
        try:
            done = await self._finish(stored, held.files)
        except Exception:  # boundary: how a turn ended does not depend on its worktree
            log.exception("the worktree of agent %s cannot be looked at", run.agent_id)
            done = FinishedRun(held.files, "Its worktree could not be looked at; it is kept.")
        self._done.put(run.id, done)
        return held.ending

    async def forget(self, stored: StoredAgent) -> None:
        """Its session is deleted; its worktree goes, too, unless there is work in it."""
        self.roots.discard(stored.agent.session_id)
        await self._worktrees.finish(decode(stored.terms, AgentTerms))
        self.sweeper.sweep(stored.path[:-1])

    async def _placed(self, stored: StoredAgent) -> StoredAgent:
        """An agent whose worktree went, unchanged, gets another for its further work."""
        agent, terms = stored.agent, decode(stored.terms, AgentTerms)
        if terms.worktree is None or agent.worktree:
            return stored
        await self._worktrees.clear(agent.agent_id)  # A server was killed as it had this one made.
        made = await self._worktrees.make([agent.agent_id])
        kept = stored_worktree(made[agent.agent_id])
        terms = with_(terms, worktree=kept)
        unit = set_worktree(
            agent.agent_id,
            worktree=kept.workspace,
            branch=kept.branch,
            terms=encode(terms).decode(),
        )
        await asyncio.shield(self._world.store.write(unit))
        return await self.get(agent.agent_id)

    async def _finish(self, stored: StoredAgent, files: tuple[str, ...]) -> FinishedRun:
        """Which files were changed; of a worktree git says so, and it goes if none was."""
        terms = decode(stored.terms, AgentTerms)
        if terms.worktree is not None and self.sweeper.has_below(stored.agent.agent_id):
            note = f"Others still work in its worktree, {terms.worktree.path}."
            return FinishedRun(files, note)
        settled = await self.sweeper.finish(stored)
        if settled is None:
            return FinishedRun(tuple(map(self._seen_from_here, files)))
        return FinishedRun(tuple(settled.files), describe(settled))

    def _live(self) -> Sequence[LiveRun]:
        assert self.runs is not None, "they were joined"
        return self.runs.live()

    def _seen_from_here(self, file: str) -> str:
        """A file of the workspace by its path in it."""
        inside = PurePosixPath(file)
        path = PurePosixPath(self._world.path)
        return str(inside.relative_to(path)) if inside.is_relative_to(path) else file

    def done(self, run_id: str) -> FinishedRun:
        return self._done.find(run_id) or FinishedRun()

    def _slots_of(self, run: LiveRun) -> AgentSlots:
        """Those of all that are below one whom people talk to, or whom a client started."""
        top = _duty(run).path[0]
        return self._slots.setdefault(top, AgentSlots(self._world.settings.agents_at_once))

    @asynccontextmanager
    async def away(self, run: LiveRun) -> AsyncGenerator[None]:
        """A run waits for agents. If it is one's own, others work meanwhile."""
        if run.duty is None:
            yield
            return
        slots = self._slots_of(run)
        async with self._waiting(run, "agents"):
            self._away[run] += 1
            if self._away[run] == 1:  # Calls that are made side by side wait side by side.
                slots.leave()
            try:
                yield
            finally:
                self._away[run] -= 1
                if not self._away[run]:
                    del self._away[run]
                    slots.reacquire()

    # --- what an agent waits for

    @asynccontextmanager
    async def _waiting(
        self, run: LiveRun, what: Waiting, *, when: bool = True
    ) -> AsyncGenerator[None]:
        if not when:
            yield
            return
        waits = self._waits.setdefault(run.agent_id, [])
        waits.append(what)
        self._note(run)
        try:
            yield
        finally:
            waits.remove(what)
            if not waits:
                self._waits.pop(run.agent_id, None)
            self._note(run)

    def _note(self, run: LiveRun) -> None:
        """Let everybody know what it waits for, and which process it is."""
        waits = self._waits.get(run.agent_id)
        waiting_for: Waiting = waits[-1] if waits else ""
        if run.stop is None:
            unit = note_agent(run.agent_id, waiting_for=waiting_for, pid=run.pid())
            self._world.store.write(unit)

    # --- what a worker asks of its host

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
                return await self._world.gate.allow_agent(pending, approval, duty.above)
        except NoApprover as exc:
            raise ApprovalUnavailable(str(exc)) from exc

    def on_allowed(self, run: LiveRun, call_id: str, by: str) -> None:
        """Its rules let a call through, and nobody was asked."""
        self._world.gate.notify_allowed(call_of(run, call_id, ""), by)

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
            raise HostCallFailed(f"it cannot be read: {exc}") from exc
        assert self.delegation is not None, "they were joined"
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
            lambda _request, _responses: CallResult(""),  # The worker says what its model reads.
            asked.confirm_title,
            asked.confirm_description,
        )
        async with self._waiting(run, "question"):
            answered = await self._world.gate.ask_people(
                inquiry, call, run.asked.approval, _duty(run).path
            )
        if isinstance(answered, CallResult):
            if answered.ends_turn is None:
                raise HostCallFailed(answered.content)
            return {"declined": answered.content}
        request, responses = answered
        return msgspec.to_builtins({"request": request, "responses": list(responses)})

    async def _may_ask(self, run: LiveRun) -> bool:
        """Whether it has the tool; as with errands, a worker's word for it is not enough."""
        terms = decode((await self.get(run.agent_id)).terms, AgentTerms)
        has_tool = QUESTION in allowed_tools(self._world.tools(), terms)
        return has_tool and not run.asked.approval.headless

    # --- looking, and what people do

    async def get(self, agent_id: str) -> StoredAgent:
        stored = await self._world.store.read(find_agent(agent_id))
        if stored is None:
            raise AgentNotFound(agent_id)
        return stored

    async def list(self, agent_id: str = "") -> list[RawAgent]:
        """All agents, or those below one, in the order they were started: `Agent`s in JSON."""
        return await self._world.store.read(shown_below(agent_id))

    async def details(self, agent_id: str) -> AgentDetails:
        stored = await self.get(agent_id)
        agent = stored.agent
        children = await self._world.store.read(children_of(agent.agent_id))
        found = await self._world.store.read(conversation(agent.session_id))
        said = () if found is None else found[1]
        users = [message for message in said if message.role == "user"]
        answers = [message for message in said if message.role == "assistant"]
        return AgentDetails(
            agent=agent,
            path=list(stored.path),
            children=children,
            assignment=full_text(users[0].parts) if users else "",
            result=full_text(answers[-1].parts) if answers else "",
        )

    async def children(self, agent_id: str) -> Sequence[Agent]:
        return await self._world.store.read(children_of(agent_id))

    async def sessions_above(self, session_id: SessionId) -> tuple[SessionId, ...]:
        """From the top down to the one above it."""
        return tuple(reversed(await self._world.store.read(sessions_above(session_id))))

    def has_session(self, session_id: str) -> bool:
        """Whether an agent works there, and not the session's own."""
        return "$$" in session_id or session_id in self.roots

    async def find_duty(self, agent_id: str) -> tuple[Agent, AgentDuty] | None:
        """That of a run which somebody outside wants of an agent, by its id or its session's."""
        stored = await self._world.store.read(find_agent(agent_id))
        if stored is None:
            return None
        above = await self.sessions_above(stored.agent.session_id)
        return stored.agent, AgentDuty(stored.agent.agent_id, stored.path, above, is_detached=True)

    async def set_budget(self, agent_id: str, budget: Limits) -> Agent:
        """For its present assignment and for further ones; raises `AgentNotFound`."""
        agent = (await self.get(agent_id)).agent
        assert self.runs is not None, "they were joined"
        for run in self.runs.line(agent.session_id):
            if run.agent_id == agent.agent_id:
                self.runs.set_limits(run, budget)
        return await asyncio.shield(self._world.store.write(set_budget(agent.agent_id, budget)))


def _duty(run: LiveRun) -> AgentDuty:
    assert run.duty is not None, "only agents' runs are held elsewhere"
    return run.duty


def _text(body: Mapping[str, Json], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""
