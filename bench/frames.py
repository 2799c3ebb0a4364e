"""The text in an event of a benchmark: number, time and a flag at fixed offsets from the end.

The reader finds them without parsing; the first stream is parsed completely afterwards.
"""

import msgspec
from msgspec import Struct

from culm.events.views import encode_delta
from culm.ids import MessageId, SessionId
from culm.wire.events import MessageDelta

FRAME_BYTES = 300
DRAFTS = 16  # Deltas of one part in one loop turn become one, so a burst needs a part per event.
_TAIL = b'"}}}\n\n'  # The end of a delta frame after the text.

MORE, LAST, COUNT, TIME = ".", "E", "C", "T"
# The last event of a burst; the start of a counted or timed round.
LAST_END, COUNT_END, TIME_END = (flag.encode() + _TAIL for flag in (LAST, COUNT, TIME))
_NS = slice(-len(_TAIL) - 20, -len(_TAIL) - 1)
END_BYTES = 12  # A heartbeat may follow a frame within one read.


def delta(message_id: MessageId, session_id: SessionId, offset: int, text: str) -> MessageDelta:
    return MessageDelta(message_id, session_id, 0, 0, "text", offset, text)


_ID = "01234567-0123-0123-0123-0123456789ab"
_BARE = len(encode_delta(delta(MessageId(_ID), SessionId(_ID), 1000, "")))
_PAD = ("The quick brown fox jumps over the lazy dog. " * 4)[: FRAME_BYTES - _BARE - 30]


def text(seq: int, flag: str, now_ns: int = 0) -> str:
    return f"{_PAD}{seq:010d}{now_ns:019d}{flag}"


def texts(bursts: int, burst: int) -> list[str]:
    """Return the texts of a whole round, made before it is measured."""
    return [text(n, LAST if n % burst == burst - 1 else MORE) for n in range(bursts * burst)]


def sent_ns(data: bytes) -> int:
    """Return the publishing time of the last event in `data`; raise ValueError if it is cut."""
    return int(data[_NS])


class _Inner(Struct):
    payload: MessageDelta


class _Outer(Struct):
    type: str
    payload: _Inner


def count_wrong(stream: bytes) -> tuple[int, int]:
    """Return the number of events in a stream, and how many of them are out of order."""
    wrong = events = 0
    offsets: dict[str, int] = {}
    for frame in stream.split(b"\n\n"):
        if not frame.startswith(b"data: "):
            continue
        outer = msgspec.json.decode(frame[6:], type=_Outer)
        event = outer.payload.payload
        seq = int(event.text[-30:-20])
        expected = offsets.get(event.message_id, event.offset)
        offsets[event.message_id] = event.offset + len(event.text)
        wrong += outer.type != "message_delta" or seq != events or event.offset != expected
        events += 1
    return events, wrong
