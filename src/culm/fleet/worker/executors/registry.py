"""The executors by the kind in a provision."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Final

from culm.fleet.executor import Executor
from culm.fleet.provision import (
    ClaudeKind,
    CliKind,
    CodexKind,
    EchoKind,
    Provision,
    RuntimeKind,
)
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.executors.echo import EchoExecutor

# Modules that are imported at their first use, in the order in which a run uses them.
_LATE: Final = (
    "culm.fleet.worker.executors.bamboo_runtime",
    "culm.fleet.worker.executors.cli_adapter",
    "culm.model.anthropic.model",
    "culm.model.offline.model",
    "culm.model.openai.model",
    "culm.shell.walk",
)


@asynccontextmanager
async def open_executor(provision: Provision, services: WorkerServices) -> AsyncGenerator[Executor]:
    """Open the executor of a provision and import its modules; raises `BadProvision`."""
    match provision.executor:
        case EchoKind():
            yield EchoExecutor(services.clock)
        case RuntimeKind():
            from culm.fleet.worker.executors.bamboo_runtime import make_bamboo_runtime

            runtime = make_bamboo_runtime(provision, services)
            try:
                yield runtime
            finally:
                await runtime.close()
        case CliKind() | ClaudeKind() | CodexKind() as kind:
            from culm.fleet.worker.executors.cli_adapter import make_cli_adapter

            yield make_cli_adapter(kind, provision, services)


def preload() -> None:
    """Import the modules of all executors, so that the forks of this process need not."""
    for name in _LATE:
        import_module(name)
    from culm.model.catalog import entry_points_of
    from culm.model.offline.intents import parse_intents
    from culm.store.memory import empty_database
    from culm.tools.entry_points import GROUP, load_makers

    # Searching for tools of other packages takes longer than the rest of a first run. If there are
    # any, each worker loads them itself: foreign code may start threads, which forbids forking.
    if not entry_points_of(GROUP):
        load_makers()
    # Lazy values that every fork would otherwise have to build.
    empty_database()
    parse_intents("read a file")
