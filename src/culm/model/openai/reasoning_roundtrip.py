"""What a provider of this dialect must see again, between the answer and the next request.

The dialect has no one place for it, so we keep it in our own words: one JSON line after another
in the `signature` of the answer's reasoning. Nobody else reads them.
"""

import msgspec
from msgspec import Struct

from culm.wire.codec import Json, encode

Detail = dict[str, Json]

_GROWING = ("text", "summary")  # The fields of a detail that come in pieces.


class ReasoningLine(Struct, frozen=True, omit_defaults=True):
    """One line: either the signature of a call, or all details of the reasoning."""

    call: int = 0  # Which call of the answer, counted from 0.
    signature: str = ""
    details: tuple[Detail, ...] = ()


def encode_kept(kept: ReasoningLine) -> str:
    return encode(kept).decode() + "\n"


def parse_kept(signature: str) -> list[ReasoningLine]:
    """The lines that are ours; what another adapter signed is nothing to this one."""
    found: list[ReasoningLine] = []
    for line in signature.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=ReasoningLine))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    return found


class ReasoningDetails:
    """Details of reasoning, put together from their pieces as they would have come whole."""

    def __init__(self) -> None:
        self.chars = 0  # Of all that grows.
        self._all: list[Detail] = []
        # The pieces of the last one's texts: joined once, so that a long thought stays linear.
        self._pieces: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, piece: Detail) -> None:
        if not self._all or not _continues(self._all[-1], piece):
            self._join()
            self._all.append({})
        for name, value in piece.items():
            if name in _GROWING and isinstance(value, str):
                self._all[-1].setdefault(name, "")  # Its place among the others.
                self._pieces.setdefault(name, []).append(value)
                self.chars += len(value)
            elif value is not None or name not in self._all[-1]:
                self._all[-1][name] = value
                self.chars += len(value) if isinstance(value, str) else 0

    def whole(self) -> tuple[Detail, ...]:
        self._join()
        return tuple(self._all)

    def _join(self) -> None:
        for name, pieces in self._pieces.items():
            self._all[-1][name] = (self._all[-1].get(name) or "") + "".join(pieces)
        self._pieces.clear()


def _continues(last: Detail, piece: Detail) -> bool:
    same = all(last.get(name) == piece.get(name) for name in ("type", "index"))
    return same and not piece.get("data")  # Encrypted ones come whole.
