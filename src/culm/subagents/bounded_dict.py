"""A dict that evicts its oldest entry when it is full."""

from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedDict(Generic[T]):
    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: dict[str, T] = {}

    def find(self, name: str) -> T | None:
        return self._entries.get(name)

    def put(self, name: str, value: T) -> None:
        self._entries[name] = value
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]
