"""Where a client is in the log, and what a stream must do about it."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from culm.errors import InvalidRequest
from culm.ids import Epoch

_CURSOR = re.compile(r"[0-9a-z]{1,32}\.[0-9]{1,18}")


class Cursor(NamedTuple):
    """The epoch names the database's incarnation; seq is the last event the client has."""

    epoch: Epoch
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.seq}"


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """Replay what came after `seq`, then snapshots, then live."""

    seq: int


@dataclass(frozen=True, slots=True)
class StartFresh:
    """Pending state, snapshots, live; preceded by `resync` if there is a reason for one."""

    reason: str = ""


def parse_cursor(text: str) -> Cursor:
    if _CURSOR.fullmatch(text) is None:
        raise InvalidRequest("cursor must be <epoch>.<number>, as an event's id gave it")
    epoch, _, seq = text.partition(".")
    return Cursor(Epoch(epoch), int(seq))


def where_to_start(
    cursor: Cursor | None, *, epoch: Epoch, trimmed_to: int, last: int
) -> ResumeFrom | StartFresh:
    if cursor is None:
        return StartFresh()
    if cursor.epoch != epoch:
        return StartFresh("another_epoch")
    if cursor.seq > last:
        return StartFresh("future")
    if cursor.seq < trimmed_to:
        return StartFresh("trimmed")
    return ResumeFrom(cursor.seq)
