"""What agents of all workspaces of a server work with: picked once, by `assemble.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from culm.fleet.host.dispatch import Fleet
from culm.mail.base import PostOffice

T = TypeVar("T")


class BlockingCall(Protocol):
    """Does what blocks as the disk does, beside the event loop."""

    async def __call__(self, job: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Means:
    fleet: Fleet  # Whose workers do what agents are given.
    discovery_dir: Path  # Where those are found.
    make_post: Callable[[Path], PostOffice]  # The mailboxes in a folder.
    blocking: BlockingCall
