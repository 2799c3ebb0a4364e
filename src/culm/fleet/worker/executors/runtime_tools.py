"""What the tools of one run work with; at the end of the run nothing of it is left.

A worker serves runs one after the other, or side by side, for different hosts. So what a run knows
of files, its list of what is to do and its background jobs are its own, in a store in memory.
"""

import logging
import os
import shutil
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from culm.config.schema import OwnTool
from culm.fleet.worker.executors.base import WorkerServices
from culm.ids import RunId, SessionId
from culm.store.memory import MemoryFile
from culm.store.sessions import add_session
from culm.store.store import open_memory_store
from culm.tools.base import Tool
from culm.tools.files.file_executor import FileExecutor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.own_tools import own_tools
from culm.tools.process.jobs import BackgroundJobs, open_jobs
from culm.tools.question import QUESTION
from culm.tools.registry import make_tools
from culm.tools.tool_context import ToolContext

log = logging.getLogger(__name__)

# Tools as other systems name them, where that is not our name.
FOREIGN_NAMES: Mapping[str, frozenset[str]] = {
    "Bash": frozenset({"bash"}),
    "Edit": frozenset({"edit", "multiedit"}),
    "Glob": frozenset({"glob"}),
    "Grep": frozenset({"grep"}),
    "Read": frozenset({"view"}),
    "Write": frozenset({"write"}),
}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Which tools a run is offered beside those that every run has."""

    agent_tools: Mapping[str, Tool] = field(default_factory=dict[str, Tool])
    own_tools: Mapping[str, OwnTool] = field(default_factory=dict[str, OwnTool])
    questions: bool = False
    disabled: Collection[str] = ()
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])  # By name: why.


@dataclass(frozen=True, slots=True)
class RuntimeTools:
    context: ToolContext
    tools: Mapping[str, Tool]
    # What a model reads that calls one of these all the same.
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
    """Tools for the workspace `path`; `folder` is the run's own, and is removed with it.

    Whoever uses it must not raise within the block, but may be cancelled.
    """
    clock, ids, file = services.clock, services.ids, MemoryFile()
    try:
        async with open_memory_store(file, clock, ids) as store:
            await store.write(add_session(session_id, "", sessions_max=1))
            context = ToolContext(
                workspace_id=run_id,  # So that what is ended with a run is that run's.
                inside=WorkspacePaths(path),
                work=work,
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
                    log.error("processes %s do not end; they are left behind", left)
                await _remove(work, folder)
    finally:
        file.crash()  # If this was cut short, what waits to be written is not missed.
        file.close()


async def _remove(work: FileExecutor, folder: Path) -> None:
    with suppress(TimeoutError):
        await work.run(lambda _: shutil.rmtree(folder, ignore_errors=True))


def _offered(context: ToolContext, jobs: BackgroundJobs, offer: ToolOffer) -> dict[str, Tool]:
    """As in a workspace of the server: people's own tools have what names are left."""
    tools = {**make_tools(context, jobs), **offer.agent_tools}
    tools |= own_tools(context, offer.own_tools, tools)
    disabled = offer.disabled
    gone = set(disabled).union(*(FOREIGN_NAMES.get(name, ()) for name in disabled))
    if not offer.questions:  # They need a host that passes them on to people.
        gone.add(QUESTION)
    return {name: tool for name, tool in tools.items() if name not in gone}


def _withheld(tools: Collection[str], offer: ToolOffer) -> dict[str, str]:
    """A tool that was taken away, or that people have made of that name, is none of these."""
    gone = {*tools, *offer.disabled}
    return {name: why for name, why in offer.withheld.items() if name not in gone}
