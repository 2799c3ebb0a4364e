"""One end of a link over WebSocket, whichever: frames in and out, and the goodbye.

aiohttp parses, masks and waits. What it does not do is done here: it never splits a message, and
lets nobody wait for a slow reader twice; and it takes its time over a small frame.
"""

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import cast

from aiohttp import ClientWebSocketResponse, WSMsgType, web

from culm.fleet.transport.base import LinkLost

log = logging.getLogger(__name__)

GOODBYE_S = 1.0  # For the last bytes and the other side's own goodbye.
SILENCE_S = 120  # This wire has no heartbeat; a machine that answers no probe for so long is gone.
PONG_BYTES_MAX = 8 << 10  # Who leaves more than that unread gets no pongs either.
FRAGMENT_BYTES = 8 << 20  # Others take a message of 64 MiB, but no frame above 16.
QUICK_BYTES_MAX = 1 << 16  # What is smaller is written here ...
QUICK_ROOM = 32 << 10  # ... while less than this waits; then aiohttp waits for the reader.
TURN_FRAMES = 64  # After so many that came at once whoever else waits has a turn.
_MEDIUM_HEAD = struct.Struct(">BBH").pack


class WebSocketLink:
    """One end of a link, whichever."""

    def __init__(
        self,
        ws: web.WebSocketResponse[bool] | ClientWebSocketResponse[bool],
        transport: asyncio.Transport,
        on_closed: Callable[[], None],
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._on_closed = on_closed
        self._masks = isinstance(ws, ClientWebSocketResponse)  # What goes to a server is masked.
        self._is_closed = False
        self._is_ended = False  # The other side has said goodbye.
        self._is_sending = False
        self._received = 0
        _notice_silence(transport)

    async def receive(self) -> bytes | None:
        while not self._is_ended:
            self._received += 1
            if self._received % TURN_FRAMES == 0:
                # What has arrived comes without a wait. Who floods must not hold the others up.
                await asyncio.sleep(0)
            message = await self._ws.receive()
            kind = message.type
            if kind is WSMsgType.TEXT:
                return message.data
            if kind is WSMsgType.PING:
                await self._pong(message.data)
            elif kind is WSMsgType.ERROR:
                raise LinkLost(reason_of(message.data))
            elif kind in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
                self._is_ended = True
        return None

    async def send(self, frame: bytes) -> None:
        is_small = len(frame) < QUICK_BYTES_MAX
        if is_small and not self._masks and self._transport.get_write_buffer_size() < QUICK_ROOM:
            self._send_quickly(frame)
            return
        self._is_sending = True
        try:
            if len(frame) <= FRAGMENT_BYTES:
                await self._ws.send_frame(frame, WSMsgType.TEXT)
            else:
                rest = self._begin_large(frame)
                await self._ws.send_frame(rest, WSMsgType.CONTINUATION)
        except ConnectionError as exc:
            raise LinkLost("the other side is gone") from exc
        except asyncio.CancelledError:
            # It waited for the other side to read. aiohttp lets nobody wait for that again.
            self.abort()
            raise
        self._is_sending = False

    def _send_quickly(self, frame: bytes) -> None:
        """Nearly all frames are small events, and nobody has to wait: that is all of the work."""
        if self._is_closed or self._transport.is_closing():
            raise LinkLost("the other side is gone")
        size = len(frame)
        head = b"\x81" + bytes((size,)) if size < 126 else _MEDIUM_HEAD(0x81, 126, size)
        self._transport.write(head + frame)

    def _begin_large(self, frame: bytes) -> bytes:
        """Write all fragments but the last, which is returned: aiohttp only writes last ones."""
        opcode = WSMsgType.TEXT
        # The last is as large as the others: aiohttp waits for the reader by what it wrote itself.
        size = -(-len(frame) // -(-len(frame) // FRAGMENT_BYTES))
        at = 0
        while len(frame) - at > size:
            if self._ws.closed or self._transport.is_closing():
                raise ConnectionResetError
            mask = os.urandom(4) if self._masks else b""
            self._transport.write(_fragment(opcode, frame[at : at + size], mask=mask))
            opcode = WSMsgType.CONTINUATION
            at += size
        return frame[at:]

    async def _pong(self, data: bytes) -> None:
        if self._transport.get_write_buffer_size() <= PONG_BYTES_MAX:
            try:
                await self._ws.pong(data)
            except ConnectionError as exc:
                raise LinkLost("the other side is gone") from exc

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            # Who does not read what we send does not read a goodbye.
            if not self._is_sending:
                async with asyncio.timeout(GOODBYE_S):
                    await self._ws.close()
        except TimeoutError:
            log.debug("a link was closed without a goodbye from the other side")
        finally:
            self.abort()

    def abort(self) -> None:
        """Close it now, without a goodbye; what is not sent yet is lost."""
        self._is_closed = True
        self._transport.abort()
        self._on_closed()


def _fragment(opcode: WSMsgType, payload: bytes, *, mask: bytes) -> bytes:
    """A WebSocket frame that is not the last of its message."""
    head = struct.pack(">BBQ", opcode, 127 | (0x80 if mask else 0), len(payload)) + mask
    if not mask:
        return head + payload
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    masked = int.from_bytes(payload) ^ int.from_bytes(key)
    return head + masked.to_bytes(len(payload))


def reason_of(exc: object) -> str:
    return str(exc) or type(exc).__name__


def _notice_silence(transport: asyncio.Transport) -> None:
    """Have the system notice when the other side's machine is gone without a word."""
    sock = cast("socket.socket | None", transport.get_extra_info("socket"))
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 8)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
