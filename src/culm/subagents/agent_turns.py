"""The turns of agents' runs, and the requests of their workers to the server.

Owns nothing that outlives a turn. `worker_turn.py` runs a turn in a worker; here it gets its
worktree and its slot, and its worker the approvals, budgets and delegation that it asks for.
"""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import cast

import msgspec

from culm.errors import AppError, BudgetReached
from culm.fleet.executor import ApprovalUnavailable, HostCallFailed
from culm.fleet.host.caller import WorkerAsk
from culm.permission.gate import NoApprover, PendingApproval
from culm.run.journal import TurnJournal
from culm.run.limits import UsageEstimate
from culm.run.live_run import LiveRun
from culm.run.rules import ending_of_error
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.services import WorkerFleet
from culm.store.agents import StoredAgent, find_agent
from culm.subagents.agent_worktrees import AgentWorktrees
from culm.subagents.provisioning import AgentEnvironment
from culm.subagents.replay import ReplayContext, call_of
from culm.subagents.start_policy import AgentTerms, StartRefused, allowed_tools
from culm.subagents.tree import AgentTree, FinishedRun, duty_of
from culm.subagents.worker_turn import WorkerTurnResult, WorkerTurns
from culm.tools.agent_tools import AgentRequest, Delegation, ReserveBudget, ReservedBudget
from culm.tools.base import CallRequest, CallResult, QuestionPlan, ResolvedAction
from culm.tools.question import QUESTION
from culm.wire.asks import Question
from culm.wire.codec import Json, decode
from culm.wire.runs import Ending
from culm.worktrees import describe_outcome

log = logging.getLogger(__name__)

GONE = Ending("error", "The agent is gone", "Its session was deleted.")


class _Questions(msgspec.Struct):
    """The arguments of a host call `question`."""

    questions: list[Question]
    confirm_title: str = ""
    confirm_description: str = ""


class AgentTurns:
    """Runs the turns of one workspace's agents. Implements `ReplayHost`."""

    def __init__(
        self,
        context: TurnContext,
        runs: Runs,
        agents: AgentTree,
        worktrees: AgentWorktrees,
        delegation: Delegation,
        fleet: WorkerFleet,
        environment: Callable[[], AgentEnvironment],
    ) -> None:
        self._context = context
        self._agents = agents
        self._worktrees = worktrees
        self._delegation = delegation
        replay = ReplayContext(self, context.publish, agents.note)
        self._turns = WorkerTurns(fleet, context.models, runs, environment, replay)

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
        await self._worktrees.begin_work(duty_of(run).path)
        stored = await self._context.store.read(find_agent(run.agent_id))
        if stored is None:
            return GONE
        try:
            if await self._worktrees.restore(stored):
                stored = await self._agents.get(run.agent_id)
        except StartRefused as exc:
            return Ending("error", "No worktree", str(exc))
        try:
            async with self._agents.slot(run):
                result = await self._turns.run_turn(run, journal, stored)
        except AppError as exc:
            result = WorkerTurnResult(ending_of_error(exc))
        try:
            done = await self._finish(stored, result.files)
        except Exception:  # boundary: the ending of a turn does not depend on its worktree
            log.exception("cannot inspect the worktree of agent %s", run.agent_id)
            done = FinishedRun(result.files, "Its worktree could not be inspected; it is kept.")
        self._agents.finished.put(run.id, done)
        return result.ending

    async def _finish(self, stored: StoredAgent, files: tuple[str, ...]) -> FinishedRun:
        """Determine the changed files, by git in a worktree; remove an unchanged worktree."""
        terms = decode(stored.terms, AgentTerms)
        if terms.worktree is not None and self._worktrees.has_below(stored.agent.agent_id):
            note = f"Others still work in its worktree, {terms.worktree.path}."
            return FinishedRun(files, note)
        outcome = await self._worktrees.finish(stored)
        if outcome is None:
            return FinishedRun(tuple(map(self._relative_path, files)))
        return FinishedRun(tuple(outcome.files), describe_outcome(outcome))

    def _relative_path(self, file: str) -> str:
        """Make the path of a file in the workspace relative to it."""
        inside = PurePosixPath(file)
        path = PurePosixPath(self._context.path)
        return str(inside.relative_to(path)) if inside.is_relative_to(path) else file

    # --- requests of workers to their host

    async def decide(self, run: LiveRun, message_id: str, ask: WorkerAsk) -> bool:
        duty, body = duty_of(run), ask.body
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
            async with self._agents.waiting(run, "ask"):
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
        result = await self._delegation.do(call, request, lambda _: None)
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
        async with self._agents.waiting(run, "question"):
            answered = await self._context.gate.ask_people(
                inquiry, call, run.asked.approval, duty_of(run).path
            )
        if isinstance(answered, CallResult):
            if answered.ends_turn is None:
                raise HostCallFailed(answered.content)
            return {"declined": answered.content}
        request, responses = answered
        return msgspec.to_builtins({"request": request, "responses": list(responses)})

    async def _may_ask(self, run: LiveRun) -> bool:
        """Check that the agent has the tool; as with requests, the worker is not trusted."""
        terms = decode((await self._agents.get(run.agent_id)).terms, AgentTerms)
        has_tool = QUESTION in allowed_tools(self._context.tools(), terms)
        return has_tool and not run.asked.approval.headless


def _text(body: Mapping[str, Json], name: str) -> str:
    value = body.get(name)
    return value if isinstance(value, str) else ""
