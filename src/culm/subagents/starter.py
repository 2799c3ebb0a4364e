"""Start agents: all agents of a call or none, each with its session, its row and its first run."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from culm.clock import within
from culm.config.layers import ToolConfig
from culm.errors import LimitExceeded
from culm.ids import AgentId, SessionId
from culm.permission.gate import ApprovalPolicy
from culm.run.budget import Account
from culm.run.live_run import AgentDuty, LiveRun, RunRequest
from culm.run.runs import STOP_S, Runs
from culm.run.turn import TurnContext
from culm.store.agents import NewAgent, add_agent
from culm.store.base import together
from culm.store.sessions import add_session, count_sessions
from culm.subagents.agent_worktrees import AgentWorktrees, with_worktree
from culm.subagents.start_policy import (
    ParentAgent,
    PlannedAgent,
    StartRefused,
    plan_agent,
    roles_with,
)
from culm.subagents.tree import AgentTree
from culm.tools.agent_tools import AgentAssignment
from culm.tools.base import CallRequest
from culm.wire.codec import encode
from culm.wire.config import SelectedModel

END_S = STOP_S - 0.5  # Time for agents to end before the call that waits for them is abandoned.


class AgentCaller(Struct, frozen=True):
    """The starter of agents: a run of an agent, or a client without one."""

    agent_id: str
    path: tuple[str, ...]  # Its ancestors from the top, and itself.
    sessions: tuple[SessionId, ...]  # The sessions of those agents.
    above: ParentAgent
    approval: ApprovalPolicy
    run: LiveRun | None = None

    @property
    def session_id(self) -> str:
        return self.sessions[-1] if self.sessions else ""


class ToolingSource(Protocol):
    """The owner of a configuration that can change."""

    @property
    def tooling(self) -> ToolConfig: ...


class AgentStarter(Struct, frozen=True):
    """Starts the agents of one workspace."""

    context: TurnContext
    runs: Runs
    agents: AgentTree
    worktrees: AgentWorktrees
    configuration: ToolingSource

    async def start(
        self,
        assignments: Sequence[AgentAssignment],
        caller: AgentCaller,
        call: CallRequest | None,
        *,
        detached: bool,
    ) -> list[LiveRun]:
        """Return their first runs, already durable.

        Raises `StartRefused` or `AppError` if not all of them can be started.
        """
        planned = [self._plan(assignment, caller) for assignment in assignments]
        self.check_room(caller, len(planned))
        await self._check_sessions(len(planned))
        ids = [self.context.ids.agent() for _ in planned]
        wanted = [agent_id for agent_id, one in zip(ids, planned, strict=True) if one.worktree]
        made = await self.worktrees.make(wanted)
        try:
            news = [
                self._new(number, agent_id, one, caller, call, detached=detached)
                for number, (agent_id, one) in enumerate(zip(ids, planned, strict=True), 1)
            ]
            news = [with_worktree(new, made.get(new.id)) for new in news]
            return await self._begin(news, planned, caller)
        except Exception:  # boundary: nothing is left of agents that cannot be started
            await self.worktrees.undo(made.values())
            raise

    def _plan(self, assignment: AgentAssignment, caller: AgentCaller) -> PlannedAgent:
        roles = roles_with(self.configuration.tooling.roles)
        depth_max = self.context.settings.agents_depth_max
        return plan_agent(assignment, caller.above, roles, self._choose, depth_max=depth_max)

    def _choose(self, wanted: str, above: SelectedModel) -> SelectedModel:
        """Find a model by name; without a name, return the parent's model."""
        if not wanted:
            return above
        models = self.context.models.current
        if wanted in ("large", "small"):
            return models.choose(wanted) or above
        provider, _, model = wanted.partition("/")
        if not model:
            provider, model = above.provider, wanted
        reason = models.why_not(provider, model) or models.why_unlisted(provider, model)
        if reason:
            usable = ", ".join(models.names()) or "none"
            raise StartRefused(f"model {wanted!r} cannot be used: {reason}; there are {usable}")
        return SelectedModel(model=model, provider=provider)

    def check_room(self, caller: AgentCaller, more: int) -> None:
        limit = self.context.settings.agents_children_max
        duties = (run.duty for run in self.runs.live() if run.duty is not None)
        at_work = len({duty.agent_id for duty in duties if duty.path[:-1] == caller.path})
        left = max(0, limit - at_work)
        if more > left:
            raise StartRefused(f"an agent may have {limit} others at work; {left} more can be")
        if caller.run is not None and (used := _used_up(caller.run.account)):
            raise StartRefused(used)

    async def _check_sessions(self, more: int) -> None:
        """Check the session limit for all agents before any of them is created."""
        limit = self.context.settings.sessions_max
        if await self.context.store.read(count_sessions) + more > limit:
            raise LimitExceeded("sessions in this workspace", limit)

    def _new(
        self,
        number: int,
        agent_id: AgentId,
        planned: PlannedAgent,
        caller: AgentCaller,
        call: CallRequest | None,
        *,
        detached: bool,
    ) -> NewAgent:
        return NewAgent(
            id=agent_id,
            session_id=self.context.ids.session() if call is None else session_id_of(call, number),
            parent_id=caller.agent_id,
            parent_session_id=caller.session_id,
            name=planned.name,
            role=planned.role,
            provider=planned.model.provider,
            model=planned.model.model,
            terms=encode(planned.terms).decode(),
            budget=planned.limits,
            is_detached=detached,
            is_read_only=planned.is_read_only,
            depth=caller.above.depth + 1,
            path=caller.path,
        )

    async def _begin(
        self, news: Sequence[NewAgent], planned: Sequence[PlannedAgent], caller: AgentCaller
    ) -> list[LiveRun]:
        """Accept all runs in one step; if one is refused, all end."""
        check_going(caller.run)
        self.check_room(caller, len(news))  # Others may have been started meanwhile.
        requests = [_request_of(one, caller) for one in planned]
        self.runs.check_room(requests)
        runs: list[LiveRun] = []
        try:
            for new, request in zip(news, requests, strict=True):
                runs.append(self._accept(new, request, caller))
            for run in runs:
                await asyncio.shield(run.control.accepted)
        except Exception:  # boundary: an error of the store ends the other runs, too
            await self.end(runs)
            raise
        except asyncio.CancelledError:
            await self.end([run for run in runs if run.waited_for_by is not None])
            raise
        return runs

    def _accept(self, new: NewAgent, request: RunRequest, caller: AgentCaller) -> LiveRun:
        """Create the agent's row, its session and its first run together, or none of them."""
        if not new.parent_id:
            self.agents.roots.add(new.session_id)
        session = add_session(
            new.session_id,
            new.name,
            parent_id=new.parent_session_id,
            sessions_max=self.context.settings.sessions_max,
        )
        return self.runs.accept(
            new.session_id,
            request,
            duty=AgentDuty(
                new.id,
                (*new.path, new.id),
                caller.sessions,
                works_for=caller.run,
                is_detached=new.is_detached,
            ),
            before=together(session, add_agent(new)),
        )

    async def end(self, runs: Sequence[LiveRun]) -> None:
        """Stop runs whose caller is ending, and wait for them. Bounded."""
        for run in runs:
            self.runs.orphan(run)
        stopping = [run for run in runs if run.control.turn is not None or run.state == "accepted"]
        await within(self.context.clock, END_S, all_ended(stopping))


def _request_of(planned: PlannedAgent, caller: AgentCaller) -> RunRequest:
    return RunRequest(
        prompt=planned.assignment.prompt,
        limits=planned.limits,
        model=planned.model,
        approval=caller.approval,
    )


def check_going(run: LiveRun | None) -> None:
    """Raise `StartRefused` if the run is over; call it in the step that accepts work for it."""
    if run is not None and (run.stop is not None or run.control.ended.is_set()):
        raise StartRefused("the calling run is being stopped")


def session_id_of(call: CallRequest, number: int) -> SessionId:
    """Derive a session id from a call as Crush clients expect; further agents are numbered."""
    of_call = f"{call.message_id}$${call.id}"
    return SessionId(of_call if number == 1 else f"{of_call}.{number}")


async def all_ended(runs: Sequence[LiveRun]) -> None:
    for run in runs:
        await run.control.ended.wait()


def _used_up(account: Account) -> str:
    limit = account.reached_limit()
    return f"the budget is used up: {limit}" if limit else ""
