"""A workspace that runs real commands: supervised processes, jobs and the tools for them."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from culm.clock import Clock, LoopClock
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, ToolContext
from culm.tools.bash import make_bash
from culm.tools.files.file_executor import open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.job_kill import make_job_kill
from culm.tools.job_output import make_job_output
from culm.tools.process.jobs import BackgroundJobs, open_jobs
from culm.tools.process.running import LIVE_EVERY_S
from culm.wire.codec import Json, encode
from tests.support import FakeClock


@dataclass
class CommandHarness:
    context: ToolContext
    jobs: BackgroundJobs
    tools: Mapping[str, Tool]
    env: dict[str, str]
    live_output: list[str] = field(default_factory=list[str])

    @property
    def path(self) -> Path:
        return self.context.paths.root

    async def plan(
        self, tool: str, session_id: str = "s1", **arguments: Json
    ) -> CallPlan | CallResult:
        call = CallRequest(
            "call-1", tool, encode(arguments).decode(), arguments, session_id, "run-1"
        )
        plan = await self.tools[tool].prepare(call)
        assert isinstance(plan, CallPlan | CallResult)
        return plan

    async def call(self, tool: str, session_id: str = "s1", **arguments: Json) -> CallResult:
        """Run a tool call as if it had been approved."""
        plan = await self.plan(tool, session_id, **arguments)
        return plan if isinstance(plan, CallResult) else await plan.run(self.live_output.append)

    async def wait_for_output(self, text: str, clock: FakeClock | None = None) -> None:
        """Wait until a command has printed `text`; advance a fake clock meanwhile."""
        while text not in "".join(self.live_output):
            if clock is not None:
                clock.advance(LIVE_EVERY_S)
            await asyncio.sleep(0.005)

    async def advance_until_done(
        self, call: asyncio.Task[CallResult], clock: FakeClock, step_s: float
    ) -> CallResult:
        """Advance the clock until a call has ended.

        Output may arrive before the call waits, so a single step of the clock may come too early.
        """
        while not call.done():
            clock.advance(step_s)
            await asyncio.sleep(0.005)
        return call.result()

    async def bash(self, command: str, session_id: str = "s1", **arguments: Json) -> str:
        """Return the text that a model reads after a command."""
        return (await self.call("bash", session_id, command=command, **arguments)).content


@asynccontextmanager
async def open_command_harness(
    folder: Path, clock: Clock | None = None
) -> AsyncGenerator[CommandHarness]:
    """Use `clock` for the tools if given; processes always run in real time."""
    real, ids, file = LoopClock(), Ids(1), MemoryFile()
    workspace = folder / "work"
    workspace.mkdir()
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    async with (
        open_memory_store(file, real, ids) as store,
        open_file_executor(real) as work,
        open_processes(folder / "data", real, ids) as processes,
        open_jobs() as jobs,
    ):
        context = ToolContext(
            workspace_id="w1",
            paths=WorkspacePaths(workspace),
            executor=work,
            processes=processes,
            store=store,
            clock=clock or real,
            ids=ids,
            env=lambda: env,
            outputs=folder / "outputs",
        )
        yield make_command_harness(context, jobs, env)
    file.close()


def make_command_harness(
    context: ToolContext, jobs: BackgroundJobs, env: dict[str, str]
) -> CommandHarness:
    tools = (make_bash(context, jobs), make_job_output(jobs, context.clock), make_job_kill(jobs))
    return CommandHarness(context, jobs, {tool.spec.name: tool for tool in tools}, env)
