"""The tools of one run and their context, which is removed at the end of the run.

A worker serves runs one after another or at the same time, for different hosts. Each run therefore
has its own read stamps, todo list and background jobs, in an in-memory store.
"""

import logging
import os
import shutil
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import Struct, field

from culm.config.schema import OwnTool
from culm.fleet.worker.executors.base import WorkerServices
from culm.ids import RunId, SessionId
from culm.store.memory import MemoryFile
from culm.store.sessions import add_session
from culm.store.store import open_memory_store
from culm.tools.base import Tool, ToolContext
from culm.tools.files.file_executor import FileExecutor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.own_tools import own_tools
from culm.tools.process.jobs import BackgroundJobs, open_jobs
from culm.tools.question import QUESTION
from culm.tools.registry import make_tools

log = logging.getLogger(__name__)

# Our tools by the names of other systems.
FOREIGN_NAMES: Mapping[str, frozenset[str]] = {
    "Bash": frozenset({"bash"}),
    "Edit": frozenset({"edit", "multiedit"}),
    "Glob": frozenset({"glob"}),
    "Grep": frozenset({"grep"}),
    "Read": frozenset({"view"}),
    "Write": frozenset({"write"}),
}


class ToolOffer(Struct, frozen=True):
    """The tools of a run besides those that every run has."""

    agent_tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    own_tools: Mapping[str, OwnTool] = field(default_factory=dict[str, OwnTool])
    questions: bool = False
    disabled: Collection[str] = ()
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])  # Reasons by name.


class RuntimeTools(Struct, frozen=True):
    context: ToolContext
    tools: Mapping[str, Tool]
    # The results of calls to tools that are not offered, by name.
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def home(self) -> str:
        return os.path.realpath(self.context.env().get("HOME") or Path.home())


@asynccontextmanager
async def open_runtime_tools(
    services: WorkerServices,
    work: FileExecutor,
    path: Path,
    folder: Path,
    env: Mapping[str, str],
    *,
    run_id: RunId,
    session_id: SessionId,
    offer: ToolOffer,
) -> AsyncGenerator[RuntimeTools]:
    """Open tools for the workspace `path`; `folder` is the run's own and is removed at its end.

    The block must not raise, but may be cancelled.
    """
    clock, ids, file = services.clock, services.ids, MemoryFile()
    try:
        async with open_memory_store(file, clock, ids) as store:
            await store.write(add_session(session_id, "", sessions_max=1))
            context = ToolContext(
                workspace_id=run_id,  # So that the end of a run ends only its own processes.
                paths=WorkspacePaths(path),
                executor=work,
                processes=services.processes,
                store=store,
                clock=clock,
                ids=ids,
                env=lambda: env,
                outputs=folder / "outputs",
            )
            try:
                async with open_jobs() as jobs:
                    tools = _offered(context, jobs, offer)
                    yield RuntimeTools(context, tools, _withheld(tools, offer))
            finally:
                left = await services.processes.end_all(run_id)
                if left:
                    log.error("cannot end processes %s", left)
                await _remove(work, folder)
    finally:
        file.crash()  # After an interrupted close, unwritten data is not needed.
        file.close()


async def _remove(work: FileExecutor, folder: Path) -> None:
    with suppress(TimeoutError):
        await work.run(lambda _: shutil.rmtree(folder, ignore_errors=True))


def _offered(context: ToolContext, jobs: BackgroundJobs, offer: ToolOffer) -> dict[str, Tool]:
    """Select the tools as a workspace does: an own tool cannot replace a tool of the same name."""
    tools = {**make_tools(context, jobs), **offer.agent_tools}
    tools |= own_tools(context, offer.own_tools, tools)
    disabled = offer.disabled
    gone = set(disabled).union(*(FOREIGN_NAMES.get(name, ()) for name in disabled))
    if not offer.questions:  # Questions need a host that passes them on to people.
        gone.add(QUESTION)
    return {name: tool for name, tool in tools.items() if name not in gone}


def _withheld(tools: Collection[str], offer: ToolOffer) -> dict[str, str]:
    """Select the reasons for tools that are neither disabled nor replaced by an own tool."""
    gone = {*tools, *offer.disabled}
    return {name: why for name, why in offer.withheld.items() if name not in gone}
