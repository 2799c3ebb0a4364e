"""The common part of write, edit and multiedit: inspect one file, show the change, replace it.

`prepare` reads the file and computes its new contents; a person sees both. `run` opens the same
real path again, through no link, and replaces the file only if it still has the old contents.
"""

import asyncio
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from culm.config.sources import PROJECT_FILES
from culm.ids import SessionId
from culm.model.base import ToolSpec
from culm.store.sessions import add_write
from culm.tools.arguments import InvalidArguments, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, ToolContext
from culm.tools.files.diffs import TextDifference, difference, excerpts
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.kinds import (
    FileText,
    check_text,
    is_encodable,
    read_head,
    read_text,
    size_text,
)
from culm.tools.files.paths import KERNEL_FOLDERS, MissingPath, WorkspacePaths, is_below
from culm.tools.files.read_tool import OwnWrites, exact, find_staleness, run_in_thread, stamp_of
from culm.tools.files.replace import ReplaceFailed
from culm.tools.files.safe_open import OpenRefused, open_file, shown
from culm.wire.codec import Json, clean, encode
from culm.wire.runs import CrashPolicy

A = TypeVar("A", bound=msgspec.Struct)

FILE_BYTES_MAX = 10 << 20  # Larger files are data; a command changes them better than a model.
HISTORY_CHARS_MAX = 2 << 20  # No versions of larger files are stored.
LOCK_S = 5.0  # The wait for another write in the same workspace.
NAME_BYTES_MAX = 255  # Per component, on every supported file system.
CONFIGURATIONS = frozenset(PROJECT_FILES)
_REPOSITORY = re.compile(r"/\.git(?=/|$)", re.IGNORECASE)


class FileToChange(Struct, frozen=True):
    """The file to be changed, in its current state."""

    path: str  # Real.
    shown: str
    text: FileText
    digest: str | None  # Of its bytes; None if the file does not exist.
    stamp: str = ""

    @property
    def exists(self) -> bool:
        return self.digest is not None


class Rewrite(Struct, frozen=True):
    """The new text of a file, computed by a tool."""

    text: str
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])  # More metadata.
    note: str = ""  # For the model, after the summary.


class FileChange(Struct, frozen=True):
    """A file, and its new contents."""

    found: FileToChange
    rewrite: Rewrite
    data: bytes
    difference: TextDifference
    # Both texts in valid UTF-8: whole, and as excerpts for clients.
    before: str
    after: str
    excerpts: tuple[str, str]


class ChangeTool(Struct, Generic[A], frozen=True):
    """A tool that changes one file. After a crash a person decides: it may have happened."""

    context: ToolContext
    spec: ToolSpec
    arguments: type[A]
    path_of: Callable[[A], str]
    rewrite: Callable[[A, FileToChange], Rewrite]  # Pure; raises `ReplaceFailed`, `OpenRefused`.
    answer: Callable[
        [FileChange], tuple[str, Mapping[str, Json]]
    ]  # The text of the result, and its metadata.
    parallel: bool = False
    crash: CrashPolicy = "ask"
    own: OwnWrites = field(default_factory=OwnWrites)

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, self.arguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        seen = await run_in_thread(self.context.executor, lambda _: self._inspect(arguments))
        if isinstance(seen, CallResult):
            return seen
        found, change = seen
        if found.exists and not self.own.has(call.session_id, found.path, found.stamp):
            stale = await find_staleness(
                self.context.store, call.session_id, found.path, found.stamp
            )
            if stale is not None:
                return CallResult(f"{found.shown} {stale}. Nothing was written.", is_error=True)
        if isinstance(change, str):
            return CallResult(change, is_error=True)
        return CallPlan(_action(self.context, call, change), lambda _: self._run(call, change))

    def _inspect(self, arguments: A) -> tuple[FileToChange, FileChange | str]:
        """Return the file and its change, or why it cannot be changed. Runs in a thread."""
        found = find_file(self.context.paths, self.path_of(arguments))
        try:
            return found, _change(found, self.rewrite(arguments, found))
        except (ReplaceFailed, OpenRefused) as exc:
            return found, clean(str(exc))

    async def _run(self, call: CallRequest, change: FileChange) -> CallResult:
        written: list[str] = []  # Its stamp, once the file has its new contents.
        name = change.found.shown
        try:
            stamp = await self.context.executor.run(lambda stop: self._write(change, stop, written))
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            wall_s = f"{self.context.executor.wall_s:g}"
            text = f"The disk did not answer within {wall_s} seconds. Whether {name} was written"
            return CallResult(f"{text} is not known: view it before you go on.", is_error=True)
        except asyncio.CancelledError:
            if written:  # The file has been written, so the record must match it.
                self._note(call, change, written[0])
            raise
        self._note(call, change, stamp)
        text, about = self.answer(change)
        return CallResult(text, metadata=encode(about).decode())

    def _note(self, call: CallRequest, change: FileChange, stamp: str) -> None:
        """Store both versions, and that the session knows the file."""
        is_kept = max(len(change.before), len(change.after)) <= HISTORY_CHARS_MAX
        unit = add_write(
            (self.context.ids.file(), self.context.ids.file()),
            SessionId(call.session_id),
            change.found.path,
            (change.before, change.after) if is_kept else None,
            stamp,
        )
        self.own.note(self.context, call.session_id, change.found.path, stamp, unit)

    def _write(self, change: FileChange, stop: StopFlag, written: list[str]) -> str:
        temporary = f".culm-{self.context.ids.file()}.tmp"
        if not self.context.paths.writing.acquire(timeout=LOCK_S):
            raise OpenRefused("Another write in this workspace is taking long; try again.")
        try:
            stamp = _write_file(self.context.paths, change, stop, temporary)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise OpenRefused(
                f"{change.found.shown} cannot be written: {reason}. Nothing was changed."
            ) from exc
        finally:
            self.context.paths.writing.release()
        written.append(stamp)
        return stamp


def find_file(paths: WorkspacePaths, path: str) -> FileToChange:
    """Find the file to be changed, or the path of a new one; raises `OpenRefused`."""
    try:
        target = paths.resolve(path)
    except MissingPath as missing:
        return _new_file(paths, missing)
    name = paths.shown(target.path)
    _check_name(target.path, name)
    if target.is_directory:
        raise OpenRefused(f"{name} is a directory, not a file.")
    with paths.open_real(target.path) as opened:
        if opened.is_directory:
            raise OpenRefused(f"{name} is a directory, not a file.")
        check_writable(opened.status, name)
        if opened.status.st_size > FILE_BYTES_MAX:
            size = size_text(opened.status.st_size)
            raise OpenRefused(f"{name} has {size}; files over 10 MiB are changed with a command.")
        check_text(read_head(opened), opened)
        data = read_all(opened.descriptor, FILE_BYTES_MAX)
        if len(data) > FILE_BYTES_MAX:
            raise OpenRefused(f"{name} grows while it is read.")
        try:
            text = read_text(data)
        except UnicodeDecodeError:
            raise OpenRefused(
                f"{name} begins like UTF-16 but is not valid UTF-16; it is not changed."
            ) from None
        return FileToChange(target.path, name, text, _digest(data), stamp_of(opened.status))


def _new_file(paths: WorkspacePaths, missing: MissingPath) -> FileToChange:
    path = "/".join((missing.within.rstrip("/"), missing.name, *missing.rest))
    name = paths.shown(path)
    _check_name(path, name)
    if ".." in missing.rest:
        raise OpenRefused(f"{missing} A path cannot go through it with `..`.")
    if any(len(part.encode()) > NAME_BYTES_MAX for part in missing.rest):
        raise OpenRefused(f"A name in {name} is longer than {NAME_BYTES_MAX} bytes.")
    if any(is_below(path, folder) for folder in KERNEL_FOLDERS):
        raise OpenRefused(f"{name} belongs to the kernel; it cannot be written.")
    if missing.rest and not paths.contains(path):
        raise OpenRefused(f"{missing} Directories are created only in the workspace.")
    return FileToChange(path, name, FileText(""), None)


def _check_name(path: str, name: str) -> None:
    if exact(path) != path:
        raise OpenRefused(f"The name of {name} is not UTF-8; use a command to change this file.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _change(found: FileToChange, rewrite: Rewrite) -> FileChange:
    if found.exists and rewrite.text == found.text.text:
        raise OpenRefused(f"{found.shown} has exactly this content already; nothing was written.")
    data = found.text.encode_text(rewrite.text)
    if len(data) > FILE_BYTES_MAX:
        raise OpenRefused(f"{found.shown} would have {size_text(len(data))}; the limit is 10 MiB.")
    before, after = clean(found.text.text), clean(rewrite.text)
    changed = difference(found.text.text, rewrite.text)
    return FileChange(found, rewrite, data, changed, before, after, excerpts(before, after))


def check_encodable(*texts: str) -> None:
    """Raise `OpenRefused` for text that cannot be in a file."""
    if not all(is_encodable(text) for text in texts):
        raise OpenRefused("The text contains an unpaired surrogate, which no file can contain.")


def _action(context: ToolContext, call: CallRequest, change: FileChange) -> ResolvedAction:
    path = change.found.path
    before, after = change.excerpts
    verb = "Change" if change.found.exists else "Create"
    return ResolvedAction(
        tool=call.name,
        name="write",
        description=f"{verb} {shown(path)}",
        path=shown(os.path.dirname(path)),  # noqa: PTH120 - of a text
        params={"file_path": shown(path), "old_content": before, "new_content": after},
        resolved={"path": path, "old": change.found.digest, "new": _digest(change.data)},
        paths=(path,),
        coverage=(f"write:{_grant_path(context, path)}",),
        why="" if context.paths.contains(path) else f"{shown(path)} is outside the workspace",
    )


def _grant_path(context: ToolContext, path: str) -> str:
    """Return the directory that a session grant covers: the workspace, or that of the file."""
    if special := special_path(context, path):
        return special
    return str(context.paths.root) if context.paths.contains(path) else os.path.dirname(path)  # noqa: PTH120


def special_path(context: ToolContext, path: str) -> str:
    """Return the path that an approval must name for a file that controls execution; "" for others.

    An approval to edit the project does not include writing a git hook, nor changing the
    configuration or data of culm itself, if they are in the workspace.
    """
    # Some file systems ignore case; a `.git` file names another repository.
    if found := _REPOSITORY.search(path):
        return path[: found.end()]
    data = os.path.realpath(context.outputs.parents[2])  # Above `projects/<key>/outputs`.
    if path.rpartition("/")[2].lower() in CONFIGURATIONS:
        return path
    return path if context.paths.contains(data) and is_below(path, data) else ""


def _write_file(paths: WorkspacePaths, change: FileChange, stop: StopFlag, temporary: str) -> str:
    found = change.found
    with paths.open_parent(found.path, make=not found.exists) as (within, name):
        if not found.exists:
            status = create_file(
                within, name, found.shown, change.data, temporary, lambda: not stop.is_set()
            )
            return stamp_of(status)

        def is_wanted(descriptor: int) -> bool:
            if stop.is_set():
                raise OpenRefused(f"{found.shown} was not written: there was no time left.")
            return _digest(read_all(descriptor, FILE_BYTES_MAX)) == found.digest

        return stamp_of(replace_file(within, name, found.shown, change.data, temporary, is_wanted))


# --- replacing the contents of a file atomically
#
# The contents go into a temporary file in the same directory, which replaces the old one when
# everything is on the disk. Readers of the old file can read it to its end, and a full disk leaves
# it unchanged. Mode, owner, group and extended attributes are preserved. If a file has several
# names (hard links), the other names keep the old contents, as with every editor that writes
# this way.


MODE_NEW = 0o666  # Minus the umask, as for every program.
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
            name_file(within, temporary, name)
        except FileExistsError:
            raise OpenRefused(
                f"{path} has been created meanwhile; nothing was written. View it."
            ) from None
    return status


def name_file(within: int, temporary: str, name: str) -> None:
    """Give a complete file its name; raises `FileExistsError` if that has been taken meanwhile."""
    try:
        # Not a rename, which would replace a file created meanwhile.
        os.link(temporary, name, src_dir_fd=within, dst_dir_fd=within, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        # A file system without hard links: the name is reserved first, then replaced.
        os.close(os.open(name, CREATE_FLAGS, MODE_NEW, dir_fd=within))
        os.rename(temporary, name, src_dir_fd=within, dst_dir_fd=within)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_BY_EFFECTIVE_IDS = os.access in os.supports_effective_ids


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
    descriptor = os.open(temporary, CREATE_FLAGS, mode, dir_fd=within)
    try:
        write_all(descriptor, data)
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
