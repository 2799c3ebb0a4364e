"""Subscribers of the hub that do not read or that fail, without effect on the others."""

import asyncio
from collections.abc import Sequence

from culm.events.hub import HEARTBEAT_S, STALL_BEATS, Hub, TransientEvent
from culm.events.views import Filter, View
from culm.ids import Epoch, MessageId, SessionId
from culm.wire.events import MessageDelta
from tests.support import FakeClock, contract


class Peer:
    """A transport that stores what is written, or raises `error`."""

    def __init__(self, *, reads: bool = True, error: type[Exception] | None = None) -> None:
        self.given = b""
        self.reads = reads
        self.error = error
        self.aborted = False

    def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.given += data

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return 0 if self.reads else len(self.given)

    def abort(self) -> None:
        self.aborted = True


class NoState:
    @property
    def messages(self) -> "NoState":
        return self

    def state_events(self) -> list[TransientEvent]:
        return []

    def open_ids(self) -> list[tuple[MessageId, SessionId]]:
        return []

    def find_shown(self, message_id: MessageId) -> TransientEvent | None:
        return None

    def record(self, deltas: Sequence[MessageDelta]) -> bool:
        return True


def make_hub(clock: FakeClock, buffer_bytes_max: int = 1000) -> Hub:
    return Hub(Epoch("e"), 0, clock, NoState(), streams_max=9, buffer_bytes_max=buffer_bytes_max)


def join(hub: Hub, peer: Peer, view: View = "delta") -> None:
    assert hub.go_live(hub.join(peer, view, Filter()))


@contract("INV-18", "INV-66")
async def test_failing_peers_do_not_affect_the_others() -> None:
    hub = make_hub(FakeClock())
    peers = [Peer(), Peer(error=RuntimeError), Peer(), Peer(error=BrokenPipeError), Peer()]
    for peer in peers:
        error, peer.error = peer.error, None
        join(hub, peer)
        peer.error = error
    hub.publish_transient(TransientEvent("store_health", "", b"{}"))
    hub.publish_transient(TransientEvent("store_health", "", b"[]"))
    await asyncio.sleep(0)
    healthy = [peer.given for peer in peers if peer.error is None]
    assert healthy[0].count(b"store_health") == 2
    assert healthy == [healthy[0]] * 3


async def test_client_that_reads_nothing_is_disconnected_and_a_reading_one_is_not() -> None:
    clock = FakeClock()
    hub = make_hub(clock)
    stalled, reading = Peer(reads=False), Peer()
    for peer in (stalled, reading):
        join(hub, peer)
    hub.publish_transient(TransientEvent("store_health", "", b"{}"))
    await asyncio.sleep(0)
    clock.advance(HEARTBEAT_S * STALL_BEATS)
    assert not stalled.aborted
    clock.advance(HEARTBEAT_S * 2)
    assert (stalled.aborted, reading.aborted) == (True, False)


async def test_event_that_cannot_be_encoded_does_not_suppress_the_others() -> None:
    hub = make_hub(FakeClock())
    peer = Peer()
    join(hub, peer)
    hub.publish_transient(TransientEvent("store_health", "", b"1"))
    hub.publish_transient(TransientEvent("store_health", "", "text is no payload"))  # pyright: ignore[reportArgumentType]
    hub.publish_transient(TransientEvent("store_health", "", b"3"))
    await asyncio.sleep(0)
    assert peer.given.count(b"store_health") == 2


async def test_only_a_stream_of_the_crush_view_makes_text_set_a_timer() -> None:
    clock = FakeClock()
    hub = make_hub(clock)
    delta = MessageDelta(MessageId("m"), SessionId("s"), 1, 0, "text", 0, "a")
    join(hub, Peer())
    before = clock.armed()
    hub.publish_delta(delta)
    hub.flush()
    assert clock.armed() == before
    join(hub, Peer(), "crush")
    hub.publish_delta(delta)
    hub.flush()
    assert clock.armed() == before + 1
