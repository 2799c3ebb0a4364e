"""The executors of a worker, by the kind in its provision, and the services they get."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

from msgspec import Struct

from culm.clock import Clock, format_time
from culm.fleet.executor import Executor
from culm.fleet.provision import (
    ClaudeKind,
    CliKind,
    CodexKind,
    EchoKind,
    Provision,
    RuntimeKind,
)
from culm.fleet.worker.executors.echo import EchoExecutor
from culm.ids import Ids
from culm.processes.base import Processes
from culm.wire.codec import Json

# Modules that are imported at their first use, in the order in which a run uses them.
_LATE: Final = (
    "culm.fleet.worker.executors.bamboo_runtime",
    "culm.fleet.worker.executors.cli_adapter",
    "culm.model.anthropic.model",
    "culm.model.offline.model",
    "culm.model.openai.model",
    "culm.shell.walk",
)


class WorkerServices(Struct, frozen=True):
    """Shared by all runs of a worker; everything is opened at its first use."""

    clock: Clock
    ids: Ids
    processes: Processes  # The first start also starts or requests the supervisor.
    storage: Path  # Private to this worker; exists once `make_private` was called.


def make_private(folder: Path) -> Path:
    """Create a folder that only its owner may enter; raises OSError. Blocks on disk I/O."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def execution_started(run_id: str, session_id: str, now_s: float) -> dict[str, Json]:
    """Build the first event of a run; a host that has received it does not start the run again."""
    return {
        "type": "execution_started",
        "run_id": run_id,
        "session_id": session_id,
        "started_at": format_time(now_s),
    }


@asynccontextmanager
async def open_executor(provision: Provision, services: WorkerServices) -> AsyncGenerator[Executor]:
    """Open the executor of a provision and import its modules; raises `BadProvision`."""
    match provision.executor:
        case EchoKind():
            yield EchoExecutor(services.clock)
        case RuntimeKind():
            from culm.fleet.worker.executors.bamboo_runtime import BambooRuntime

            runtime = BambooRuntime(provision, services)
            try:
                yield runtime
            finally:
                await runtime.close()
        case CliKind() | ClaudeKind() | CodexKind() as kind:
            from culm.fleet.worker.executors.cli_adapter import CliAdapter

            yield CliAdapter(kind, provision, services)


def preload_executors() -> None:
    """Import the modules of all executors, so that the forks of this process need not."""
    for name in _LATE:
        import_module(name)
    from culm.model.catalog import entry_points_of
    from culm.model.offline.intents import parse_intents
    from culm.store.memory import empty_database
    from culm.tools.registry import GROUP, load_makers

    # Searching for tools of other packages takes longer than the rest of a first run. If there are
    # any, each worker loads them itself: foreign code may start threads, which forbids forking.
    if not entry_points_of(GROUP):
        load_makers()
    # Lazy values that every fork would otherwise have to build.
    empty_database()
    parse_intents("read a file")
