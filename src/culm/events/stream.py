"""One client's stream, from where it left off to live, and back to the log when it falls behind."""

import asyncio
from collections.abc import Awaitable, Callable

from culm.errors import StoreBusy
from culm.events.cursor import Cursor, Fresh, Resume, where_to_start
from culm.events.hub import Hub, Live, Subscriber
from culm.events.views import shows
from culm.store.log import bounds, replay
from culm.store.store import Store
from culm.wire.codec import encode
from culm.wire.events import Resync

PAGE = 500  # Events a replay reads at once; each page waits for the socket before the next.
STALL_S = 60.0  # A client that takes nothing for this long is let go; it can resume.


async def feed(
    hub: Hub,
    store: Store,
    subscriber: Subscriber,
    cursor: Cursor | None,
    drained: Callable[[], Awaitable[None]],
) -> None:
    """Feed one joined subscriber until it or the workspace ends.

    `drained` returns when the client's socket has room again.
    """
    try:
        trimmed_to, last = await store.read(bounds)
        start = where_to_start(cursor, epoch=hub.epoch, trimmed_to=trimmed_to, last=last)
        while not subscriber.ended:
            await _catch_up(hub, store, subscriber, start, drained)
            await subscriber.wake.wait()
            start = Resume(subscriber.seq)
    except (TimeoutError, StoreBusy):
        subscriber.transport.abort()  # It has not got everything, and can resume.


async def _catch_up(
    hub: Hub,
    store: Store,
    subscriber: Subscriber,
    start: Resume | Fresh,
    drained: Callable[[], Awaitable[None]],
) -> None:
    """Write what is missing until the subscriber is live or ended."""

    def wanted(type_: str, session_id: str) -> bool:
        return shows(subscriber.view, type_) and subscriber.filter.passes(type_, session_id)

    async with asyncio.timeout(STALL_S):
        await drained()
    while not subscriber.ended:
        if isinstance(start, Resume):
            subscriber.seq = start.seq
            page = await store.read(replay(start.seq, store.seq, PAGE, wanted))
            if page is None:
                start = Fresh("trimmed")
                continue
            frames = [hub.encode(subscriber.view, event) for event in page.events]
            if not _write(subscriber, b"".join(frames)):
                return
            subscriber.seq = page.upto
            async with asyncio.timeout(STALL_S):
                await drained()
            if hub.go_live(subscriber, fresh=False):
                return
            start = Resume(page.upto)
        else:
            hub.flush()
            if start.reason and shows(subscriber.view, "resync"):
                resync = Live("resync", "", encode(Resync(str(hub.cursor), start.reason)))
                if not _write(subscriber, hub.encode(subscriber.view, resync)):
                    return
            hub.go_live(subscriber, fresh=True)
            return


def _write(subscriber: Subscriber, data: bytes) -> bool:
    if data and not subscriber.write(data):
        subscriber.end()
    return not subscriber.ended
