"""The tools of one workspace, with the permission gate before them and the processes behind them.

Owns the state that tools share within a workspace, and ends every process started for it.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from culm.config.layers import ToolConfig
from culm.errors import AppError, InvalidRequest, SessionNotFound
from culm.ids import SessionId
from culm.permission.gate import PermissionGate
from culm.permission.hooks import Hooks
from culm.permission.policy import PolicyInput, resolve_approve
from culm.store.asks import list_asks
from culm.store.sessions import all_sessions, find_session
from culm.tools.base import Tool, ToolContext
from culm.tools.files.paths import WorkspacePaths
from culm.tools.own_tools import own_tools
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.process.output import remove_outputs, sessions_with_output
from culm.tools.process.running import run_user_command
from culm.wire.asks import Approve, Ask, R, parse_caller_approve
from culm.wire.codec import Json
from culm.wire.messages import ShellCommand, ShellCommandPart
from culm.wire.runs import ShellOutput
from culm.wire.tools import ToolFacts, ToolInfo
from culm.wire.workspaces import Process
from culm.workspace.services import WorkspaceServices

log = logging.getLogger(__name__)

ASKS_SHOWN = 500


class Toolbox:
    """The tools of one workspace. Created with it."""

    def __init__(
        self,
        services: WorkspaceServices,
        make_agent_tools: Callable[[ToolConfig], Mapping[str, Tool]],
    ) -> None:
        server, configuration = services.server, services.configuration
        self.context = ToolContext(
            workspace_id=services.about.id,
            paths=WorkspacePaths(services.about.path),
            executor=server.executor,
            processes=server.processes,
            store=services.store,
            clock=server.clock,
            ids=server.ids,
            env=lambda: configuration.env,
            outputs=services.about.folder / "outputs",
        )
        hooks = Hooks(self.context, lambda: configuration.tooling.hooks)
        self.gate = PermissionGate(
            services.store,
            server.clock,
            server.ids,
            publish=services.hub.publish_transient,
            run_hooks=hooks.run,
            policy_input=self._policy_input,
            is_watched=services.lifetime.is_watched,
            skip=services.about.yolo,
        )
        self._configuration = configuration
        self._jobs = BackgroundJobs(services.tasks)
        self._tasks = services.tasks
        self._store = services.store
        self._messages = services.messages
        self._make_tools = server.make_tools
        self._make_agent_tools = make_agent_tools
        self._built_in: Mapping[str, Tool] | None = None  # Made at their first use.
        self._made_for: ToolConfig | None = None  # Cached, as a turn reads the tools several times.
        self._tools: Mapping[str, Tool] = {}

    def tools(self) -> Mapping[str, Tool]:
        """Return the configured tools: built-in ones, and the user's own under unused names."""
        disabled = self._configuration.tooling.disabled_tools
        tools = {name: tool for name, tool in self._all_tools().items() if name not in disabled}
        if "bash" in tools:
            self.context.processes.warm_nowait()  # Start early, while the model answers.
        return tools

    def _all_tools(self) -> Mapping[str, Tool]:
        tooling = self._configuration.tooling
        if tooling is not self._made_for:
            if self._built_in is None:
                self._built_in = self._make_tools(self.context, self._jobs)
            built_in = {**self._make_agent_tools(tooling), **self._built_in}
            own = own_tools(self.context, tooling.own_tools, built_in)
            self._made_for, self._tools = tooling, {**built_in, **own}
        return self._tools

    def tool_infos(self) -> dict[str, ToolInfo]:
        """Describe all tools to clients, including disabled ones."""
        disabled = self._configuration.tooling.disabled_tools
        return {
            name: tool.spec.info(enabled=name not in disabled)
            for name, tool in self._all_tools().items()
        }

    def parse_approve(self, value: Json) -> Approve | None:
        """Parse the `approve` field of a prompt; raises `InvalidRequest`."""
        tools = self._all_tools()
        return resolve_approve(
            parse_caller_approve(value),
            lambda name: tools[name].spec.facts if name in tools else ToolFacts(),
        )

    def _policy_input(self) -> PolicyInput:
        tooling = self._configuration.tooling
        return PolicyInput(
            workspace=str(self.context.paths.root),
            home=os.path.realpath(self.context.env().get("HOME") or Path.home()),
            rules=tooling.rules,
            allowed_tools=tooling.allowed_tools,
        )

    async def start(self) -> None:
        await self.gate.grants.load()
        self._tasks.create_task(self._remove_leftovers(), name="remove leftover outputs")

    async def run_shell(self, session_id: SessionId, command: str, width: int) -> ShellOutput:
        """Run a user's own command without an ask, and add it to the session. Cancelling ends it.

        Raises `InvalidRequest` and `SessionNotFound`.
        """
        if not command.strip():
            raise InvalidRequest("command is empty")
        if await self._store.read(find_session(session_id)) is None:
            raise SessionNotFound(session_id)
        root = str(self.context.paths.root)
        output, exit_code = await run_user_command(self.context, command, root, width, session_id)
        part = ShellCommandPart(ShellCommand(command, output, exit_code))
        _, written = self._messages.add(session_id, "user", [part])
        await asyncio.shield(written)
        return ShellOutput(output, exit_code)

    async def list_asks(self, kind: type[R], session_id: str, state: str) -> list[Ask[R]]:
        """Return the asks of one kind, latest first."""
        wanted = "" if state == "all" else state
        return await self._store.read(list_asks(kind, session_id, wanted, ASKS_SHOWN))

    async def processes(self) -> list[Process]:
        """Return the running processes of this workspace."""
        held = await self.context.processes.processes(self.context.workspace_id)
        return [
            Process(
                pid=one.pid,
                command=one.title,
                kind=one.owner.kind,
                session_id=one.owner.session_id,
                run_id=one.owner.run_id,
                tool_call_id=one.owner.tool_call_id,
                age_s=round(one.age_s, 3),
                rss_bytes=one.rss_bytes,
                pids=list(one.pids),
                stopping=one.stopping,
            )
            for one in held
        ]

    async def find_left(self, run_id: str) -> list[int]:
        """Return the processes of a run that were stopped and are still there."""
        held = await self.context.processes.processes(self.context.workspace_id)
        stopping = (one for one in held if one.owner.run_id == run_id and one.stopping)
        return sorted({pid for one in stopping for pid in one.pids})

    def forget_sessions(self, session_ids: Collection[str]) -> None:
        """Forget deleted sessions, end their jobs and remove the output of their commands."""
        for session_id in session_ids:
            self.gate.forget_session(session_id)
        self._tasks.create_task(self._remove_work(session_ids), name="remove deleted sessions")

    async def _remove_work(self, session_ids: Collection[str]) -> None:
        with _left_to_the_next_start():
            await self._jobs.end_sessions(session_ids)
            await self._remove_outputs(session_ids)

    async def _remove_leftovers(self) -> None:
        """Remove the output of sessions whose deletion was committed before a crash."""
        with _left_to_the_next_start():
            found = await asyncio.to_thread(sessions_with_output, self.context.outputs)
            if found:
                known = {session.id for session in await self._store.read(all_sessions)}
                await self._remove_outputs(found - known)

    async def _remove_outputs(self, session_ids: Collection[str]) -> None:
        await asyncio.to_thread(remove_outputs, self.context.outputs, session_ids)

    async def stop(self) -> None:
        """End every process of this workspace, and verify it."""
        await self._jobs.end()
        left = await self.context.processes.end_all(self.context.workspace_id)
        if left:
            log.error("processes %s did not exit and were abandoned", left)


@contextmanager
def _left_to_the_next_start() -> Generator[None]:
    """Log a failed removal: the workspace must not end because of it."""
    try:
        yield
    except (AppError, OSError) as exc:
        log.error("cannot remove the output of deleted sessions: %s", exc)
