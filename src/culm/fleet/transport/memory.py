"""In-memory links within one process, for simulations and embedding; the twin of `websocket.py`.

A sent frame waits in a bounded queue, as it would in the buffers of a socket. A simulation can pass
a `Carry`, which decides the fate of each frame.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from culm.fleet.protocol.frames import MESSAGE_BYTES_MAX
from culm.fleet.transport.base import ConnectFailed, Link, LinkLost

FRAMES_MAX = 64  # In flight in one direction; about as many fit into a socket's buffers.
WAITING_MAX = 64  # Links that are not accepted yet.

# Returns what arrives of a frame: it may wait, duplicate or drop the frame, or raise `LinkLost` to
# cut the link.
Carry = Callable[[bytes], Awaitable[Sequence[bytes]]]


class _Lane:
    """One direction of a link."""

    def __init__(self, frames_max: int) -> None:
        self._frames: deque[bytes] = deque()
        self._frames_max = frames_max
        self._changed = asyncio.Event()
        self.is_ended = False  # Closed regularly: earlier frames still arrive.
        self.lost: str | None = None  # Why nothing arrives any more.

    async def put(self, frame: bytes) -> None:
        while len(self._frames) >= self._frames_max and not self.is_over:
            await self._change()
        if self.is_over:
            raise LinkLost(self.lost or "the link is closed")
        self._frames.append(frame)
        self._changed.set()

    async def take(self) -> bytes | None:
        while self.lost is None and not self._frames and not self.is_ended:
            await self._change()
        if self.lost is not None:
            raise LinkLost(self.lost)
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._changed.set()
        return frame

    @property
    def is_over(self) -> bool:
        return self.is_ended or self.lost is not None

    def end(self, lost: str | None = None) -> None:
        if lost is not None and self.lost is None:
            self.lost = lost
            self._frames.clear()
        self.is_ended = True
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryLink:
    """One end of a link; `memory_pair` creates both."""

    def __init__(self, inward: _Lane, outward: _Lane, carry: Carry | None) -> None:
        self._inward = inward
        self._outward = outward
        self._carry = carry

    async def receive(self) -> bytes | None:
        return await self._inward.take()

    @property
    def room(self) -> int:
        return 0  # Each frame may have to wait.

    async def send(self, *frames: bytes) -> None:
        for frame in frames:
            await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        if len(frame) > MESSAGE_BYTES_MAX:
            self.cut("a frame exceeds the size limit of a link")
        if self._outward.is_over:
            raise LinkLost(self._outward.lost or "the link is closed")
        try:
            arriving = (frame,) if self._carry is None else await self._carry(frame)
            for one in arriving:
                await self._outward.put(one)
        except LinkLost as exc:
            self.cut(str(exc))
            raise
        except asyncio.CancelledError:
            self.cut("sending a frame was canceled")
            raise

    async def close(self) -> None:
        self._outward.end()
        self._inward.end()

    def cut(self, reason: str = "the link was cut") -> None:
        """Cut the link and lose all frames in flight in either direction."""
        self._outward.end(reason)
        self._inward.end(reason)


def memory_pair(
    carry: Carry | None = None, *, frames_max: int = FRAMES_MAX
) -> tuple[MemoryLink, MemoryLink]:
    """Return the two ends of a link. `carry` is called for every frame in either direction."""
    there, back = _Lane(frames_max), _Lane(frames_max)
    return MemoryLink(back, there, carry), MemoryLink(there, back, carry)


class MemoryListener:
    """Accepts connections within the same process."""

    def __init__(self, name: str = "here", carry: Carry | None = None) -> None:
        self.endpoint = f"memory://{name}"
        self._carry = carry
        self._waiting: asyncio.Queue[Link] = asyncio.Queue(WAITING_MAX)
        self._is_closed = False

    async def accept(self) -> Link:
        return await self._waiting.get()

    def connect(self) -> MemoryLink:
        """Raises `ConnectFailed` if it is closed or too many connections wait already."""
        ours, theirs = memory_pair(self._carry)
        if self._is_closed or self._waiting.full():
            raise ConnectFailed(f"nobody listens at {self.endpoint}")
        self._waiting.put_nowait(theirs)
        return ours

    def close(self) -> None:
        """Refuse new connections; existing links go on."""
        self._is_closed = True
