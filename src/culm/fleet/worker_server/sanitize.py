"""What of an executor's words fits the wire: no half characters, no bottomless nesting.

Other hosts of this wire end a run over either.
"""

import json
import re
from collections.abc import Mapping
from typing import Final, cast

from culm.errors import TooLarge
from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX
from culm.wire.codec import Json, encodable, encode

EVENT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (1 << 20)  # The frame around it has room as well ...
ASKED_BYTES_MAX: Final = REQUEST_BYTES_MAX - (64 << 10)  # ... as that of a request has.
LEVELS_MAX: Final = 100  # Some read 127, and the frame around it has a few.

_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_HALF_PAIR: Final = re.compile(rb"\\u[dD]")  # Or a whole one: that is for the slow reader to say.


class TooDeep(TooLarge):
    def __init__(self) -> None:
        super().__init__(f"what is said may be nested {LEVELS_MAX} levels deep, and not more")


def fit(said: Mapping[str, Json], bytes_max: int = EVENT_BYTES_MAX) -> bytes:
    """It in JSON; raises `TooLarge`, `TooDeep`, and TypeError for what JSON cannot hold."""
    try:
        data = _encoded(said)
        # Nearly all events are flat; the rest is looked at.
        if not _SCALARS.issuperset(map(type, said.values())):
            data = _looked_at(data)
    except RecursionError as exc:
        raise TooDeep from exc
    if len(data) > bytes_max:
        raise TooLarge(f"at most {bytes_max} bytes can be said at once, not {len(data)}")
    return data


def _encoded(said: Mapping[str, Json]) -> bytes:
    try:
        return encode(said)
    except UnicodeEncodeError:
        return encode(encodable(dict(said)))


def _looked_at(data: bytes) -> bytes:
    # Half a pair may also stand in JSON that was only passed on, and only as an escape.
    if _HALF_PAIR.search(data):
        data = encode(encodable(json.loads(data)))
    has_many = data.count(b"{") + data.count(b"[") > LEVELS_MAX
    if has_many and _levels(json.loads(data), LEVELS_MAX) < 0:
        raise TooDeep
    return data


def _levels(value: Json, left: int) -> int:
    """How many levels more it could have; below 0 if it has too many."""
    if left < 0 or not isinstance(value, dict | list):
        return left
    inner = cast("list[Json]", [*value.values()] if isinstance(value, dict) else value)
    return min((_levels(one, left - 1) for one in inner), default=left - 1)
