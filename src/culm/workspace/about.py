"""What a workspace is: said once, by whoever created it."""

from dataclasses import dataclass
from pathlib import Path

from culm.ids import WorkspaceId


@dataclass(frozen=True, slots=True)
class WorkspaceInfo:
    """What the first creator said; later ones change nothing."""

    id: WorkspaceId
    path: Path  # Canonical; `given_path` is what clients see.
    given_path: str
    root: Path
    yolo: bool = False
    debug: bool = False
    channels: tuple[str, ...] = ()
