"""A workspace with its tools, a session in a store, and something outside that nobody may see."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.clock import Clock, LoopClock
from culm.ids import Ids, SessionId
from culm.processes.direct import open_direct_processes
from culm.store.history import files_of_session
from culm.store.memory import MemoryFile
from culm.store.sessions import add_session
from culm.store.store import open_memory_store
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool
from culm.tools.edit import make_edit
from culm.tools.files.file_executor import WALL_S, open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.glob import make_glob
from culm.tools.grep import make_grep
from culm.tools.ls import make_ls
from culm.tools.multiedit import make_multiedit
from culm.tools.tool_context import ToolContext
from culm.tools.view import make_view
from culm.tools.write import make_write
from culm.wire.codec import Json, encode
from tests.support import carried_out

SECRET = "nobody may see this"
SESSION = SessionId("session-1")


@dataclass(frozen=True, slots=True)
class Desk:
    path: Path
    tools: dict[str, Tool]
    context: ToolContext

    def write(self, name: str, content: str | bytes = "") -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    async def seen(self, name: str, content: str | bytes) -> Path:
        """A file that the session has viewed."""
        file = self.write(name, content)
        assert not (await self.call("view", file_path=str(file))).is_error
        return file

    async def call(self, tool: str, **arguments: Json) -> CallResult:
        """Let a tool do something, asked by nobody."""
        return await carried_out(self.tools[tool], call_of(tool, arguments))

    async def plan(self, tool: str, **arguments: Json) -> CallPlan:
        """What a call would do."""
        plan = await self.tools[tool].prepare(call_of(tool, arguments))
        assert isinstance(plan, CallPlan), plan
        return plan

    async def versions(self) -> list[tuple[str, int, str]]:
        """What the history of the session has, by path."""
        await self.context.store.write(lambda tx: None)  # All that is on its way has passed.
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
async def desk(folder: Path) -> AsyncGenerator[Desk]:
    async with open_desk(folder) as desk:
        yield desk


@asynccontextmanager
async def open_desk(
    folder: Path, clock: Clock | None = None, wall_s: float = WALL_S
) -> AsyncGenerator[Desk]:
    real, file = LoopClock(), MemoryFile()
    async with (
        open_file_executor(clock or real, wall_s) as work,
        open_direct_processes(real) as processes,
        open_memory_store(file, real, Ids(1)) as store,
    ):
        await store.write(add_session(SESSION, "one", sessions_max=9))
        context = ToolContext(
            workspace_id="workspace-1",
            inside=WorkspacePaths(folder),
            work=work,
            processes=processes,
            store=store,
            clock=clock or real,
            ids=Ids(2),
            env=dict[str, str],
            outputs=folder.with_name("outputs"),
        )
        tools: tuple[Tool, ...] = (
            make_edit(context),
            make_glob(context),
            make_grep(context),
            make_ls(context),
            make_multiedit(context),
            make_view(context),
            make_write(context),
        )
        yield Desk(folder, {tool.spec.name: tool for tool in tools}, context)
    file.close()
