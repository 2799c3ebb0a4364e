"""Services for the sub-agents of all workspaces of a server; `assemble.py` creates them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from culm.fleet.host.dispatch import Fleet
from culm.mail.base import PostOffice

T = TypeVar("T")


class BlockingCall(Protocol):
    """Run a blocking function in a thread."""

    async def __call__(self, job: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class FleetServices:
    fleet: Fleet  # Its workers run the assignments.
    discovery_dir: Path  # Where workers register.
    make_post: Callable[[Path], PostOffice]  # Opens the mailboxes in a folder.
    blocking: BlockingCall
