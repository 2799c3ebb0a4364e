"""The position of a client in the event log, and the point from which its stream starts.

Pure. A separate module because both `hub.py` and `stream.py`, which imports the hub, need it.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from culm.errors import InvalidRequest
from culm.ids import Epoch

_CURSOR = re.compile(r"[0-9a-z]{1,32}\.[0-9]{1,18}")


class Cursor(NamedTuple):
    """The last event that a client has: the epoch of the database and the event's number.

    The epoch changes when a database is replaced, because its numbers start again.
    """

    epoch: Epoch
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.seq}"


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """Replay the events after `seq`, then send snapshots, then live events."""

    seq: int


@dataclass(frozen=True, slots=True)
class StartFresh:
    """Send current state and live events only, after a `resync` if there is a reason."""

    reason: str = ""


def parse_cursor(text: str) -> Cursor:
    if _CURSOR.fullmatch(text) is None:
        raise InvalidRequest("cursor must be <epoch>.<number>, as an event's id gave it")
    epoch, _, seq = text.partition(".")
    return Cursor(Epoch(epoch), int(seq))


def where_to_start(
    cursor: Cursor | None, *, epoch: Epoch, trimmed_to: int, last: int
) -> ResumeFrom | StartFresh:
    """Decide whether the log still has every event after the cursor."""
    if cursor is None:
        return StartFresh()
    if cursor.epoch != epoch:
        return StartFresh("another_epoch")
    if cursor.seq > last:
        return StartFresh("future")
    if cursor.seq < trimmed_to:
        return StartFresh("trimmed")
    return ResumeFrom(cursor.seq)
