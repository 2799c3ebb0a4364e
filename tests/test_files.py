"""Private files: what is read of them, and what is left of a write that fails."""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from culm.files import UnreadableFile, locked, read_file, replace_file


def test_a_file_is_read_up_to_its_bound_and_refused_beyond_it(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    with pytest.raises(UnreadableFile, match="more than 4 bytes"):
        read_file(file, 4)


def test_what_is_not_there_is_no_trouble_of_reading(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("nothing", "dangling"):
        with pytest.raises(FileNotFoundError):
            read_file(tmp_path / name, 5)


def test_a_pipe_that_nobody_writes_to_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableFile, match="no file"):
        read_file(tmp_path / "pipe", 5)


def test_a_folder_a_device_and_a_circle_of_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "file").write_text("")
    for place in (tmp_path, Path("/dev/zero"), tmp_path / "a", tmp_path / "file" / "below"):
        with pytest.raises(UnreadableFile):
            read_file(place, 5)


def test_refusing_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = open_descriptors()
    for place in (tmp_path, Path("/dev/zero"), tmp_path / "nothing"):
        with pytest.raises((UnreadableFile, FileNotFoundError)):
            read_file(place, 5)
    assert open_descriptors() == before


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_write_makes_the_folder_and_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "f"
    replace_file(file, b"one")
    replace_file(file, b"two")
    assert file.read_bytes() == b"two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o077 == 0
    assert [found.name for found in file.parent.iterdir()] == ["f"]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()  # A file cannot take its place.
    (tmp_path / "f" / "kept").write_text("kept")
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "f", b"new")
    assert [found.name for found in tmp_path.rglob("*")] == ["f", "kept"]


def test_a_lock_keeps_others_out_until_the_block_ends_however_it_ends(tmp_path: Path) -> None:
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
