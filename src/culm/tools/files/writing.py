"""Replacing the contents of a file atomically.

Owns how it is written: into a temporary file in the same directory, which replaces the old one when
everything is on the disk. Readers of the old file can read it to its end, and a full disk leaves it
unchanged. Mode, owner, group and extended attributes are preserved. If a file has several names
(hard links), the other names keep the old contents, as with every editor that writes this way.
"""

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from culm.tools.files.safe_open import OpenRefused, open_file

MODE_NEW = 0o666  # Minus the umask, as for every program.
_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_all(descriptor: int, bytes_max: int) -> bytes:
    """Read an open file from its beginning; one byte more than the maximum means it is longer."""
    pieces: list[bytes] = []
    size = 0
    while size <= bytes_max and (piece := os.pread(descriptor, bytes_max + 1 - size, size)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def check_writable(status: os.stat_result, path: str) -> None:
    """Raise `OpenRefused` for a read-only file, which a replacement would ignore."""
    if not status.st_mode & 0o222:
        mode = stat.S_IMODE(status.st_mode)
        raise OpenRefused(
            f"{path} is read-only (mode {mode:o}); change its mode first, if that is allowed."
        )


def replace_file(
    within: int, name: str, path: str, data: bytes, temporary: str, is_wanted: Callable[[int], bool]
) -> os.stat_result:
    """Replace the file `name`; raises `OpenRefused`, OSError.

    `is_wanted` is called last, with the old file open.
    """
    descriptor, old = open_file(name, within, path)
    try:
        check_writable(old, path)
        if not os.access(name, os.W_OK, dir_fd=within, effective_ids=_BY_EFFECTIVE_IDS):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with _temporary(within, temporary):
            new = _write(
                within, temporary, 0o600, data, lambda copy: _carry_over(descriptor, old, copy)
            )
            if not is_wanted(descriptor) or not _is_same(within, name, old):
                raise OpenRefused(
                    f"{path} has been changed meanwhile; nothing was written. View it again."
                )
            os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)
        return new
    finally:
        os.close(descriptor)


def create_file(
    within: int, name: str, path: str, data: bytes, temporary: str, is_wanted: Callable[[], bool]
) -> os.stat_result:
    """Create the file `name`, which must not exist; raises `OpenRefused`, OSError."""
    with _temporary(within, temporary):
        status = _write(within, temporary, MODE_NEW, data, lambda _: None)
        if not is_wanted():
            raise OpenRefused(f"{path} was not written: there was no time left.")
        try:
            # Not a rename, which would replace a file created meanwhile.
            os.link(temporary, name, src_dir_fd=within, dst_dir_fd=within, follow_symlinks=False)
        except FileExistsError:
            raise OpenRefused(
                f"{path} has been created meanwhile; nothing was written. View it."
            ) from None
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            # A file system without hard links; a race remains between this check and the rename.
            _check_free(within, name, path)
            os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)
    return status


_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids


def _check_free(within: int, name: str, path: str) -> None:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=within, follow_symlinks=False)
        raise OpenRefused(f"{path} has been created meanwhile; nothing was written. View it.")


def _is_same(within: int, name: str, old: os.stat_result) -> bool:
    """Return True if the name still refers to the file that was opened."""
    try:
        now = os.stat(name, dir_fd=within, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (old.st_dev, old.st_ino)


def _write(
    within: int, temporary: str, mode: int, data: bytes, finish: Callable[[int], None]
) -> os.stat_result:
    descriptor = os.open(temporary, _TEMPORARY, mode, dir_fd=within)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        finish(descriptor)
        # Before it gets its name: otherwise a power failure could leave an empty file.
        os.fsync(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _carry_over(old_file: int, old: os.stat_result, new_file: int) -> None:
    for user, group in ((-1, old.st_gid), (old.st_uid, -1)):
        with suppress(PermissionError):  # Only root can give files away.
            os.fchown(new_file, user, group)
    new, mode = os.fstat(new_file), stat.S_IMODE(old.st_mode)
    # A program that ran as another user must not run as this one.
    if new.st_uid != old.st_uid:
        mode &= ~stat.S_ISUID
    if new.st_gid != old.st_gid:
        mode &= ~stat.S_ISGID
    os.fchmod(new_file, mode)
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # Not every file system has them, and some cannot be set.
            for attribute in os.listxattr(old_file):
                os.setxattr(new_file, attribute, os.getxattr(old_file, attribute))


@contextmanager
def _temporary(within: int, name: str) -> Generator[None]:
    """Remove the temporary file when the block ends, in every case."""
    try:
        yield
    finally:
        with suppress(OSError):  # Usually it has been renamed by then.
            os.unlink(name, dir_fd=within)
