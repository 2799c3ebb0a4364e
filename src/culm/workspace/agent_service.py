"""The operations of clients on the agents and the mail of one workspace.

Each operation validates, makes its changes in one step, and then waits until they are durable, so
that a client that disconnects changes nothing. `subagents/` implements the agents themselves.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from culm.clock import within
from culm.config.layers import ToolConfig
from culm.errors import AgentNotFound, AgentNotReady, InvalidRequest
from culm.events.hub import TransientEvent
from culm.ids import AgentId, SessionId
from culm.mail.base import check_address
from culm.mail.letters import Sender
from culm.permission.gate import ApprovalPolicy
from culm.processes.linux import find_stat
from culm.run.limits import check_limits
from culm.run.live_run import RunRequest
from culm.run.project_context import context_paths_of
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.store.agents import StoredAgent, agents_at_work, children_of
from culm.store.base import StoredEvent
from culm.subagents.agent_turns import AgentTurns
from culm.subagents.agent_worktrees import AgentWorktrees
from culm.subagents.delegation import TreeDelegation
from culm.subagents.mail_room import MailRoom
from culm.subagents.provisioning import AgentEnvironment
from culm.subagents.start_policy import StartRefused, role_text, roles_with, top_agent
from culm.subagents.starter import AgentCaller, AgentStarter, all_ended
from culm.subagents.tree import AgentTree
from culm.tools.agent_tools import AgentAssignment, make_agent_tools
from culm.tools.base import Tool
from culm.wire.agents import (
    Agent,
    ChangeBudget,
    LetterShown,
    RawAgent,
    ReplyToLetter,
    SaidToAgent,
    SendLetter,
    StartAgent,
)
from culm.wire.codec import decode, encode
from culm.wire.runs import Limits, RunChanged
from culm.wire.workspaces import Process
from culm.workspace.roots import project_key
from culm.workspace.run_service import CANCEL_WAIT_S
from culm.workspace.services import WorkspaceServices
from culm.workspace.toolbox import Toolbox
from culm.worktrees import Worktrees

log = logging.getLogger(__name__)


class AgentService:
    """The agents of one workspace and their mail, for its routes. Owns all their parts."""

    def __init__(
        self,
        services: WorkspaceServices,
        context: TurnContext,
        runs: Runs,
        toolbox: Toolbox,
        on_busy: Callable[[], None],
    ) -> None:
        server, folder = services.server, services.about.folder
        post = server.make_post(folder / "mailboxes")
        git = Worktrees(toolbox.context)
        self._worktrees = AgentWorktrees(context, runs, git, folder / "worktrees")
        self.agents = AgentTree(context, runs)
        self._starter = AgentStarter(
            context, runs, self.agents, self._worktrees, services.configuration
        )
        self.mail = MailRoom(context, runs, self.agents, post, server.run_blocking, on_busy)
        self.outbox = self.mail.outbox
        self._delegation = TreeDelegation(context, self.agents, runs, self._starter, self.outbox)
        self.turns = AgentTurns(
            context,
            runs,
            self.agents,
            self._worktrees,
            self._delegation,
            server.fleet,
            self._environment,
        )
        self._services = services
        self._context = context
        self._runs = runs
        self._toolbox = toolbox
        self._check_open = services.lifetime.check_open
        # The latest event of each agent that has not ended.
        self._at_work: dict[str, TransientEvent] = {}

    # --- agents

    async def start_agent(self, body: StartAgent) -> Agent:
        """Start an agent outside a conversation; its assignment is accepted when this returns."""
        self._check_open()
        model = self._context.models.current.choose("large")
        if model is None:
            raise AgentNotReady
        names = list(self._context.tools())
        approval = ApprovalPolicy(body.headless, self._toolbox.parse_approve(body.approve))
        caller = AgentCaller("", (), (), top_agent(names, model), approval)
        assignment = AgentAssignment(
            prompt=body.prompt,
            name=body.name,
            role=body.role,
            model=body.model,
            tools=body.tools,
            read_only=body.read_only,
            worktree=body.worktree,
            limits=body.limits,
        )
        try:
            (run,) = await self._starter.start([assignment], caller, None, detached=True)
        except StartRefused as exc:
            raise InvalidRequest(str(exc)) from exc
        return (await self.agents.get(run.agent_id)).agent

    async def steer(self, agent_id: str, text: str) -> SaidToAgent:
        """Steer an agent at work, or give a finished one more work."""
        self._check_open()
        if not text.strip():
            raise InvalidRequest("there is nothing to say")
        found = await self.agents.find_duty(agent_id)
        if found is None:
            raise AgentNotFound(agent_id)
        agent, duty = found
        asked = RunRequest(prompt=text, limits=agent.budget, model=agent.selected)
        steers = any(run.stop is None for run in self._runs.line(agent.session_id))
        run = self._runs.accept(agent.session_id, asked, duty=duty, steers=steers)
        await asyncio.shield(run.control.accepted)
        return SaidToAgent(run.id)

    async def cancel(self, agent_id: str) -> Agent:
        """Stop an agent and everything below it; return its state after a bounded wait."""
        agent = (await self.agents.get(agent_id)).agent
        stopped = self._runs.of_session(agent.session_id)
        for commit in self._runs.cancel_session(agent.session_id, "agent"):
            await asyncio.shield(commit)
        await within(self._context.clock, CANCEL_WAIT_S, all_ended(stopped))
        return (await self.agents.get(agent_id)).agent

    async def set_budget(self, agent_id: str, change: ChangeBudget) -> Agent:
        """Change the budget of an agent and everything below it, or of a session's running turn."""
        self._check_open()
        check_limits(change.over(Limits()))
        line = self._runs.line(SessionId(agent_id))
        if not line or line[0].duty is not None:
            agent = (await self.agents.get(agent_id)).agent
            return await self.agents.set_budget(agent_id, change.over(agent.budget))
        run = line[0]
        await asyncio.shield(self._runs.set_limits(run, change.over(run.account.limits)))
        return Agent(
            agent_id=AgentId(agent_id),
            parent_id="",
            session_id=run.session_id,
            depth=0,
            provider=run.provider,
            model=run.model,
            state="running",
            run_id=run.id,
            cost=run.account.spent.cost,
            tokens=run.account.spent.tokens,
            budget=run.account.limits,
        )

    async def list_below(self, agent_id: str) -> list[RawAgent]:
        """Return all agents, or those below one, which may be named by its session."""
        if agent_id and (found := await self.agents.find_duty(agent_id)) is not None:
            agent_id = found[0].agent_id
        return await self.agents.list(agent_id)

    # --- mail

    async def send_letter(self, body: SendLetter) -> LetterShown:
        self._check_open()
        if body.kind == "reply":
            raise InvalidRequest(
                "a reply needs the id of the letter it answers",
                hint="POST it to mail/letters/{letter_id}/reply",
            )
        sender = await self.outbox.sender_of(body.from_)
        return await self.outbox.send(
            body.to, body.kind, body.text, sender, expires_s=body.expires_s
        )

    async def reply_to_letter(self, letter_id: str, body: ReplyToLetter) -> LetterShown:
        self._check_open()
        letter = await self.outbox.get(letter_id)
        sender = Sender(session_id=letter.to, agent_id=letter.to)
        if body.from_:
            sender = await self.outbox.sender_of(body.from_)
        return await self.outbox.reply(letter_id, letter.from_, body.text, sender)

    async def ring(self, agent_id: str) -> None:
        """Check for newly delivered letters now."""
        if agent_id:
            self.mail.check(check_address(agent_id))
        else:
            await self.mail.check_all()

    # --- state and lifecycle

    async def prepare(self) -> None:
        """Load the agents at work and any leftovers, before a run continues."""
        roots = await self._context.store.read(children_of(""))
        self.agents.roots.update(agent.session_id for agent in roots)
        for agent in await self._context.store.read(agents_at_work):
            self._at_work[agent.agent_id] = TransientEvent(
                "agent_changed", agent.session_id, encode(agent)
            )
        await self._worktrees.find_orphans()

    async def start(self) -> None:
        """Remove leftovers and look for letters, after the runs continue."""
        self._worktrees.start()
        await self.mail.start()

    def close(self) -> None:
        """Start nothing new."""
        self.mail.close()
        self._worktrees.close()

    async def stop(self) -> None:
        """Stop after the runs have ended or were abandoned."""
        await self.mail.stop()

    def on_published(self, events: Iterable[StoredEvent]) -> None:
        """Track the agents at work, for new subscribers, and clean up after the others."""
        for event in events:
            if event.type == "run_changed" and b'"state":"ended"' in event.payload:
                self._worktrees.on_run_ended(decode(event.payload, RunChanged).agent_id)
            if event.type not in ("agent_started", "agent_changed", "agent_ended"):
                continue
            if event.op == "deleted" or b'"state":"ended"' in event.payload:
                self._at_work.pop(event.entity_id, None)
            else:
                shown = TransientEvent("agent_changed", event.session_id, event.payload)
                self._at_work[event.entity_id] = shown

    def state_events(self) -> Iterable[TransientEvent]:
        return list(self._at_work.values())

    def forget(self, session_id: str, agents: Sequence[StoredAgent]) -> asyncio.Task[None]:
        """Forget a deleted session and its agents; the task removes what they have on disk."""
        for stored in agents:
            self.agents.roots.discard(stored.agent.session_id)
        return self._context.tasks.create_task(
            self._remove_work(session_id, agents), name="remove deleted agents"
        )

    async def _remove_work(self, session_id: str, agents: Sequence[StoredAgent]) -> None:
        await self.mail.forget([session_id, *(stored.agent.agent_id for stored in agents)])
        for stored in agents:
            try:
                await self._worktrees.forget(stored)
            except Exception:  # boundary: the next start finds it
                log.exception("cannot remove the worktree of agent %s", stored.agent.agent_id)

    async def workers(self) -> list[Process]:
        """Return the worker processes of agents."""
        now_s = self._context.clock.monotonic_s()
        live = [(run, run.control.turn) for run in self._runs.live() if run.pid]
        stats = await asyncio.to_thread(lambda: [find_stat(run.pid) for run, _ in live])
        return [
            Process(
                pid=run.pid,
                command=f"culm worker {run.agent_id}",
                kind="worker",
                session_id=run.session_id,
                run_id=run.id,
                tool_call_id="",
                age_s=0.0 if turn is None else round(max(0.0, now_s - turn.began_s), 3),
                rss_bytes=0 if stat is None else stat.rss_bytes,
                pids=[run.pid],
                stopping=run.stop is not None,
            )
            for (run, turn), stat in zip(live, stats, strict=True)
        ]

    # --- turns of agents

    def make_tools(self, tooling: ToolConfig) -> Mapping[str, Tool]:
        """Make the tools with which an agent starts others."""
        roles = role_text(roles_with(tooling.roles))
        return make_agent_tools(self._delegation, may_start=True, roles=roles)

    def _environment(self) -> AgentEnvironment:
        """Return the settings that agents share, as they are now."""
        server, about = self._services.server, self._services.about
        configuration = self._services.configuration
        return AgentEnvironment(
            workspace=about.path,
            discovery_dir=server.discovery_dir,
            project_key=project_key(about.path),
            env=configuration.env,
            tooling=configuration.tooling,
            tools=list(self._toolbox.tools()),
            context=context_paths_of(configuration.shown.options),
            depth_max=server.settings.agents_depth_max,
            steps_max=server.settings.run_steps_max,
            compacts=self._context.models.current.compacts,
        )
