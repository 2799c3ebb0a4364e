"""The services that a worker gives its executor, besides the provision."""

from dataclasses import dataclass
from pathlib import Path

from culm.clock import Clock, format_time
from culm.ids import Ids
from culm.processes.base import Processes
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True)
class WorkerServices:
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
