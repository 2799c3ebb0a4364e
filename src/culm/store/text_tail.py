"""The tail: open text on disk before clients receive it.

The text of an open message reaches SQLite every few seconds, and the output of a running call with
its result. Until then the tail has it: it is written with a plain `write` before the text is sent,
so the death of the process loses nothing that a client was shown. A power cut loses at most the
text of the last tenth of a second.

There are two files. One is written while the other waits until commits contain all of its text;
then it is emptied. The loop waits for `write` only; the rest runs in threads.
"""

import asyncio
import errno
import fcntl
import logging
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from culm.ids import Epoch, MessageId, SessionId
from culm.wire.events import MessageDelta
from culm.wire.messages import Growing

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 20  # With more than this the text should go to the database.
FILE_BYTES_MAX = 64 << 20  # Reached only while the database cannot take it.
OUTPUT_CHARS_MAX = 30_000  # Kept of one call: a model reads about as much of a command.
CLOSE_TIMEOUT_S = 5.0
SYNC_S = 0.1  # A power cut loses at most this much time of a stream.
CARRIED_CHARS_MAX = FILE_BYTES // 8  # Output fills at most half a file when it is carried over.
_FRAME = struct.Struct("<II")  # The length of a record and its checksum.


class TailRecord(NamedTuple):
    """Text of one part, or output of one call, that was sent to clients."""

    session_id: SessionId
    message_id: MessageId
    rev: int
    part: int
    kind: Growing
    offset: int  # In code points.
    text: str
    call_id: str = ""  # Set for output, which belongs to no part.


class ShownOutput(Struct):
    """The output of one call that clients may have; only its end is kept."""

    text: str = ""
    length: int = 0  # Code points so far.
    tail_from: int = 0  # The first file of the tail that is needed to restore it.
    held: str = ""  # The tail refused it; it is sent with the next piece.

    def add(self, offset: int, text: str) -> None:
        new = text[max(0, self.length - offset) :]
        self.text = (self.text + new)[-OUTPUT_CHARS_MAX:]
        self.length = max(self.length, offset + len(text))

    def hold(self, text: str) -> None:
        """Keep text that the tail refused; of a long one, only the end."""
        left_out = max(0, len(text) - OUTPUT_CHARS_MAX)
        self.length += left_out
        self.held = text[left_out:]

    def described(self) -> str:
        left_out = self.length - len(self.text)
        note = f"[… {left_out:,} characters are left out here …]\n" if left_out else ""
        return note + self.text


def shown_outputs(records: Iterable[TailRecord]) -> dict[tuple[MessageId, str], ShownOutput]:
    """Return the output of each call, by the ids of its message and the call."""
    outputs: dict[tuple[MessageId, str], ShownOutput] = {}
    # Files come in any order, and a record that was carried over repeats the ones before it.
    for record in sorted(records, key=lambda one: one.offset):
        if record.call_id:
            output = outputs.setdefault((record.message_id, record.call_id), ShownOutput())
            output.add(record.offset, record.text)
    return outputs


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(TailRecord)


def encode_records(texts: Iterable[MessageDelta | TailRecord]) -> bytes:
    pieces: list[bytes] = []
    for d in texts:
        if isinstance(d, MessageDelta):
            body = _encode((d.session_id, d.message_id, d.rev, d.part, d.kind, d.offset, d.text))
        else:
            body = _encode(d)
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


class TailSync(Protocol):
    """Brings the files to the disk, not only to the memory of the kernel."""

    def want(self) -> None:
        """Sync soon what was written until now. Does not wait."""
        ...

    def close(self) -> None: ...


class TextTail:
    """The tail of one workspace, created by `open_text_tail`."""

    def __init__(self, files: tuple[TailFile, TailFile], sync: TailSync, epoch: Epoch) -> None:
        self.number = 0  # Of the file that is written, counted over all switches.
        self._files = files
        self._sync = sync
        self._header = encode_header(epoch)
        self._loop = asyncio.get_running_loop()
        self._size = 0
        self._old: int | None = None  # The number of the other file while it has text.
        self._work: asyncio.Future[None] | None = None  # In a thread; only one at a time.
        # Not in the order of writing: either file may be the newer one.
        self.recovered = [r for file in files for r in decode_records(file.read(), epoch)]

    def write(self, texts: Iterable[MessageDelta | TailRecord]) -> None:
        """Record text that is about to be sent; raises OSError."""
        if self._size > FILE_BYTES_MAX:
            raise OSError(errno.ENOSPC, "the file for open text is full")
        data = encode_records(texts)
        if not self._size:
            data = self._header + data
        # A failed write leaves nothing behind: the next one begins at the same position.
        self._files[self.number % 2].write(data, self._size)
        self._size += len(data)
        self._sync.want()

    @property
    def is_working(self) -> bool:
        """Return True while a thread empties a file."""
        return self._work is not None

    @property
    def is_large(self) -> bool:
        return self._size > FILE_BYTES

    def has(self, number: int) -> bool:
        """Return True while a file up to this number has text."""
        if self._old is not None and self._old <= number:
            return True
        return self._size > 0 and self.number <= number

    def switch(self) -> None:
        """Continue in the other file, if it is empty. The text so far should then be committed."""
        if self._size and self._old is None and not self.is_working:
            self._old = self.number
            self.number += 1
            self._size = 0

    def maintain(self, uncommitted: int | None) -> bool:
        """Empty the other file if that is possible; return True if there will be more to do.

        `uncommitted` is the number of the first file with text that no commit contains yet.
        """
        if self.is_working:
            return True
        if uncommitted is None:
            self.switch()
        if self._old is not None and (uncommitted is None or uncommitted > self._old):
            try:
                self._work = self._loop.run_in_executor(None, self._empty, self._old % 2)
            except RuntimeError as exc:  # No thread can be started now.
                log.error("the file for open text cannot be emptied: %s", exc)
            else:
                self._work.add_done_callback(self._emptied)
        return self.is_working or self._size > 0 or self._old is not None

    async def clear(self) -> None:
        """Delete all text. Call it when a commit contains it."""
        if self._work is not None:
            await asyncio.wait([self._work])
        for file in self._files:
            await self._loop.run_in_executor(None, file.clear)
        self._size, self._old = 0, None
        self.recovered = []

    async def close(self) -> None:
        self._sync.close()
        if self._work is not None:
            await asyncio.wait([self._work], timeout=CLOSE_TIMEOUT_S)
        if self._work is None:  # Otherwise the thread still uses them.
            for file in self._files:
                file.close()

    def _empty(self, index: int) -> None:
        self._files[1 - index].sync()  # It may repeat output that is needed of the other.
        self._files[index].clear()

    def _emptied(self, work: asyncio.Future[None]) -> None:
        self._work = None
        if work.cancelled():
            return
        if (error := work.exception()) is None:
            self._old = None
        else:
            log.error("the file for open text cannot be emptied: %s", error)


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


class SyncThread:
    """Syncs the files in a thread of its own, which starts when it is first wanted.

    The loop does not wait for it: the text is in the kernel's memory, so a failed sync matters
    only to a power cut.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        # Descriptors of its own: the loop closes the others without waiting for this thread.
        self._descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        self._delays = SimpleQueue[float | None]()  # Before each sync; None ends the thread.
        self._is_wanted = False
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        if self._is_wanted:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="culm-sync", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # There are too many threads; try again later.
                self._report(exc)
                return
            self._thread = thread
        self._is_wanted = True
        self._delays.put(SYNC_S)

    def close(self) -> None:
        if self._thread is None:
            self._close_files()
        else:
            self._delays.put(None)

    def _run(self) -> None:
        try:
            while (delay_s := self._delays.get()) is not None:
                time.sleep(delay_s)
                self._is_wanted = False  # Before the sync, which may miss what is written then.
                error: OSError | None = None
                for descriptor in self._descriptors:
                    try:
                        os.fdatasync(descriptor)
                    except OSError as exc:
                        error = exc
                self._report(error)
        finally:
            self._close_files()

    def _report(self, error: Exception | None) -> None:
        if error is not None and not self._has_failed:
            log.error("the file for open text cannot be synced: %s", error)
        self._has_failed = error is not None

    def _close_files(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def open_text_tail(database: Path, epoch: Epoch) -> TextTail:
    """Open the tail beside a database. Does blocking disk I/O."""
    first, second = (database.with_name(f"{database.name}-text{n}") for n in (0, 1))
    files = DiskFile(first), DiskFile(second)
    return TextTail(files, SyncThread((first, second)), epoch)


# --- in memory


class NoSync:
    def want(self) -> None: ...
    def close(self) -> None: ...


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
