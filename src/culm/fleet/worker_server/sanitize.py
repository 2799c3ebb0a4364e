"""Make an executor's values fit the wire: no unpaired surrogates, no excessive nesting.

Other hosts of this protocol end a run over either.
"""

import json
import re
from collections.abc import Mapping
from typing import Final, cast

from culm.errors import TooLarge
from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX
from culm.wire.codec import Json, encodable, encode

EVENT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (1 << 20)  # The enclosing frame fits as well ...
ASKED_BYTES_MAX: Final = REQUEST_BYTES_MAX - (64 << 10)  # ... as does that of a request.
LEVELS_MAX: Final = 100  # Some parsers allow 127, and the enclosing frame has a few.

_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_HALF_PAIR: Final = re.compile(rb"\\u[dD]")  # Or a complete pair: the slow parser decides.


class TooDeep(TooLarge):
    def __init__(self) -> None:
        super().__init__(f"a value may be nested at most {LEVELS_MAX} levels deep")


def fit(value: Mapping[str, Json], bytes_max: int = EVENT_BYTES_MAX) -> bytes:
    """Encode as JSON; raises `TooLarge`, `TooDeep`, and TypeError for values JSON cannot hold."""
    try:
        data = _encoded(value)
        # Nearly all events are flat; only the others are checked.
        if not _SCALARS.issuperset(map(type, value.values())):
            data = _checked(data)
    except RecursionError as exc:
        raise TooDeep from exc
    if len(data) > bytes_max:
        raise TooLarge(f"at most {bytes_max} bytes can be sent at once, not {len(data)}")
    return data


def _encoded(value: Mapping[str, Json]) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(encodable(dict(value)))


def _checked(data: bytes) -> bytes:
    # An unpaired surrogate may also occur, as an escape, in JSON that was only forwarded.
    if _HALF_PAIR.search(data):
        data = encode(encodable(json.loads(data)))
    has_many = data.count(b"{") + data.count(b"[") > LEVELS_MAX
    if has_many and _levels(json.loads(data), LEVELS_MAX) < 0:
        raise TooDeep
    return data


def _levels(value: Json, left: int) -> int:
    """Return how many more levels fit; below 0 if there are too many."""
    if left < 0 or not isinstance(value, dict | list):
        return left
    inner = cast("list[Json]", [*value.values()] if isinstance(value, dict) else value)
    return min((_levels(one, left - 1) for one in inner), default=left - 1)
