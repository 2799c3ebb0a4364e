"""A workspace with its tools, a session in a store, and a secret file outside the workspace."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.clock import Clock, LoopClock
from culm.ids import Ids, SessionId
from culm.processes.direct import open_direct_processes
from culm.store.memory import MemoryFile
from culm.store.sessions import add_session, files_of_session
from culm.store.store import open_memory_store
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, ToolContext
from culm.tools.files.file_executor import WALL_S, open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.registry import make_tools
from culm.wire.codec import Json, encode
from tests.support import run_call

SECRET = "nobody may see this"
SESSION = SessionId("session-1")


@dataclass(frozen=True, slots=True)
class ToolHarness:
    path: Path
    tools: dict[str, Tool]
    context: ToolContext

    def write(self, name: str, content: str | bytes = "") -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    async def write_and_view(self, name: str, content: str | bytes) -> Path:
        """Write a file and let the session view it."""
        file = self.write(name, content)
        assert not (await self.call("view", file_path=str(file))).is_error
        return file

    async def call(self, tool: str, **arguments: Json) -> CallResult:
        """Run a tool call without asking for approval."""
        return await run_call(self.tools[tool], call_of(tool, arguments))

    async def plan(self, tool: str, **arguments: Json) -> CallPlan:
        """Return the plan of a call."""
        plan = await self.tools[tool].prepare(call_of(tool, arguments))
        assert isinstance(plan, CallPlan), plan
        return plan

    async def versions(self) -> list[tuple[str, int, str]]:
        """Return the file versions in the session's history, by path."""
        await self.context.store.write(lambda tx: None)  # Runs after all pending writes.
        files = await self.context.store.read(files_of_session(SESSION))
        return sorted((Path(file.path).name, file.version, file.content) for file in files)


def call_of(tool: str, arguments: dict[str, Json]) -> CallRequest:
    return CallRequest("call-1", tool, encode(arguments).decode(), arguments, SESSION)


async def run(plan: CallPlan) -> CallResult:
    return await plan.run(lambda _: None)


def refused(text: str) -> CallResult:
    return CallResult(text, is_error=True)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
async def harness(folder: Path) -> AsyncGenerator[ToolHarness]:
    async with open_tool_harness(folder) as harness:
        yield harness


@asynccontextmanager
async def open_tool_harness(
    folder: Path, clock: Clock | None = None, wall_s: float = WALL_S
) -> AsyncGenerator[ToolHarness]:
    real, file = LoopClock(), MemoryFile()
    async with (
        open_file_executor(clock or real, wall_s) as work,
        open_direct_processes(real) as processes,
        open_memory_store(file, real, Ids(1)) as store,
        asyncio.TaskGroup() as tasks,
    ):
        await store.write(add_session(SESSION, "one", sessions_max=9))
        context = ToolContext(
            workspace_id="workspace-1",
            paths=WorkspacePaths(folder),
            executor=work,
            processes=processes,
            store=store,
            clock=clock or real,
            ids=Ids(2),
            env=dict[str, str],
            outputs=folder.with_name("outputs"),
        )
        yield ToolHarness(folder, make_tools(context, BackgroundJobs(tasks)), context)
    file.close()
