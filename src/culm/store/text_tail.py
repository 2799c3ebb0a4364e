"""The tail: open text on disk before clients receive it.

The text of an open message reaches SQLite every few seconds. Until then the tail has it: it is
written with a plain `write` before the text is sent, so the death of the process loses nothing that
a client was shown. A power cut loses at most the text since the last `sync`.

There are two files. One is written while the other waits until commits contain all of its text;
then it is emptied. The loop waits for `write` only; the rest runs in a thread.
"""

import asyncio
import errno
import fcntl
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from culm.ids import Epoch, MessageId, SessionId
from culm.wire.events import MessageDelta
from culm.wire.messages import Growing

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20  # With more than this the text should go to the database.
FILE_BYTES_MAX = 64 << 20  # Reached only while the database cannot take it.
_FRAME = struct.Struct("<II")  # The length of a record and its checksum.


class TailRecord(NamedTuple):
    """Text of one part that was sent to clients."""

    session_id: SessionId
    message_id: MessageId
    rev: int
    part: int
    kind: Growing
    offset: int  # In code points.
    text: str


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(TailRecord)


def encode_records(deltas: Iterable[MessageDelta]) -> bytes:
    pieces: list[bytes] = []
    for d in deltas:
        body = _encode((d.session_id, d.message_id, d.rev, d.part, d.kind, d.offset, d.text))
        pieces += (_FRAME.pack(len(body), zlib.crc32(body)), body)
    return b"".join(pieces)


def decode_records(data: bytes, epoch: Epoch) -> list[TailRecord]:
    """Return the records before the first torn one; none if the file has another epoch."""
    header = encode_header(epoch)
    records: list[TailRecord] = []
    if not data.startswith(header):
        return records
    at = len(header)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        body = data[at : at + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        records.append(_decoder.decode(body))
        at += length
    return records


def encode_header(epoch: Epoch) -> bytes:
    return f"culm open text 1 {epoch}\n".encode()


class TailFile(Protocol):
    """One of the two files."""

    def write(self, data: bytes, at: int) -> None:
        """Write all of it; raises OSError."""
        ...

    def read(self) -> bytes: ...
    def sync(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class TextTail:
    """The tail of one workspace, created by `open_text_tail`."""

    def __init__(self, files: tuple[TailFile, TailFile], epoch: Epoch) -> None:
        self.number = 0  # Of the file that is written, counted over all switches.
        self._files = files
        self._header = encode_header(epoch)
        self._loop = asyncio.get_running_loop()
        self._size = 0
        self._unsynced = False
        self._old: int | None = None  # The number of the other file while it has text.
        self._work: asyncio.Future[None] | None = None  # In a thread; only one at a time.
        self.recovered = [r for file in files for r in decode_records(file.read(), epoch)]

    def write(self, deltas: Iterable[MessageDelta]) -> None:
        """Record text that is about to be sent; raises OSError."""
        if self._size > FILE_BYTES_MAX:
            raise OSError(errno.ENOSPC, "the file for open text is full")
        data = encode_records(deltas)
        if not self._size:
            data = self._header + data
        # A failed write leaves nothing behind: the next one begins at the same position.
        self._files[self.number % 2].write(data, self._size)
        self._size += len(data)
        self._unsynced = True

    @property
    def is_working(self) -> bool:
        """Return True while a thread syncs or empties a file."""
        return self._work is not None

    @property
    def is_large(self) -> bool:
        return self._size > FILE_BYTES

    def switch(self) -> None:
        """Continue in the other file, if it is empty. The text so far should then be committed."""
        if self._size and self._old is None and not self.is_working:
            self._old = self.number
            self.number += 1
            self._size = 0

    def maintain(self, uncommitted: int | None) -> bool:
        """Start the work that is due, and return True if there will be more.

        `uncommitted` is the number of the first file with text that no commit contains yet.
        """
        if self.is_working:
            return True
        if uncommitted is None:
            self.switch()
        if self._old is not None and (uncommitted is None or uncommitted > self._old):
            self._start(self._files[self._old % 2].clear, self._cleared)
        elif self._unsynced:
            self._unsynced = False
            self._start(self._sync, lambda: None)
        return self.is_working or self._size > 0 or self._old is not None

    async def clear(self) -> None:
        """Delete all text. Call it when a commit contains it."""
        if self._work is not None:
            await asyncio.wait([self._work])
        for file in self._files:
            await self._loop.run_in_executor(None, file.clear)
        self._size, self._old, self._unsynced = 0, None, False
        self.recovered = []

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def _cleared(self) -> None:
        self._old = None

    def _start(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        def done(future: asyncio.Future[None]) -> None:
            self._work = None
            if future.cancelled():
                return
            if (error := future.exception()) is None:
                then()
            else:
                # The text is in the kernel's memory: only a power cut could lose it.
                log.error("the file for open text: %s", error)

        self._work = self._loop.run_in_executor(None, work)
        self._work.add_done_callback(done)


# --- on disk


class DiskFile:
    """A file that only its user can read, and that no other server uses."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another server has this workspace open, which `CULM_NO_LOCK` permits.
            log.warning("%s is in use; open text does not survive a kill of this server", path)
            os.close(self._descriptor)
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())

    def write(self, data: bytes, at: int) -> None:
        written = os.pwrite(self._descriptor, data, at)
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], at + written)

    def read(self) -> bytes:
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, min(size, 2 * FILE_BYTES_MAX), 0)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def open_text_tail(database: Path, epoch: Epoch) -> TextTail:
    """Open the tail beside a database. Does blocking disk I/O."""
    first, second = (DiskFile(database.with_name(f"{database.name}-text{n}")) for n in (0, 1))
    return TextTail((first, second), epoch)


# --- in memory


class MemoryTailFile:
    """A file that survives a simulated crash."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.full = False  # While set, a write fails after half of it.
        self._crashed = False

    def write(self, data: bytes, at: int) -> None:
        if self.full:
            self.data[at:] = data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "No space left on device")
        if not self._crashed:
            self.data[at:] = data

    def read(self) -> bytes:
        return bytes(self.data)

    def sync(self) -> None: ...

    def clear(self) -> None:
        if not self._crashed:
            self.data.clear()

    def close(self) -> None: ...

    def survive(self) -> "MemoryTailFile":
        """Return the file as a crash leaves it; the crashed process changes it no more."""
        left = copy(self)
        self._crashed = True
        return left
