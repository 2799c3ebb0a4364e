"""Requests between agents: start, wait, send, stop, list.

Owns nothing that outlives a request. The caller is always a run, which can reach only the agents
below it. A refused request is an error result for the model, not an exception.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import assert_never

from msgspec import Struct

from culm.clock import within
from culm.errors import AppError, NotFound
from culm.ids import AgentId
from culm.run.live_run import AgentDuty, LiveRun, RunRequest
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.store.agents import StoredAgent
from culm.store.sessions import find_session
from culm.subagents.mail_room import OutgoingMail
from culm.subagents.start_policy import (
    AgentTerms,
    ParentAgent,
    StartRefused,
    allowed_tools,
    places_of,
    top_agent,
)
from culm.subagents.starter import END_S, AgentCaller, AgentStarter, all_ended, check_going
from culm.subagents.tree import AgentTree, BoundedDict, FinishedRun
from culm.tools.agent_tools import (
    AgentRequest,
    ListAgents,
    MailRequest,
    StartAgents,
    SteerAgent,
    StopAgents,
    WaitForAgents,
)
from culm.tools.base import CallRequest, CallResult, Watch
from culm.wire.agents import Agent, Until, outcome_of_run
from culm.wire.codec import Json, decode, encode
from culm.wire.config import SelectedModel

# The tool of each request. It is checked here because a worker cannot be trusted to offer an agent
# only the tools it may use.
TOOLS: Mapping[type[AgentRequest], str] = {
    StartAgents: "agent",
    WaitForAgents: "agent_wait",
    SteerAgent: "agent_send",
    StopAgents: "agent_stop",
    ListAgents: "agent_list",
    MailRequest: "mail",
}
REPORTED_MAX = 10_000  # Runs whose end was reported; a forgotten one is reported again.
WAIT_MAX = 50  # Reports in one result if the request names no agents.
FILES_SHOWN = 20
LIST_MAX = 200  # Lines of a tree in one result.
ANSWER_CHARS_MAX = 100_000  # Per answer of one agent.
ANSWERS_CHARS_MAX = 800_000  # Per result, which is cut off a little above that.


class AgentReport(Struct, frozen=True):
    """One agent and the result of its latest assignment."""

    agent: Agent
    answer: str | None = None  # Its last answer; None if it is not to be shown.
    files: Sequence[str] = ()
    note: str = ""  # About its worktree.


class TreeDelegation:
    """Implements `Delegation` for the agents of one workspace."""

    def __init__(
        self,
        context: TurnContext,
        agents: AgentTree,
        runs: Runs,
        starter: AgentStarter,
        mail: OutgoingMail,
    ) -> None:
        self._context = context
        self._agents = agents
        self._runs = runs
        self._starter = starter
        self._mail = mail
        self._reported = BoundedDict[str](REPORTED_MAX)  # Runs whose end was reported to an agent.

    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        run = self._runs.find(call.run_id)
        if run is None:
            return _refused("the calling run has ended")
        try:
            caller = await self.caller_of(run)
            if (name := TOOLS[type(request)]) not in caller.above.tools:
                return _refused(f"there is no tool {name!r} for this agent")
            match request:
                case StartAgents():
                    return await self._start(request, caller, run, call, watch)
                case WaitForAgents():
                    return await self._wait(request, caller, run, watch)
                case SteerAgent():
                    return await self._send(request, caller, run, watch)
                case StopAgents():
                    return await self._stop(request, caller)
                case ListAgents():
                    return await self._list(request, caller)
                case MailRequest():
                    return await self._mail.serve(caller, request)
                case _:
                    assert_never(request)
        except StartRefused as exc:
            return _refused(str(exc))
        except AppError as exc:
            return _refused(f"{exc.message}; {exc.hint}" if exc.hint else exc.message)

    async def caller_of(self, run: LiveRun) -> AgentCaller:
        """Return a run as the caller of requests, with its rights."""
        names = list(self._context.tools())
        model = SelectedModel(model=run.model, provider=run.provider)
        if run.duty is None:
            session_id = run.session_id
            above = top_agent(names, model)
            return AgentCaller(
                session_id, (session_id,), (session_id,), above, run.asked.approval, run
            )
        stored = await self._agents.get(run.agent_id)
        agent, terms = stored.agent, decode(stored.terms, AgentTerms)
        above = ParentAgent(
            agent.depth,
            allowed_tools(names, terms),
            is_narrowed=terms.tools is not None,
            places=places_of(agent.worktree, terms),
            is_read_only=agent.is_read_only,
            model=model,
        )
        sessions = (*run.duty.above, run.session_id)
        return AgentCaller(agent.agent_id, stored.path, sessions, above, run.asked.approval, run)

    # --- starting and waiting

    async def _start(
        self,
        request: StartAgents,
        caller: AgentCaller,
        run: LiveRun,
        call: CallRequest,
        watch: Watch,
    ) -> CallResult:
        detached = not request.wait
        runs = await self._starter.start(request.assignments, caller, call, detached=detached)
        if detached:
            reports = [AgentReport((await self._agents.get(one.agent_id)).agent) for one in runs]
            return result_of(reports, "They work now; agent_wait gets what they report.")
        try:
            async with self._agents.waiting_for_agents(run):
                await self._until_ended(runs, "all", watch)
        except asyncio.CancelledError:
            await self._starter.end(runs)
            raise
        return result_of([await self._report(one) for one in runs])

    async def _wait(
        self, request: WaitForAgents, caller: AgentCaller, run: LiveRun, watch: Watch
    ) -> CallResult:
        if request.agents:
            wanted = [(await self._get_own(name, caller)).agent for name in request.agents]
        else:  # Without names, ends that were already reported are not reported again.
            children = await self._agents.children(caller.agent_id)
            wanted = [one for one in children if self._live_of(one) or not self._is_reported(one)]
            wanted.sort(key=lambda one: not self._live_of(one))
        live = [one for agent in wanted for one in self._live_of(agent)]
        ended = [agent for agent in wanted if not self._live_of(agent)]
        more, wanted = len(wanted) - WAIT_MAX, wanted[:WAIT_MAX] if not request.agents else wanted
        note = f"{more} more are reported next time." if more > 0 and not request.agents else ""
        if not _is_enough(request.until, ended):
            async with self._agents.waiting_for_agents(run):
                waiting = self._until_ended(live, request.until, watch)
                if await within(self._context.clock, request.timeout_s, waiting) is None:
                    note = f"Time is up after {request.timeout_s:g} s; running agents continue."
        return result_of([await self._report_of(agent.agent_id) for agent in wanted], note)

    async def _until_ended(self, runs: Sequence[LiveRun], until: Until, watch: Watch) -> bool:
        """Wait for all runs, for one, or for one that fails; each is shown as it ends."""
        async with asyncio.TaskGroup() as group:
            left = {
                group.create_task(run.control.ended.wait(), name="end of a run"): run
                for run in runs
            }
            while left:
                done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                ended = [left.pop(task) for task in done]
                for run in ended:
                    watch(f"agent {run.agent_id}: {_outcome(run)}\n")
                outcomes = {_outcome(run) for run in ended}
                if until == "any" or (until == "first_error" and outcomes != {"completed"}):
                    break
            for task in left:
                task.cancel()
        return True

    def _live_of(self, agent: Agent) -> list[LiveRun]:
        line = self._runs.line(agent.session_id)
        return [one for one in line if one.agent_id == agent.agent_id]

    def _is_reported(self, agent: Agent) -> bool:
        return self._reported.find(agent.run_id) is not None

    async def _report(self, run: LiveRun) -> AgentReport:
        self._reported.put(run.id, run.agent_id)
        done = self._agents.finished.find(run.id) or FinishedRun()
        try:
            agent = (await self._agents.get(run.agent_id)).agent
        except NotFound:
            agent = _gone(run)
        return AgentReport(agent, run.control.answer, done.files, done.note)

    async def _report_of(self, agent_id: str) -> AgentReport:
        details = await self._agents.details(agent_id)
        if details.agent.state != "ended":
            return AgentReport(details.agent)
        run_id = details.agent.run_id
        self._reported.put(run_id, agent_id)
        done = self._agents.finished.find(run_id) or FinishedRun()
        return AgentReport(details.agent, details.result, done.files, done.note)

    # --- sending, stopping, listing

    async def _send(
        self, request: SteerAgent, caller: AgentCaller, run: LiveRun, watch: Watch
    ) -> CallResult:
        stored = await self._get_own(request.agent, caller)
        agent = stored.agent
        if not request.text.strip():
            return _refused("the text is empty")
        duty = AgentDuty(
            agent.agent_id,
            stored.path,
            await self._agents.sessions_above(agent.session_id),
            works_for=run,
            is_detached=not request.wait,
        )
        asked = RunRequest(
            prompt=request.text,
            limits=agent.budget,
            model=agent.selected,
            approval=run.asked.approval,
            joins=True,
        )
        check_going(run)
        if not self._runs.is_busy(agent.session_id):
            self._starter.check_room(caller, 1)
        sent = self._runs.accept(agent.session_id, asked, duty=duty)
        was_at_work = sent.state == "queued"
        if not request.wait:
            await asyncio.shield(sent.control.accepted)
            how = "it reads it before its next step" if was_at_work else "it works on it now"
            present = (await self._agents.get(agent.agent_id)).agent
            return result_of([AgentReport(present)], f"Sent: {how}.")
        try:
            await asyncio.shield(sent.control.accepted)
            async with self._agents.waiting_for_agents(run):
                await self._until_ended([sent], "all", watch)
        except asyncio.CancelledError:
            await self._starter.end([sent])
            raise
        return result_of([await self._report(sent.control.host or sent)])

    async def _stop(self, request: StopAgents, caller: AgentCaller) -> CallResult:
        wanted = [await self._get_own(name, caller) for name in request.agents]
        stopped: list[LiveRun] = []
        for stored in wanted:
            stopped += self._runs.of_session(stored.agent.session_id)
            for commit in self._runs.cancel_session(stored.agent.session_id, "agent"):
                await asyncio.shield(commit)
        await within(self._context.clock, END_S, all_ended(stopped))
        again = [await self._agents.get(stored.agent.agent_id) for stored in wanted]
        result = result_of([AgentReport(stored.agent) for stored in again])
        return CallResult(result.content, metadata=result.metadata)

    async def _list(self, request: ListAgents, caller: AgentCaller) -> CallResult:
        top, depth = caller.agent_id, caller.above.depth
        if request.agent:
            stored = await self._get_own(request.agent, caller)
            top, depth = stored.agent.agent_id, stored.agent.depth
        agents = [decode(one, Agent) for one in await self._agents.list(top)]
        return listing_of(agents, depth)

    async def _get_own(self, name: str, caller: AgentCaller) -> StoredAgent:
        """Find an agent below the caller; raises `StartRefused` with the state of any other."""
        try:
            stored = await self._agents.get(name)
        except NotFound:
            if await self._context.store.read(find_session(name)) is not None:
                raise StartRefused(f"{name} is not your sub-agent; use mail") from None
            raise StartRefused(f"there is no agent {name!r} in this project") from None
        if caller.agent_id not in stored.path[:-1]:
            agent = stored.agent
            state = agent.outcome if agent.state == "ended" else agent.state
            raise StartRefused(f"{name} ({state}) is not your sub-agent; use mail")
        return stored


def _is_enough(until: Until, ended: Sequence[Agent]) -> bool:
    """Return True if the agents that ended before the wait began already satisfy it."""
    match until:
        case "all":
            return False
        case "any":
            return bool(ended)
        case "first_error":
            return any(agent.outcome != "completed" for agent in ended)


def _outcome(run: LiveRun) -> str:
    ending = run.control.ending
    return "left behind" if ending is None else outcome_of_run(ending.outcome)


def _gone(run: LiveRun) -> Agent:
    """Describe an agent whose session was deleted after it had ended."""
    return Agent(
        agent_id=AgentId(run.agent_id),
        parent_id="",
        session_id=run.session_id,
        name=run.agent_id,
        model=run.model,
        provider=run.provider,
        state="ended",
        outcome=None if run.control.ending is None else outcome_of_run(run.control.ending.outcome),
        reason="Its session was deleted; its usage is unknown",
        run_id=run.id,
    )


def _refused(reason: str) -> CallResult:
    return CallResult(f"Not done: {reason}.", is_error=True)


# --- tool results about agents


def result_of(reports: Sequence[AgentReport], note: str = "") -> CallResult:
    """Format the reports of agents that have ended or that the caller stopped waiting for."""
    room = min(ANSWER_CHARS_MAX, ANSWERS_CHARS_MAX // max(1, len(reports)))
    shown = [_shown(report, room, is_alone=len(reports) == 1) for report in reports]
    content = "\n\n".join(filter(None, (*shown, note)))
    is_error = bool(reports) and not any(_is_success(report) for report in reports)
    return CallResult(content or "There are none.", is_error=is_error, metadata=_metadata(reports))


def _is_success(report: AgentReport) -> bool:
    """Return False for a failed agent, and for one that completed with an empty answer."""
    if report.agent.state != "ended":
        return True
    has_answered = report.answer is None or bool(report.answer.strip())
    return report.agent.outcome == "completed" and has_answered


def _shown(report: AgentReport, room: int, *, is_alone: bool) -> str:
    agent, answer = report.agent, (report.answer or "").strip()
    if len(answer) > room:
        answer = f"{answer[:room]}\n[The rest was cut off; its session has it.]"
    if agent.state == "ended" and report.answer is not None and not answer:
        answer = "It said nothing." if agent.outcome == "completed" else ""
    head = "" if is_alone else f"## {agent.name}"
    return "\n".join(filter(None, (head, answer, f"[{' · '.join(_facts(report))}]")))


def _facts(report: AgentReport) -> list[str]:
    agent = report.agent
    facts = [f"agent {agent.agent_id}", _state(agent)]
    if report.files:
        more = len(report.files) - FILES_SHOWN
        names = ", ".join(report.files[:FILES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        facts.append(f"files changed: {names}")
    if report.note:
        facts.append(report.note)
    facts.append(f"{agent.tokens} tokens, ${agent.cost:.4f}")
    return facts


def _state(agent: Agent) -> str:
    if agent.state != "ended":
        waits = f", waits for {agent.waiting_for}" if agent.waiting_for else ""
        return f"{agent.state}{waits}"
    reason = " ".join(agent.reason.split())
    return f"{agent.outcome}: {reason}" if reason else str(agent.outcome)


def _metadata(reports: Sequence[AgentReport]) -> str:
    """Encode the reports for clients."""
    agents: list[Json] = [
        {
            "agent_id": report.agent.agent_id,
            "session_id": report.agent.session_id,
            "name": report.agent.name,
            "role": report.agent.role,
            "state": report.agent.state,
            "outcome": report.agent.outcome,
            "cost": report.agent.cost,
            "tokens": report.agent.tokens,
            "files": list(report.files),
        }
        for report in reports
    ]
    return encode({"agents": agents}).decode()


def listing_of(agents: Sequence[Agent], top: int) -> CallResult:
    """Format a tree, each agent below its parent."""
    if not agents:
        return CallResult("No agent was started.")
    by_parent: dict[str, list[Agent]] = {}
    known = {agent.agent_id for agent in agents}
    for agent in agents:
        by_parent.setdefault(agent.parent_id if agent.parent_id in known else "", []).append(agent)
    lines: list[str] = []
    waiting = list(reversed(by_parent.get("", [])))
    while waiting and len(lines) < LIST_MAX:
        agent = waiting.pop()
        waiting += reversed(by_parent.get(agent.agent_id, []))
        margin = "  " * max(0, agent.depth - top - 1)
        about = f"{agent.name} ({agent.role}, {agent.model})"
        cost = f"{agent.tokens} tokens, ${agent.cost:.4f}"
        lines.append(f"{margin}- {agent.agent_id} {about}: {_state(agent)}; {cost}")
    if len(lines) < len(agents):
        lines.append(f"[{len(agents) - len(lines)} more are not shown.]")
    return CallResult(
        "\n".join(lines), metadata=_metadata([AgentReport(one) for one in agents[:LIST_MAX]])
    )
