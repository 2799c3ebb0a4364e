"""Private files: limited reads, atomic writes and locks."""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from culm.files import UnreadableFile, locked, read_file, replace_file


def test_file_beyond_the_size_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    with pytest.raises(UnreadableFile, match="more than 4 bytes"):
        read_file(file, 4)


def test_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("nothing", "dangling"):
        with pytest.raises(FileNotFoundError):
            read_file(tmp_path / name, 5)


def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFile, match="not a regular file"):
        read_file(tmp_path / "pipe", 5)


def test_folder_device_and_symlink_loop_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "file").write_text("")
    for place in (tmp_path, Path("/dev/zero"), tmp_path / "a", tmp_path / "file" / "below"):
        with pytest.raises(UnreadableFile):
            read_file(place, 5)


def test_refused_read_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = open_descriptors()
    for place in (tmp_path, Path("/dev/zero"), tmp_path / "nothing"):
        with pytest.raises((UnreadableFile, FileNotFoundError)):
            read_file(place, 5)
    assert open_descriptors() == before


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_write_creates_the_folder_and_a_file_with_mode_0600(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "f"
    replace_file(file, b"one")
    replace_file(file, b"two")
    assert file.read_bytes() == b"two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o077 == 0
    assert [found.name for found in file.parent.iterdir()] == ["f"]


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()  # A file cannot replace a folder.
    (tmp_path / "f" / "kept").write_text("kept")
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "f", b"new")
    assert [found.name for found in tmp_path.rglob("*")] == ["f", "kept"]


def test_lock_excludes_others_until_the_block_ends(tmp_path: Path) -> None:
    file = tmp_path / "f"
    descriptor = os.open(tmp_path / "f.lock", os.O_RDWR | os.O_CREAT)
    try:
        with suppress(ZeroDivisionError), locked(file):
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise ZeroDivisionError
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
