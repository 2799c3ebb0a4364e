"""A workspace in which commands are run for real: custody, jobs, and the tools around them."""

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
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool
from culm.tools.bash import make_bash
from culm.tools.files.file_executor import open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.job_kill import make_job_kill
from culm.tools.job_output import make_job_output
from culm.tools.process.jobs import BackgroundJobs, open_jobs
from culm.tools.process.running import LIVE_EVERY_S
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, encode
from tests.support import FakeClock


@dataclass
class Bench:
    context: ToolContext
    jobs: BackgroundJobs
    tools: Mapping[str, Tool]
    env: dict[str, str]
    watched: list[str] = field(default_factory=list[str])

    @property
    def path(self) -> Path:
        return self.context.inside.root

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
        """Let a tool do something, allowed by everybody."""
        plan = await self.plan(tool, session_id, **arguments)
        return plan if isinstance(plan, CallResult) else await plan.run(self.watched.append)

    async def heard(self, said: str, clock: FakeClock | None = None) -> None:
        """Wait until a command was heard to say something; a clock by hand is wound for it."""
        while said not in "".join(self.watched):
            if clock is not None:
                clock.advance(LIVE_EVERY_S)
            await asyncio.sleep(0.005)

    async def ended(
        self, call: asyncio.Task[CallResult], clock: FakeClock, each_s: float
    ) -> CallResult:
        """Let time pass until a call has ended.

        A command may be heard before its call waits, so one step of the clock may come too early.
        """
        while not call.done():
            clock.advance(each_s)
            await asyncio.sleep(0.005)
        return call.result()

    async def bash(self, command: str, session_id: str = "s1", **arguments: Json) -> str:
        """What a model reads of a command."""
        return (await self.call("bash", session_id, command=command, **arguments)).content


@asynccontextmanager
async def open_bench(folder: Path, clock: Clock | None = None) -> AsyncGenerator[Bench]:
    """With `clock`, time passes for the tools as that says; for processes it is always real."""
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
            inside=WorkspacePaths(workspace),
            work=work,
            processes=processes,
            store=store,
            clock=clock or real,
            ids=ids,
            env=lambda: env,
            outputs=folder / "outputs",
        )
        yield make_bench(context, jobs, env)
    file.close()


def make_bench(context: ToolContext, jobs: BackgroundJobs, env: dict[str, str]) -> Bench:
    tools = (make_bash(context, jobs), make_job_output(jobs, context.clock), make_job_kill(jobs))
    return Bench(context, jobs, {tool.spec.name: tool for tool in tools}, env)
