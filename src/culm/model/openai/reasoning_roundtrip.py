"""Storage of reasoning data that a provider must receive back with the next request.

The dialect has no common field for it, so it is stored in our own format: JSON lines in the
`signature` of the answer's reasoning. No other module reads them.
"""

import msgspec
from msgspec import Struct

from culm.wire.codec import Json, encode

Detail = dict[str, Json]

_GROWING = ("text", "summary")  # The fields of a detail that arrive in pieces.


class ReasoningLine(Struct, frozen=True, omit_defaults=True):
    """One line: either the signature of a call, or all details of the reasoning."""

    call: int = 0  # The index of the call in the answer.
    signature: str = ""
    details: tuple[Detail, ...] = ()


def encode_line(line: ReasoningLine) -> str:
    return encode(line).decode() + "\n"


def parse_lines(signature: str) -> list[ReasoningLine]:
    """The lines in our format; the signatures of other adapters are ignored."""
    found: list[ReasoningLine] = []
    for line in signature.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=ReasoningLine))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    return found


class ReasoningDetails:
    """Assembles details of reasoning from their pieces."""

    def __init__(self) -> None:
        self.chars = 0  # Of all details.
        self._all: list[Detail] = []
        # Pieces of the last detail, joined once so that long reasoning takes linear time.
        self._pieces: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, piece: Detail) -> None:
        if not self._all or not _continues(self._all[-1], piece):
            self._join()
            self._all.append({})
        for name, value in piece.items():
            if name in _GROWING and isinstance(value, str):
                self._all[-1].setdefault(name, "")  # Keeps the order of the fields.
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
    return same and not piece.get("data")  # Encrypted details are never split.
