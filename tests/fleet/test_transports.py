"""One suite for all links: the WebSocket transport and the memory transport."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.transport.base import ConnectFailed, Link, LinkLost
from culm.fleet.transport.memory import MemoryListener
from tests.fleet.link_harness import KINDS, Kind, close_all, open_endpoint, open_pair
from tests.support import WAIT_S

both = pytest.mark.parametrize("kind", KINDS)


@both
async def test_frames_of_either_side_arrive_whole_and_in_order(kind: Kind) -> None:
    frames = [b'{"n":%d}' % n for n in range(50)] + ['"\u00e4\u20ac"'.encode(), b"x" * 300_000]

    async def send(link: Link) -> None:
        for frame in frames:
            await link.send(frame)
        await link.send(*frames[:50])
        await link.send(*frames)

    expected = [*frames, *frames[:50], *frames]
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:
        group.create_task(send(parent))
        group.create_task(send(worker))
        assert [await worker.receive() for _ in expected] == expected
        assert [await parent.receive() for _ in expected] == expected


@both
async def test_frame_of_17_mib_passes_either_way(kind: Kind) -> None:
    frame = bytes(range(256)) * (17 << 12) + b"end"
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:
        for one, other in ((parent, worker), (worker, parent)):
            group.create_task(one.send(frame))
            assert await other.receive() == frame
        await parent.send(b"next")
        assert await worker.receive() == b"next"


@both
async def test_frames_sent_before_close_are_read_before_the_end(
    kind: Kind,
) -> None:
    async with open_pair(kind) as (parent, worker):
        await worker.send(b"last")
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.close())
            assert await parent.receive() == b"last"
            assert [await parent.receive() for _ in range(10)] == [None] * 10
        assert [await worker.receive() for _ in range(10)] == [None] * 10
        await worker.close()
        with pytest.raises(LinkLost):
            await worker.send(b"more")
        for _ in range(3):  # A socket may take a frame or two before it fails.
            try:
                await parent.send(b"more")
            except LinkLost:
                break
            await asyncio.sleep(0)
        else:
            pytest.fail("a frame was sent to nobody")


@both
async def test_close_ends_a_pending_receive_on_the_same_side(kind: Kind) -> None:
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:
        reading = group.create_task(parent.receive())
        await asyncio.sleep(0)
        await close_all(parent, worker)
        assert await reading is None


@both
async def test_canceled_receive_loses_no_frame(kind: Kind) -> None:
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:
        for turn in range(3):
            reading = group.create_task(worker.receive())
            await asyncio.sleep(0)
            await parent.send(b"%d" % turn)
            reading.cancel()
            await asyncio.wait({reading})
            got = reading.result() if not reading.cancelled() else await worker.receive()
            assert got == b"%d" % turn


@both
async def test_send_to_a_peer_that_does_not_read_waits_until_close(
    kind: Kind,
) -> None:
    frame = b"x" * 100_000
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:
        sent = 0

        async def flood() -> None:
            nonlocal sent
            with suppress(LinkLost):
                while True:
                    await worker.send(frame)
                    sent += 1
                    await asyncio.sleep(0)

        flooding = group.create_task(flood())
        before = -1
        while sent != before:  # It gets stuck: sockets take some MB at most.
            before = sent
            for _ in range(2000):
                await asyncio.sleep(0)
        assert sent < 500
        assert await parent.receive() == frame
        await worker.close()
        await flooding


@both
async def test_canceling_a_blocked_send_ends_the_link(kind: Kind) -> None:
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:

        async def flood() -> None:
            while True:
                await worker.send(b"x" * 1_000_000)

        flooding = group.create_task(flood())
        for _ in range(2000):
            await asyncio.sleep(0)
        flooding.cancel()
        await asyncio.wait({flooding})
        assert flooding.cancelled()
        with pytest.raises(LinkLost):
            await worker.send(b"more")
        with suppress(LinkLost):
            while await parent.receive() is not None:
                pass


@both
async def test_oversized_frame_ends_the_link(kind: Kind) -> None:
    async with open_pair(kind) as (parent, worker), asyncio.TaskGroup() as group:

        async def send() -> None:
            with suppress(LinkLost):
                await worker.send(bytes(MESSAGE_BYTES_MAX + 1))

        group.create_task(send())
        with pytest.raises(LinkLost):
            await parent.receive()
        await close_all(parent, worker)


@both
async def test_links_wait_until_accepted_and_are_not_mixed_up(kind: Kind) -> None:
    async with open_endpoint(kind) as endpoint, asyncio.timeout(WAIT_S):
        parents = [await endpoint.connect() for _ in range(3)]
        for number, parent in enumerate(parents):
            await parent.send(b"%d" % number)
        workers = [await endpoint.listener.accept() for _ in parents]
        received = [await worker.receive() for worker in workers]
        assert sorted(s for s in received if s is not None) == [b"0", b"1", b"2"]
        await close_all(*parents, *workers)


async def test_memory_carrier_can_duplicate_delay_and_drop_frames() -> None:
    gate = asyncio.Event()

    async def carry(frame: bytes) -> Sequence[bytes]:
        match frame:
            case b"twice":
                return [frame, frame]
            case b"never":
                return []
            case b"late":
                await gate.wait()
            case b"cut":
                raise LinkLost("somebody pulled the plug")
            case _:
                pass
        return [frame]

    listener = MemoryListener("there", carry)
    parent = listener.connect()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        worker = await listener.accept()
        for frame in (b"twice", b"never", b"once"):
            await parent.send(frame)
        assert [await worker.receive() for _ in range(3)] == [b"twice", b"twice", b"once"]
        late = group.create_task(parent.send(b"late"))
        await asyncio.sleep(0)
        assert not late.done()
        gate.set()
        assert await worker.receive() == b"late"
        await worker.send(b"lost with the link")
        with pytest.raises(LinkLost, match="somebody pulled the plug"):
            await worker.send(b"cut")
        with pytest.raises(LinkLost, match="somebody pulled the plug"):
            await parent.receive()
    listener.close()
    with pytest.raises(ConnectFailed, match="nobody listens at memory://there"):
        listener.connect()
