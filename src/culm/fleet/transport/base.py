"""Interface of the transport: moves frames and decides nothing.

A worker listens, a host connects. Frames are whole JSON texts, as bytes.
"""

from typing import Protocol


class LinkLost(Exception):
    """The peer is gone or violated the transport protocol. The message gives the reason."""


class ConnectFailed(Exception):
    """No connection: nothing listens, the token was refused, or TLS failed."""


class Link(Protocol):
    async def receive(self) -> bytes | None:
        """Return the next frame; None when the peer has closed. Raises `LinkLost`.

        Messages that are not text are skipped. A frame above the size limit raises `LinkLost` and
        is not kept.
        """
        ...

    @property
    def room(self) -> int:
        """The size of the frames that one `send` may have; a single frame may be larger."""
        ...

    async def send(self, *frames: bytes) -> None:
        """Send frames in order, waiting for a slow reader; raises `LinkLost`. One sender at a time.

        Canceling it while it waits ends the link.
        """
        ...

    async def close(self) -> None:
        """Close the link in bounded time. Idempotent."""
        ...


class LinkListener(Protocol):
    @property
    def endpoint(self) -> str:
        """The address to connect to: `ws://127.0.0.1:…`."""
        ...

    async def accept(self) -> Link:
        """Wait for the next authorized connection."""
        ...
