"""What the tools of one workspace work with; made once per workspace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from culm.clock import Clock
from culm.ids import Ids
from culm.processes.base import Processes
from culm.store.store import Store
from culm.tools.files.file_executor import FileExecutor
from culm.tools.files.paths import WorkspacePaths


@dataclass(frozen=True, slots=True)
class ToolContext:
    workspace_id: str
    inside: WorkspacePaths
    work: FileExecutor
    processes: Processes
    store: Store
    clock: Clock
    ids: Ids
    env: Callable[[], Mapping[str, str]]  # Of processes, as it is now.
    outputs: Path  # Where output that is too long for a model is kept; read without asking.
