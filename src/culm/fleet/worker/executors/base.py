"""What an executor is given by the worker it works in, beside the provision."""

from dataclasses import dataclass
from pathlib import Path

from culm.clock import Clock
from culm.fleet.times import format_time
from culm.ids import Ids
from culm.processes.base import Processes
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """The same for every run of a worker; nothing of it is opened before its first use."""

    clock: Clock
    ids: Ids
    processes: Processes  # Who starts the first process also starts, or asks for, its keeper.
    storage: Path  # Private to this worker. It is there once `make_private` was called.


def make_private(folder: Path) -> Path:
    """The folder, which only its owner may enter; raises OSError. Blocks as the disk does."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def execution_started(run_id: str, session_id: str, now_s: float) -> dict[str, Json]:
    """What a run tells before it does anything. A parent that heard it does not begin it anew."""
    return {
        "type": "execution_started",
        "run_id": run_id,
        "session_id": session_id,
        "started_at": format_time(now_s),
    }
