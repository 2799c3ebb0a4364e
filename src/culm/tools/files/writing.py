"""Putting new contents in the place of a file, whole or not at all.

Owns how it is written: into a file of another name in the same directory, which takes the place
of the old one when everything is on the disk. Whoever reads the old one meanwhile reads it to its
end, and a disk that is full leaves it as it was. Mode, owner, group and extended attributes are
carried over. Of a file with several names (hard links) the other names keep the old contents, as
with every editor that writes this way.
"""

import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from culm.tools.files.safe_open import OpenRefused, open_file

MODE_NEW = 0o666  # Less the umask, as for every program.
_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_all(descriptor: int, bytes_max: int) -> bytes:
    """An open file from its beginning; one byte too many says that there is more."""
    pieces: list[bytes] = []
    size = 0
    while size <= bytes_max and (piece := os.pread(descriptor, bytes_max + 1 - size, size)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def check_writable(status: os.stat_result, path: str) -> None:
    """Raise `Refused` for a file that is meant to stay: replacing would not even notice."""
    if not status.st_mode & 0o222:
        mode = stat.S_IMODE(status.st_mode)
        raise OpenRefused(
            f"{path} is read-only (mode {mode:o}); change its mode first, if you may."
        )


def replace_file(
    within: int, name: str, path: str, data: bytes, temporary: str, is_wanted: Callable[[int], bool]
) -> os.stat_result:
    """Replace the file `name`; raises `Refused`, OSError.

    `is_wanted` is asked last, with the old file open.
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
                    f"{path} was changed meanwhile; nothing was written. View it again."
                )
            os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)
        return new
    finally:
        os.close(descriptor)


def create_file(
    within: int, name: str, path: str, data: bytes, temporary: str, is_wanted: Callable[[], bool]
) -> os.stat_result:
    """Make the file `name`, which must not exist; raises `Refused`, OSError."""
    with _temporary(within, temporary):
        status = _write(within, temporary, MODE_NEW, data, lambda _: None)
        if not is_wanted():
            raise OpenRefused(f"{path} was not written: there was no time left.")
        try:
            # Not a rename: what somebody made there meanwhile is not replaced.
            os.link(temporary, name, src_dir_fd=within, dst_dir_fd=within, follow_symlinks=False)
        except FileExistsError:
            raise OpenRefused(f"{path} was made meanwhile; nothing was written. View it.") from None
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            # A file system without hard links; between this look and the rename is a gap.
            _check_free(within, name, path)
            os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)
    return status


_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids


def _check_free(within: int, name: str, path: str) -> None:
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=within, follow_symlinks=False)
        raise OpenRefused(f"{path} was made meanwhile; nothing was written. View it.")


def _is_same(within: int, name: str, old: os.stat_result) -> bool:
    """Whether the name still means the file that was looked at."""
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
        # Before it gets its name: else a power failure could leave an empty file under it.
        os.fsync(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _carry_over(old_file: int, old: os.stat_result, new_file: int) -> None:
    for user, group in ((-1, old.st_gid), (old.st_uid, -1)):
        with suppress(PermissionError):  # Only root gives files away.
            os.fchown(new_file, user, group)
    new, mode = os.fstat(new_file), stat.S_IMODE(old.st_mode)
    # A program that ran as somebody else must not run as us instead.
    if new.st_uid != old.st_uid:
        mode &= ~stat.S_ISUID
    if new.st_gid != old.st_gid:
        mode &= ~stat.S_ISGID
    os.fchmod(new_file, mode)
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # Not every file system has them, nor may we set each.
            for attribute in os.listxattr(old_file):
                os.setxattr(new_file, attribute, os.getxattr(old_file, attribute))


@contextmanager
def _temporary(within: int, name: str) -> Generator[None]:
    """At the end of the block there is no such file, whatever happened."""
    try:
        yield
    finally:
        with suppress(OSError):  # Mostly it has another name by then.
            os.unlink(name, dir_fd=within)
