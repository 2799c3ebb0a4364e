"""What a search for lines is given and what comes of it, whichever program does it."""

import os
import threading
from dataclasses import dataclass

from culm.processes.base import ProcessOwner
from culm.tools.files.paths import OpenPath
from culm.tools.search.process import SearchEnd, SearchMatch


@dataclass(frozen=True, slots=True)
class LineSearch:
    """One search. Its place stays open for as long as the search goes on."""

    place: OpenPath
    pattern: str
    literal: bool
    include: str
    gitignore: str  # Rules that count from `place.root`.
    matches_max: int
    owner: ProcessOwner


@dataclass(frozen=True, slots=True)
class LineMatches:
    matches: list[SearchMatch]
    end: SearchEnd | None  # None if the search did not come to its end ...
    is_stopped: bool  # ... because its time was over.


class OwnedDescriptors:
    """Descriptors with one owner: what a thread still adds after the end is closed at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._is_over = False

    def __enter__(self) -> "OwnedDescriptors":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            for descriptor in self._open:
                os.close(descriptor)

    def add(self, descriptor: int) -> int:
        with self._lock:
            if not self._is_over:
                self._open.append(descriptor)
                return descriptor
        os.close(descriptor)
        raise OSError("nobody needs it any more")
