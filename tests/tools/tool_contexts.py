"""A tool context with real processes; all of them have ended when its block ends."""

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from culm.clock import LoopClock
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.tools.base import CallRequest, ToolContext
from culm.tools.files.file_executor import open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.wire.codec import Json, encode

WORKSPACE = "workspace-1"


@asynccontextmanager
async def open_context(
    folder: Path, env: Mapping[str, str] | None = None, name: str = "work"
) -> AsyncGenerator[ToolContext]:
    """Open a context whose workspace is in `folder`."""
    (folder / name).mkdir()
    clock, ids, file = LoopClock(), Ids(), MemoryFile()
    base = {"PATH": os.environ["PATH"], "HOME": str(folder), **(env or {})}
    try:
        async with (
            open_processes(folder / "data", clock, ids) as processes,
            open_file_executor(clock) as work,
            open_memory_store(file, clock, ids) as store,
        ):
            yield ToolContext(
                workspace_id=WORKSPACE,
                paths=WorkspacePaths(folder / name),
                executor=work,
                processes=processes,
                store=store,
                clock=clock,
                ids=ids,
                env=lambda: base,
                outputs=folder / "outputs",
            )
    finally:
        file.close()


def call_of(tool: str, arguments: dict[str, Json]) -> CallRequest:
    text = encode(arguments).decode()
    return CallRequest("call-1", tool, text, arguments, "session-1", "run-1", "message-1")


def open_descriptors() -> set[str]:
    """Return the pipes that this process has open."""
    found: set[str] = set()
    for name in Path("/proc/self/fd").iterdir():
        try:
            target = str(name.readlink())
        except OSError:
            continue
        if target.startswith("pipe:"):
            found.add(f"{name.name} {target}")
    return found
