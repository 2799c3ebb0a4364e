"""The event stream of one client: replay, then live events, and replay again if it falls behind."""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct

from culm.errors import StoreBusy
from culm.events.hub import Hub, Subscriber, TransientEvent
from culm.events.views import Cursor, shows
from culm.ids import Epoch
from culm.store.store import Store, bounds, replay
from culm.wire.codec import encode
from culm.wire.events import Resync

PAGE = 500  # Events per read of a replay; the socket must drain before the next page.
STALL_S = 60.0  # A client that reads nothing for this long is disconnected; it can resume.

Drained = Callable[[], Awaitable[None]]  # Returns when the client's socket has room again.


class ResumeFrom(Struct, frozen=True):
    """Replay the events after `seq`, then send snapshots, then live events."""

    seq: int


class StartFresh(Struct, frozen=True):
    """Send current state and live events only, after a `resync` if there is a reason."""

    reason: str = ""


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


async def feed(
    hub: Hub, store: Store, subscriber: Subscriber, cursor: Cursor | None, drained: Drained
) -> None:
    """Feed one joined subscriber until it or the workspace ends."""
    try:
        if cursor is not None:
            await _start_at(cursor, hub, store, subscriber)
        while not subscriber.ended:
            await _wait_for_room(subscriber, drained)
            await _catch_up(hub, store, subscriber, drained)
            if not subscriber.live:
                return
            await subscriber.wake.wait()
    except (TimeoutError, StoreBusy):
        subscriber.transport.abort()  # It has missed events, and can resume.


async def _start_at(cursor: Cursor, hub: Hub, store: Store, subscriber: Subscriber) -> None:
    trimmed_to, last = await store.read(bounds)
    start = where_to_start(cursor, epoch=hub.epoch, trimmed_to=trimmed_to, last=last)
    if isinstance(start, StartFresh):
        # It starts where it joined, not now, or events since the response head would be lost.
        _resync(hub, subscriber, start.reason)
    else:
        subscriber.seq = start.seq


async def _catch_up(hub: Hub, store: Store, subscriber: Subscriber, drained: Drained) -> None:
    """Write missed events until the subscriber is live or has ended."""

    def wanted(type_: str, session_id: str) -> bool:
        return shows(subscriber.view, type_) and subscriber.filter.passes(type_, session_id)

    while not subscriber.ended and not hub.go_live(subscriber):
        page = await store.read(replay(subscriber.seq, store.seq, PAGE, wanted))
        if page is None:
            if not shows(subscriber.view, "resync"):
                subscriber.transport.abort()  # A Crush client reloads when it reconnects.
                return
            hub.flush()
            subscriber.seq = hub.seq
            _resync(hub, subscriber, "trimmed")
            continue
        data = b"".join([hub.encode_one(subscriber.view, event) for event in page.events])
        if data and not subscriber.write(data):
            subscriber.end()
        subscriber.seq = page.upto
        await _wait_for_room(subscriber, drained)


def _resync(hub: Hub, subscriber: Subscriber, reason: str) -> None:
    """Send a resync event, if the view includes it."""
    if shows(subscriber.view, "resync"):
        cursor = Cursor(hub.epoch, subscriber.seq)
        resync = TransientEvent("resync", "", encode(Resync(str(cursor), reason)))
        if not subscriber.write(hub.encode_one(subscriber.view, resync)):
            subscriber.end()


async def _wait_for_room(subscriber: Subscriber, drained: Drained) -> None:
    """Wait for a client that reads slowly; raises `TimeoutError` if it reads nothing."""
    unread = subscriber.transport.get_write_buffer_size()
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                await drained()
            return
        except TimeoutError:
            before, unread = unread, subscriber.transport.get_write_buffer_size()
            if unread >= before:
                raise
