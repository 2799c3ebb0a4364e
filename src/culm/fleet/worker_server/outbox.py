"""The frames to be written on one connection: requests to the host first, then the rest.

Events and endings keep their order; a request may overtake them, since a run waits for its answer.
Both queues are bounded. `event_sink.py` fills the queue of events.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

REQUESTS_MAX: Final = 32
FRAMES_MAX: Final = 64  # For events; an ending always has room.
BYTES_MAX: Final = 4 << 20  # For waiting events, unless a single one is larger.


class FrameOutbox:
    def __init__(self) -> None:
        self._requests: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._bytes = 0  # Total size of the frames.
        self._awaited: asyncio.Future[None] | None = None  # Set while the writer waits for a frame.
        self._room = asyncio.Event()  # Room for a request.
        self._room.set()
        self.on_room: Callable[[], None] | None = None  # Called when there is room for an event.
        self.frames_put = 0
        self.frames_taken = 0

    @property
    def has_room(self) -> bool:
        return len(self._frames) < FRAMES_MAX and self._bytes < BYTES_MAX

    def put_nowait(self, frame: bytes) -> None:
        """Add an event, if there is room, or an ending."""
        self._frames.append(frame)
        self._bytes += len(frame)
        self.frames_put += 1
        self._wake()

    async def request_room(self) -> None:
        """Wait until a request has room."""
        while len(self._requests) >= REQUESTS_MAX:
            self._room.clear()
            await self._room.wait()

    def put_request_nowait(self, frame: bytes) -> None:
        """Add a request. Call only with room, and without an await since there was."""
        self._requests.append(frame)
        self._wake()

    def drop_requests(self) -> None:
        """Drop the requests of a run that is over: nobody waits for their answers."""
        self._requests.clear()
        self._room.set()

    def take_nowait(self) -> bytes | None:
        """Take the next frame to write, if any."""
        if self._requests:
            self._room.set()
            return self._requests.popleft()
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        self.frames_taken += 1
        if self.on_room is not None:
            self.on_room()
        return frame

    async def filled(self) -> None:
        """Wait until there is a frame to write. Only the writer calls it."""
        while not self._requests and not self._frames:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited

    def _wake(self) -> None:
        if self._awaited is not None:
            if not self._awaited.done():
                self._awaited.set_result(None)
            self._awaited = None
