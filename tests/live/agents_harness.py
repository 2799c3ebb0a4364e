"""A real server with agents in real processes, and checks that nothing of them remains."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.model_server import ModelServer
from culm.testing.script import Reply, ScriptedCall
from culm.wire.agents import Agent
from culm.wire.codec import Json
from culm.wire.messages import ToolResult
from culm.wire.runs import Prompt
from tests.flow.reading import assert_answered, results_of
from tests.live.harness import RESUME_S, ProcessServer, make_directory
from tests.live.run_harness import Watch, open_agent, open_watch

FOLDER = "project"


def sleeping(name: str) -> Reply:
    """An answer with a command that never ends and writes its pid to a file."""
    command = f"echo $$ > {name}.pid; exec sleep 1000"
    return Reply(calls=[ScriptedCall(name="bash", input={"command": command})])


@dataclass(frozen=True, slots=True)
class AgentsHarness:
    """A client of a server, with one session."""

    server: ProcessServer
    remote: RemoteWorkspace
    session_id: SessionId
    watch: Watch

    async def prompt(self, text: str, run_id: str, approve: Json = None) -> None:
        body = Prompt(self.session_id, text, run_id, interactive=True)
        if approve is not None:
            body.approve = approve
        await self.remote.client.request("POST", self.remote.path("/agent"), body)

    async def agents(self) -> dict[str, Agent]:
        """Return all agents by the first word of their assignment."""
        return {agent.name.split(":")[0]: agent for agent in await self.remote.agents()}

    async def outcomes(self) -> dict[str, str]:
        return {name: one.outcome or one.state for name, one in (await self.agents()).items()}

    async def until(self, condition: Callable[[dict[str, Agent]], bool]) -> dict[str, Agent]:
        """Wait until the agents satisfy the condition."""
        async with asyncio.timeout(RESUME_S):
            while not condition(found := await self.agents()):
                await asyncio.sleep(0.02)
        return found

    async def pids_of(self, *names: str) -> list[int]:
        """Return the pids of commands, once each has written its own."""
        files = [self.server.folder / FOLDER / f"{name}.pid" for name in names]
        async with asyncio.timeout(RESUME_S):
            while not all(file.exists() and file.read_text().endswith("\n") for file in files):
                await asyncio.sleep(0.02)
        return [int(file.read_text()) for file in files]

    async def workers(self) -> list[int]:
        return [one.pid for one in await self.remote.processes() if one.kind == "worker"]

    async def results(self, session_id: SessionId | None = None) -> list[ToolResult]:
        return results_of(await self.remote.messages(session_id or self.session_id))

    async def assert_consistent(self) -> None:
        """Assert that nothing runs and each call of each session has its result."""
        assert await self.remote.processes() == []
        sessions = [self.session_id]
        for agent in (await self.agents()).values():
            assert (agent.state, agent.pid, agent.waiting_for) == ("ended", 0, ""), agent
            sessions.append(agent.session_id)
        for session_id in sessions:
            assert_answered(await self.remote.messages(session_id))


@asynccontextmanager
async def open_agents_harness(
    folder: Path, model: ModelServer, session_id: SessionId | None = None
) -> AsyncGenerator[AgentsHarness]:
    async with open_agent(folder, model) as (server, client):
        remote = await client.open_workspace(make_directory(folder, FOLDER))
        session_id = session_id or (await remote.create_session("s")).id
        async with open_watch(remote) as watch:
            yield AgentsHarness(server, remote, session_id, watch)


def at_work(*names: str) -> Callable[[dict[str, Agent]], bool]:
    """A condition: these agents exist, and each has a process."""
    return lambda agents: all(name in agents and agents[name].pid for name in names)


def pids(agents: Iterable[Agent]) -> list[int]:
    return [agent.pid for agent in agents]
