"""CPU cost of one more event in the real hub with free writes, for any number of streams."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from bench import frames
from culm.clock import LoopClock
from culm.events.hub import Hub, TransientEvent
from culm.events.views import Filter
from culm.ids import Epoch, MessageId, SessionId
from culm.settings import Settings
from culm.wire.events import MessageDelta

EVENTS = 32  # More than one, to separate the cost of an event from that of a turn.
_SESSION = SessionId("01234567-0123-0123-0123-0123456789ab")


class NullTransport:
    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


class NoState:
    """A workspace without open messages and without presence."""

    @property
    def messages(self) -> "NoState":
        return self

    def open_ids(self) -> list[tuple[MessageId, SessionId]]:
        return []

    def find_shown(self, message_id: MessageId) -> None:
        return None

    def record(self, deltas: Sequence[MessageDelta]) -> bool:
        return True

    def state_events(self) -> list[TransientEvent]:
        return []


async def event_us(streams: int, turns: int) -> float:
    """Return the CPU time in µs that an event adds to a turn with this many streams."""
    settings = Settings()
    hub = Hub(
        Epoch("bench"),
        0,
        LoopClock(),
        NoState(),
        streams_max=settings.streams_max,
        buffer_bytes_max=settings.stream_buffer_bytes,
    )
    for _ in range(streams):
        subscriber = hub.join(NullTransport(), "delta", Filter(sessions=frozenset({_SESSION})))
        hub.go_live(subscriber)
    extra: list[float] = []
    for _ in range(turns):
        one, many = _turn_s(hub, 1), _turn_s(hub, 1 + EVENTS)
        extra.append((many - one) / EVENTS * 1e6)
        await asyncio.sleep(0)  # Lets the hub's own callbacks, now without work, run.
    hub.close()
    return median(extra)


def _turn_s(hub: Hub, events: int) -> float:
    text = frames.text(0, frames.MORE)
    start_s = time.thread_time()
    for n in range(events):
        hub.publish_delta(frames.delta(MessageId(f"{_SESSION[:-2]}{n:02d}"), _SESSION, 1000, text))
    hub.flush()
    return time.thread_time() - start_s
