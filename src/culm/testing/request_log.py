"""A bounded log of the requests to a `ModelServer`, and waiting for their progress."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from culm.errors import Conflict, NotFound
from culm.wire.codec import Json, encode

REQUESTS_MAX = 10_000  # Older ones are dropped.
BODY_BYTES_MAX = 256 << 20  # Of all bodies together; older ones are dropped.
# Exceptions of decoding a body that is not JSON, or too deeply nested.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(slots=True, eq=False)
class SeenRequest:
    """One request for an answer."""

    n: int  # The first is 1.
    path: str
    headers: Mapping[str, str]  # Names are case-insensitive.
    at: float  # The time when all of it had arrived, in seconds since 1970.
    raw: bytes  # The body; empty once dropped.
    left: bool = False  # The client left before the end.
    ended: bool = False  # The answer was sent to its end, or to the fault in the script.
    released: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    @property
    def body(self) -> Json:
        """The decoded body; None if it is not JSON, or has been dropped."""
        try:
            return msgspec.json.decode(self.raw)
        except UNREADABLE:
            return None


class RequestLog:
    """The requests in order of arrival."""

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []  # The newest `REQUESTS_MAX`.
        self.count = 0  # Including dropped ones.
        self._with_body: deque[SeenRequest] = deque()
        self._body_bytes = 0
        self._changed = asyncio.Event()

    def record(self, path: str, headers: Mapping[str, str], raw: bytes, at: float) -> SeenRequest:
        self.count += 1
        seen = SeenRequest(self.count, path, headers, at, raw)
        self.requests.append(seen)
        self._with_body.append(seen)
        self._body_bytes += len(raw)
        if len(self.requests) > REQUESTS_MAX:
            self._drop_body(self.requests.pop(0))
        while self._body_bytes > BODY_BYTES_MAX and len(self._with_body) > 1:
            self._drop_body(self._with_body[0])
        self.notify()
        return seen

    def get(self, n: int) -> SeenRequest:
        """Request `n`; raises `NotFound` if it has not arrived or was dropped."""
        if self.requests and 0 <= (at := n - self.requests[0].n) < len(self.requests):
            return self.requests[at]
        raise NotFound(f"request not found: {n}")

    def notify(self) -> None:
        """Wake all waiters after a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def until_left(self, n: int) -> None:
        """Wait until the client of request `n` leaves; raises `Conflict` if it does not."""
        await self.until(lambda: self.count >= n)
        seen = self.get(n)
        await self.until(lambda: seen.left or seen.ended)
        if not seen.left:
            raise Conflict(f"the client of request {n} stayed to the end of the answer")

    def as_json(self) -> bytes:
        return encode(
            [
                {"n": s.n, "path": s.path, "body": s.body, "left": s.left, "ended": s.ended}
                for s in self.requests
            ]
        )

    def _drop_body(self, seen: SeenRequest) -> None:
        # Bodies are dropped in order of arrival.
        if self._with_body and self._with_body[0] is seen:
            self._with_body.popleft()
            self._body_bytes -= len(seen.raw)
            seen.raw = b""
