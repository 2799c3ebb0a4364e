"""Publishes committed events: encodes once per view, joins once per loop iteration, writes to all.

Owns the subscribers of one workspace. `stream.py` reads events that a subscriber has missed; the
workspace owns the open messages and their text.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from culm.clock import Clock, Timer
from culm.errors import LimitExceeded
from culm.events.views import (
    HEARTBEAT,
    Cursor,
    Filter,
    Frame,
    View,
    encode_delta,
    encode_frame,
    shows,
)
from culm.ids import Epoch, MessageId, SessionId
from culm.store.base import Op, StoredEvent
from culm.wire.events import MessageDelta

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
STALL_BEATS = 4  # A client that reads nothing for a minute is disconnected; it can resume.
CLOSE_DRAIN_S = 5.0  # Time for a client to read its last events when the workspace closes.
# Under load text is collected: a frame of a few tokens costs more than its content.
DELTA_LINGER_S = 0.002
COALESCE_S = 0.033  # Interval at which the Crush view repeats a growing message, as in Crush.
_PEER_GONE = (RuntimeError, OSError)  # Raised by a write to a peer that is gone.


class StreamTransport(Protocol):
    """The part of an asyncio transport that the hub uses."""

    def write(self, data: bytes) -> None: ...
    def is_closing(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...
    def abort(self) -> None: ...


class TransientEvent(NamedTuple):
    """An event that is published but not stored."""

    type: str
    session_id: str
    payload: bytes  # JSON
    op: Op = "updated"
    view: View | None = None  # If set, only this view includes the event.

    def is_for(self, view: View) -> bool:
        return self.view is None or self.view == view


class OpenMessages(Protocol):
    """The open messages, each in its published state."""

    def open_ids(self) -> Iterable[tuple[MessageId, SessionId]]: ...
    def find_shown(self, message_id: MessageId) -> TransientEvent | None: ...

    def record(self, deltas: Sequence[MessageDelta]) -> bool:
        """Keep text that is about to be sent; False if it must not be sent."""
        ...


class StreamState(Protocol):
    """The state outside the log, which every new stream is sent."""

    @property
    def messages(self) -> OpenMessages: ...
    def state_events(self) -> Iterable[TransientEvent]: ...


class Subscriber(Struct, eq=False):
    """One event stream of one client."""

    transport: StreamTransport
    view: View
    filter: Filter
    seq: int  # All stored events up to here were written to it; not updated while live.
    limit: int = 0  # With more unread bytes it is slow.
    unread: int = 0  # Unread bytes at the last heartbeat ...
    idle_beats: int = 0  # ... and the number of heartbeats without progress.
    live: bool = False
    ended: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # Set when it falls behind or ends.

    def end(self) -> None:
        self.ended = True
        self.wake.set()

    def write(self, data: bytes) -> bool:
        """Return False if the peer is gone, in which case a write raises under uvloop."""
        if self.transport.is_closing():
            return False
        try:
            self.transport.write(data)
        except _PEER_GONE:
            return False
        return True

    def is_stuck(self) -> bool:
        """Return True if the peer has read nothing for too long; call once per heartbeat."""
        before, self.unread = self.unread, self.transport.get_write_buffer_size()
        self.idle_beats = self.idle_beats + 1 if self.unread and self.unread >= before else 0
        return self.idle_beats > STALL_BEATS


# Subscribers that receive the same bytes, in order of arrival.
_Feeds = dict[tuple[View, Filter], dict[Subscriber, None]]


class Hub:
    """Publishes the events of one workspace, in plain functions on the event loop."""

    def __init__(
        self,
        epoch: Epoch,
        seq: int,
        clock: Clock,
        state: StreamState,
        *,
        streams_max: int,
        buffer_bytes_max: int,
    ) -> None:
        self.seq = seq  # The last stored event that was sent.
        self.epoch = epoch
        self._clock = clock
        self._state = state
        self._streams_max = streams_max
        self._buffer_bytes_max = buffer_bytes_max
        self._subscribers: dict[Subscriber, None] = {}
        self._feeds: _Feeds = {}
        self._has_crush_feed = False
        self._batch: list[StoredEvent | MessageDelta | TransientEvent] = []
        self._flushing: asyncio.Handle | None = None  # The scheduled flush ...
        self._lingering = False  # ... and True if it waits for more text.
        self._flushed_s = 0.0
        self._merge: dict[tuple[MessageId, int], MessageDelta] = {}
        self._grown: set[MessageId] = set()
        self._grown_timer: Timer | None = None
        self._heartbeat: Timer | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.seq)

    # --- publishing

    def publish(self, events: tuple[StoredEvent, ...]) -> None:
        """Publish stored events, which are committed and numbered in this order."""
        self._queue(*events)
        self._merge.clear()
        for event in events:
            if event.type == "message":
                self._grown.discard(MessageId(event.entity_id))

    def publish_transient(self, event: TransientEvent) -> None:
        self._queue(event)
        self._merge.clear()

    def publish_delta(self, delta: MessageDelta) -> None:
        """Publish text at once, or slightly later under load; adjacent deltas are merged."""
        key = (delta.message_id, delta.part)
        last = self._merge.get(key)
        if last is not None and last.rev == delta.rev:
            last.text += delta.text
            return
        self._merge[key] = delta
        self._batch.append(delta)
        self._flush_in(self._flushed_s + DELTA_LINGER_S - self._loop.time())
        if self._has_crush_feed:
            self._grown.add(delta.message_id)
            if self._grown_timer is None:
                self._grown_timer = self._clock.call_later(COALESCE_S, self._publish_growth)

    def flush(self) -> None:
        """Write the batch to every transport now."""
        batch, self._batch = self._batch, []
        self._merge.clear()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if not batch:
            return
        self._flushed_s = self._loop.time()
        deltas = [item for item in batch if isinstance(item, MessageDelta)]
        if deltas and not self._state.messages.record(deltas):
            batch = [item for item in batch if not isinstance(item, MessageDelta)]
        frames: dict[View, list[Frame]] = {}
        for view, _ in self._feeds:
            if view not in frames:
                frames[view] = self._encode(view, batch)
        for item in reversed(batch):
            if isinstance(item, StoredEvent):
                self.seq = item.seq
                break
        for (view, filter_), subscribers in list(self._feeds.items()):
            data = _join_frames(frames[view], filter_)
            if data:
                self._write_all(subscribers, data)

    def _queue(self, *items: StoredEvent | MessageDelta | TransientEvent) -> None:
        self._batch.extend(items)
        self._flush_in(0.0)

    def _flush_in(self, delay_s: float) -> None:
        """Flush after a delay, or in the next loop iteration."""
        if delay_s > 0:
            if self._flushing is None:
                self._flushing = self._loop.call_later(delay_s, self.flush)
                self._lingering = True
        elif self._flushing is None or self._lingering:
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = self._loop.call_soon(self.flush)
            self._lingering = False

    def _encode(
        self, view: View, batch: Sequence[StoredEvent | MessageDelta | TransientEvent]
    ) -> list[Frame]:
        frames: list[Frame] = []
        for item in batch:
            try:
                if isinstance(item, MessageDelta):
                    if view == "delta":
                        frames.append(Frame("message_delta", item.session_id, encode_delta(item)))
                elif shows(view, item.type) and (
                    isinstance(item, StoredEvent) or item.is_for(view)
                ):
                    frames.append(Frame(item.type, item.session_id, self.encode_one(view, item)))
            except Exception:  # boundary: one bad event must not drop the rest
                log.exception("an event cannot be encoded")
        return frames

    def encode_one(self, view: View, item: StoredEvent | TransientEvent) -> bytes:
        if isinstance(item, TransientEvent):
            return encode_frame(view, item.type, item.op, item.payload)
        cursor = str(Cursor(self.epoch, item.seq))
        return encode_frame(view, item.type, item.op, item.payload, cursor)

    def _write_all(self, subscribers: dict[Subscriber, None], data: bytes) -> None:
        # `Subscriber.write` is inlined: this loop is the main cost of a delivery.
        behind: list[Subscriber] = []
        gone: list[Subscriber] = []
        for subscriber in subscribers:
            transport = subscriber.transport
            if transport.is_closing():
                gone.append(subscriber)
                continue
            try:
                transport.write(data)
            except _PEER_GONE:
                gone.append(subscriber)
                continue
            if transport.get_write_buffer_size() > subscriber.limit:
                behind.append(subscriber)
        for subscriber in behind:
            self._stop_feeding(subscriber)
            subscriber.wake.set()
        for subscriber in gone:
            self._stop_feeding(subscriber)
            subscriber.end()

    def _publish_growth(self) -> None:
        """Send grown messages to the Crush view, which has no deltas: whole, once per interval."""
        self._grown_timer = None
        grown, self._grown = self._grown, set()
        if not self._has_crush_feed:
            return
        self.flush()
        for message_id in grown:
            message = self._state.messages.find_shown(message_id)
            if message is None:
                continue  # It ended meanwhile, and was published completely.
            data = encode_frame("crush", "message", "updated", message.payload)
            for (view, filter_), subscribers in list(self._feeds.items()):
                if view == "crush" and filter_.passes("message", message.session_id):
                    self._write_all(subscribers, data)

    def _beat(self) -> None:
        self._heartbeat = self._clock.call_later(HEARTBEAT_S, self._beat)
        for (view, _), subscribers in list(self._feeds.items()):
            for subscriber in list(subscribers):
                if subscriber.is_stuck():
                    subscriber.transport.abort()
                elif not subscriber.unread:
                    subscriber.limit = self._buffer_bytes_max  # It has read its initial data.
            self._write_all(subscribers, HEARTBEAT[view])

    # --- subscribers

    def join(self, transport: StreamTransport, view: View, filter_: Filter) -> Subscriber:
        """Register a stream; `go_live` later sends it everything from here on."""
        if len(self._subscribers) >= self._streams_max:
            raise LimitExceeded("event streams on this workspace", self._streams_max)
        self.flush()
        subscriber = Subscriber(transport, view, filter_, self.seq)
        self._subscribers[subscriber] = None
        if self._heartbeat is None:
            self._heartbeat = self._clock.call_later(HEARTBEAT_S, self._beat)
        return subscriber

    def go_live(self, subscriber: Subscriber) -> bool:
        """Start live delivery, or return False if the subscriber must read more of the log first.

        Sends the state outside the log and a snapshot of each open message, without a gap before
        the live events.
        """
        self.flush()
        if subscriber.seq < self.seq:
            return False
        data = self._attach_data(subscriber.view, subscriber.filter)
        if subscriber.ended or not subscriber.write(data):
            subscriber.end()
            return True
        # The initial data does not count as slowness, however large it is.
        initial = subscriber.transport.get_write_buffer_size()
        subscriber.limit = self._buffer_bytes_max + initial
        subscriber.live = True
        subscriber.wake.clear()
        self._feeds.setdefault((subscriber.view, subscriber.filter), {})[subscriber] = None
        self._on_feeds()
        return True

    def leave(self, subscriber: Subscriber) -> None:
        self._stop_feeding(subscriber)
        subscriber.end()
        self._subscribers.pop(subscriber, None)
        if not self._subscribers and self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None

    def close(self) -> None:
        """End all streams: live ones after their last events, others at once (they can resume)."""
        self.flush()
        for timer in (self._grown_timer, self._heartbeat):
            if timer is not None:
                timer.cancel()
        for subscriber in list(self._subscribers):
            transport = subscriber.transport
            if not subscriber.live:
                transport.abort()
            elif transport.get_write_buffer_size():
                self._clock.call_later(CLOSE_DRAIN_S, transport.abort)
            self.leave(subscriber)

    def _attach_data(self, view: View, filter_: Filter) -> bytes:
        frames = [
            self.encode_one(view, event)
            for event in self._state.state_events()
            if shows(view, event.type)
            and event.is_for(view)
            and filter_.passes(event.type, event.session_id)
        ]
        type_ = "message_snapshot" if view == "delta" else "message"
        for message_id, session_id in self._state.messages.open_ids():
            if filter_.passes(type_, session_id):
                message = self._state.messages.find_shown(message_id)
                if message is not None:
                    frames.append(encode_frame(view, type_, "updated", message.payload))
        return b"".join(frames)

    def _stop_feeding(self, subscriber: Subscriber) -> None:
        if not subscriber.live:
            return
        subscriber.live = False
        subscriber.seq = self.seq
        key = (subscriber.view, subscriber.filter)
        del self._feeds[key][subscriber]
        if not self._feeds[key]:
            del self._feeds[key]
        self._on_feeds()

    def _on_feeds(self) -> None:
        self._has_crush_feed = any(view == "crush" for view, _ in self._feeds)


def _join_frames(frames: list[Frame], filter_: Filter) -> bytes:
    if not filter_.passes_all:
        frames = [frame for frame in frames if filter_.passes(frame.type, frame.session_id)]
    return frames[0].data if len(frames) == 1 else b"".join([frame.data for frame in frames])
