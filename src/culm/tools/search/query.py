"""What a search for lines is given and what comes of it, whichever program does it."""

import os
import threading
from dataclasses import dataclass

from culm.processes.base import Owner
from culm.tools.files.paths import Place
from culm.tools.search.process import End, Match


@dataclass(frozen=True, slots=True)
class Sought:
    """One search. Its place stays open for as long as the search goes on."""

    place: Place
    pattern: str
    literal: bool
    include: str
    gitignore: str  # Rules that count from `place.root`.
    matches_max: int
    owner: Owner


@dataclass(frozen=True, slots=True)
class Found:
    matches: list[Match]
    end: End | None  # None if the search did not come to its end ...
    is_stopped: bool  # ... because its time was over.


class Handles:
    """Descriptors with one owner: what a thread still adds after the end is closed at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._is_over = False

    def __enter__(self) -> "Handles":
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
