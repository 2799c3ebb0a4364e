"""The tail keeps text that was sent, and only that."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.ids import Epoch, MessageId, SessionId
from culm.store import text_tail
from culm.store.messages import missing_text
from culm.store.text_tail import (
    MemoryTailFile,
    NoSync,
    ShownOutput,
    TailRecord,
    TextTail,
    decode_records,
    encode_records,
    open_text_tail,
    shown_outputs,
)
from culm.wire.events import MessageDelta
from culm.wire.messages import Part, Text, TextPart, ToolCall, ToolCallPart
from tests.support import WAIT_S, contract

EPOCH = Epoch("e1")


def delta(text: str, offset: int = 0, *, part: int = 0, rev: int = 0) -> MessageDelta:
    return MessageDelta(MessageId("m"), SessionId("s"), rev, part, "text", offset, text)


def record(text: str, offset: int, part: int = 0) -> TailRecord:
    return TailRecord(SessionId("s"), MessageId("m"), 0, part, "text", offset, text)


def output(text: str, offset: int, call_id: str = "c") -> TailRecord:
    return TailRecord(SessionId("s"), MessageId("m"), 0, 0, "text", offset, text, call_id)


def memory_tail(*files: MemoryTailFile) -> TextTail:
    first, second = files or (MemoryTailFile(), MemoryTailFile())
    return TextTail((first, second), NoSync(), EPOCH)


async def worked(tail: TextTail) -> None:
    """Wait until the work in a thread is done."""
    while tail.is_working:
        await asyncio.sleep(0.001)


@given(st.lists(st.text()), st.integers(min_value=0))
def test_a_torn_file_has_the_records_before_the_tear(texts: list[str], cut: int) -> None:
    deltas = [delta(text, n) for n, text in enumerate(texts)]
    header = text_tail.encode_header(EPOCH)
    data = header + encode_records(deltas)
    records = decode_records(data, EPOCH)
    assert [(one.offset, one.text) for one in records] == list(enumerate(texts))
    torn = data[: len(header) + cut % (len(data) - len(header) + 1)]
    found = decode_records(torn, EPOCH)
    assert found == records[: len(found)]
    assert len(header + encode_records(deltas[: len(found)])) <= len(torn)


def test_a_changed_byte_ends_the_records() -> None:
    data = bytearray(text_tail.encode_header(EPOCH) + encode_records([delta("one"), delta("two")]))
    data[-1] ^= 1
    assert [one.text for one in decode_records(bytes(data), EPOCH)] == ["one"]


def test_records_of_another_database_are_ignored() -> None:
    data = text_tail.encode_header(EPOCH) + encode_records([delta("one")])
    assert decode_records(data, Epoch("e2")) == []


@pytest.mark.parametrize(
    ("records", "missing"),
    [
        ([record("cd", 2)], [(0, 2, "cd")]),
        ([record("ab", 0), record("cd", 2)], [(0, 2, "cd")]),
        ([record("bcd", 1), record("ef", 4)], [(0, 2, "cdef")]),
        ([record("b", 1)], []),
        ([record("late", 3)], []),
        ([record("ef", 4), record("cd", 2)], [(0, 2, "cdef")]),
        ([record("next", 0, part=3), record("new", 0, part=2)], [(2, 0, "new"), (3, 0, "next")]),
        ([record("new", 0, part=2)], [(2, 0, "new")]),
        ([record("new", 1, part=2)], []),
        ([record("new", 0, part=3)], []),
        ([record("input", 2, part=1)], []),
    ],
)
def test_only_text_that_continues_a_part_is_restored(
    records: Sequence[TailRecord], missing: list[tuple[int, int, str]]
) -> None:
    parts: list[Part] = [TextPart(Text("ab")), ToolCallPart(ToolCall("c", "ls", "{}"))]
    chunks = missing_text(MessageId("m"), 0, parts, records)
    assert [(chunk.part, chunk.pos, chunk.text) for chunk in chunks] == missing


@given(st.lists(st.tuples(st.text(), st.integers(1, 20)), max_size=12), st.integers(0), st.data())
def test_the_output_of_a_call_is_restored_from_what_is_left(
    pieces: list[tuple[str, int]], dropped: int, data: st.DataObject
) -> None:
    """Each piece is followed by a record that repeats the end, as if it were carried over."""
    whole, records, repeated_at = "", list[TailRecord](), [0]
    for text, kept in pieces:
        records.append(output(text, len(whole)))
        whole += text
        repeated_at.append(len(records))
        end = whole[-kept:]
        records.append(output(end, len(whole) - len(end)))
    left = records[repeated_at[dropped % len(repeated_at)] :]
    found = shown_outputs([record("text", 0), *data.draw(st.permutations(left))])
    restored = found.get((MessageId("m"), "c"), ShownOutput())
    assert whole.endswith(restored.text)
    assert restored.length == (len(whole) if left else 0)
    assert restored.length - len(restored.text) == min((one.offset for one in left), default=0)


def test_outputs_of_calls_are_separate() -> None:
    records = [output("one", 0, "a"), output("two", 0, "b"), output(" more", 3, "a")]
    found = shown_outputs(
        decode_records(text_tail.encode_header(EPOCH) + encode_records(records), EPOCH)
    )
    texts = {call_id: shown.text for (_, call_id), shown in found.items()}
    assert texts == {"a": "one more", "b": "two"}


def test_only_the_end_of_an_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tail, "OUTPUT_CHARS_MAX", 5)
    shown = ShownOutput()
    shown.add(0, "1234")
    assert shown.described() == "1234"
    shown.add(4, "5" * 1200)
    assert shown.described() == "[… 1,199 characters are left out here …]\n55555"


async def test_text_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    database = tmp_path / "culm.db"
    tail = open_text_tail(database, EPOCH)
    tail.write([delta("some"), delta(" text", 4)])
    (file,) = [path for path in tmp_path.iterdir() if path.stat().st_size]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await tail.close()
    again = open_text_tail(database, EPOCH)
    assert [one.text for one in again.recovered] == ["some", " text"]
    await again.clear()
    await again.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0, 0]


async def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def write_some(descriptor: int, data: bytes, at: int) -> int:
        return pwrite(descriptor, data[:7], at)

    monkeypatch.setattr(os, "pwrite", write_some)
    tail = open_text_tail(tmp_path / "culm.db", EPOCH)
    tail.write([delta("a text longer than seven bytes")])
    await tail.close()
    again = open_text_tail(tmp_path / "culm.db", EPOCH)
    assert [one.text for one in again.recovered] == ["a text longer than seven bytes"]
    await again.close()


async def test_a_failed_write_leaves_the_records_before_and_after_it() -> None:
    files = MemoryTailFile(), MemoryTailFile()
    tail = memory_tail(*files)
    tail.write([delta("one")])
    files[0].full = True
    with pytest.raises(OSError, match="No space") as caught:
        tail.write([delta("never sent, and longer than the next")])
    assert caught.value.errno == errno.ENOSPC
    files[0].full = False
    tail.write([delta("two")])
    assert [one.text for one in memory_tail(*files).recovered] == ["one", "two"]


async def test_a_file_is_emptied_only_after_its_text_is_committed() -> None:
    files = MemoryTailFile(), MemoryTailFile()
    tail = memory_tail(*files)
    tail.write([delta("first")])
    tail.switch()
    tail.write([delta("second")])
    tail.switch()  # The other file still has text.
    assert tail.number == 1
    assert tail.maintain(uncommitted=0)
    await worked(tail)
    assert [one.text for one in memory_tail(*files).recovered] == ["first", "second"]
    assert tail.maintain(uncommitted=1)
    await worked(tail)
    assert [one.text for one in memory_tail(*files).recovered] == ["second"]
    while tail.maintain(uncommitted=None):
        await worked(tail)
    assert memory_tail(*files).recovered == []


@contract("EXC-26")
@pytest.mark.parametrize("switches", [1, 2, 3])
async def test_text_of_two_files_is_restored_whichever_is_newer(switches: int) -> None:
    files = MemoryTailFile(), MemoryTailFile()
    tail = memory_tail(*files)
    for n in range(switches):
        tail.write([delta(str(n), n)])
        tail.maintain(uncommitted=n)  # Empties the file before.
        await worked(tail)
        tail.switch()
    tail.write([delta("!", switches)])
    stored = "012"[: switches - 1]
    (chunk,) = missing_text(
        MessageId("m"), 0, [TextPart(Text(stored))], memory_tail(*files).recovered
    )
    assert stored + chunk.text == "012"[:switches] + "!"


async def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tail, "FILE_BYTES_MAX", 100)
    tail = memory_tail()
    tail.write([delta("x" * 100)])
    with pytest.raises(OSError, match="full"):
        tail.write([delta("x")])


async def test_a_second_server_does_not_disturb_the_first(tmp_path: Path) -> None:
    first = open_text_tail(tmp_path / "culm.db", EPOCH)
    first.write([delta("kept")])
    second = open_text_tail(tmp_path / "culm.db", EPOCH)
    assert second.recovered == []
    second.write([delta("other")])
    await second.clear()
    await second.close()
    await first.close()
    again = open_text_tail(tmp_path / "culm.db", EPOCH)
    assert [one.text for one in again.recovered] == ["kept"]
    await again.close()


class Syncs:
    """Replaces `os.fdatasync` and counts the calls for the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.error: OSError | None = None
        self.count = 0
        self._folder = folder
        self._fdatasync = os.fdatasync

    def __call__(self, descriptor: int) -> None:
        if not Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(self._folder):
            return self._fdatasync(descriptor)  # Another test has not closed its tail yet.
        self.count += 1
        if self.error is not None:
            raise self.error
        return None

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.count < count:
                await asyncio.sleep(0.01)


@pytest.fixture
def syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    monkeypatch.setattr(text_tail, "SYNC_S", 0.0)
    syncs = Syncs(tmp_path)
    monkeypatch.setattr(os, "fdatasync", syncs)
    return syncs


async def test_failed_sync_is_logged_once_and_tried_again(
    tmp_path: Path, syncs: Syncs, caplog: pytest.LogCaptureFixture
) -> None:
    tail = open_text_tail(tmp_path / "culm.db", EPOCH)
    syncs.error = OSError(errno.EIO, "Input/output error")
    tail.write([delta("one")])
    await syncs.until(2)  # Both files.
    tail.write([delta("two", 3)])
    await syncs.until(4)
    assert caplog.text.count("cannot be synced") == 1
    syncs.error = None
    tail.write([delta("three", 6)])
    await syncs.until(6)
    await tail.close()


async def test_text_is_recorded_if_no_thread_can_be_started(
    tmp_path: Path,
    syncs: Syncs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tail = open_text_tail(tmp_path / "culm.db", EPOCH)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        tail.write([delta("one")])
        tail.write([delta("two", 3)])
    assert caplog.text.count("can't start new thread") == 1
    assert syncs.count == 0
    tail.write([delta("three", 6)])
    await syncs.until(2)
    await tail.close()
    again = open_text_tail(tmp_path / "culm.db", EPOCH)
    assert [one.text for one in again.recovered] == ["one", "two", "three"]
    await again.close()


def test_the_end_of_refused_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tail, "OUTPUT_CHARS_MAX", 5)
    shown = ShownOutput()
    shown.add(0, "ab")
    shown.hold("cdefghi")
    assert (shown.length, shown.held) == (4, "efghi")
    shown.add(4, "efghi")
    assert (shown.length, shown.text) == (9, "efghi")
