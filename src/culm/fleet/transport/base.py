"""The seam towards the wire: something that moves frames and decides nothing.

A worker listens, a parent connects. Frames are whole JSON texts, as bytes.
"""

from typing import Protocol


class LinkLost(Exception):
    """The other side is gone, or said something that no link carries. Says which, in words."""


class ConnectFailed(Exception):
    """There is no link: nobody listens, the token was refused, the certificate is not trusted."""


class Link(Protocol):
    async def receive(self) -> bytes | None:
        """The next frame; None when the other side has closed. Raises `LinkLost`.

        What is no text is skipped. A frame above the bound is a `LinkLost`, and is not kept.
        """
        ...

    async def send(self, frame: bytes) -> None:
        """Waits while the other side does not read; raises `LinkLost`. One sender at a time.

        To cancel it while it waits ends the link.
        """
        ...

    async def close(self) -> None:
        """Say goodbye, in bounded time. May be called twice."""
        ...


class LinkListener(Protocol):
    @property
    def endpoint(self) -> str:
        """Where to connect: `ws://127.0.0.1:…`."""
        ...

    async def accept(self) -> Link:
        """The next one that connected and was let in."""
        ...
