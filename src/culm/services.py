"""The services that all workspaces of a server share; `assemble.py` creates them."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from culm.clock import Clock
from culm.fleet.host.caller import HostCallbacks, RunControl
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from culm.ids import Ids
from culm.mail.base import PostOffice
from culm.model.choice import MakeModel
from culm.processes.base import Processes
from culm.run.project_context import ContextPaths, ProjectContext
from culm.settings import Settings
from culm.tools.base import Tool, ToolContext
from culm.tools.files.file_executor import FileExecutor
from culm.tools.process.jobs import BackgroundJobs

T = TypeVar("T")


class BlockingCall(Protocol):
    """Run a blocking function in a thread."""

    async def __call__(self, job: Callable[[], T]) -> T: ...


class WorkerFleet(Protocol):
    """Executes the runs of agents in workers; see `Fleet.run`."""

    async def run(
        self, provision: Provision, spec: RunSpec, callbacks: HostCallbacks, controls: RunControl
    ) -> RunResult: ...


class ServerServices(Struct, frozen=True):
    settings: Settings
    clock: Clock
    ids: Ids
    env: Mapping[str, str]  # The server's own; a client's takes precedence.
    processes: Processes
    executor: FileExecutor
    run_blocking: BlockingCall
    make_model: MakeModel
    # Makes the tools of a workspace.
    make_tools: Callable[[ToolContext, BackgroundJobs], Mapping[str, Tool]]
    read_project_context: Callable[[Path, ContextPaths, float], Awaitable[ProjectContext]]
    fleet: WorkerFleet
    discovery_dir: Path  # Where workers register.
    make_post: Callable[[Path], PostOffice]  # Opens the mailboxes in a folder.
