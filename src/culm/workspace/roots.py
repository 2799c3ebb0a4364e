"""Data directories and the workspaces in them: one lock per directory, and a list of all."""

import asyncio
import fcntl
import json
import logging
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import MsgspecError, Struct

from culm import __version__
from culm.clock import Clock, Timer
from culm.errors import DataLocked
from culm.files import replace_file
from culm.ids import WorkspaceId
from culm.wire.codec import decode, encode

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 30.0  # The interval for touching a held lock file.

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3


def project_key(path: Path) -> str:
    """Return a directory name for a workspace: readable, and unique by its FNV-1a hash."""
    text = str(path)
    digest = _FNV_OFFSET
    for byte in os.fsencode(text):
        digest = ((digest ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    readable = re.sub(r"[^A-Za-z0-9]", "-", text)
    # A file name holds 255 bytes; the hash distinguishes truncated paths.
    return f"{readable[-200:]}-{digest & 0xFFFFFFFF:08x}"


def project_folder(root: Path, path: Path) -> Path:
    """Return the directory with all data of a workspace."""
    return root / "projects" / project_key(path)


class WorkspaceInfo(Struct, frozen=True):
    """The identity of a workspace, fixed by its first creator."""

    id: WorkspaceId
    path: Path  # Canonical; clients see `given_path`.
    given_path: str
    root: Path
    yolo: bool = False
    debug: bool = False
    channels: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The directory with all its data."""
        return project_folder(self.root, self.path)


class _Held(Struct):
    descriptor: int
    alive_s: float | None  # The last sign of life of an earlier holder.
    count: int = 1


class DataRoots:
    """The data directories locked by this process. A second process gets `DataLocked`."""

    def __init__(self, clock: Clock, *, locking: bool = True) -> None:
        self._clock = clock
        self._started_s = clock.now_s()
        self._locking = locking
        self._held: dict[Path, _Held] = {}
        self._taking = asyncio.Lock()
        self._touching: Timer | None = None

    @asynccontextmanager
    async def hold(self, root: Path) -> AsyncGenerator[float | None]:
        """Hold the lock of `root` during the block, shared within this process.

        Yields the time when an earlier holder was last alive, if there was one.
        """
        async with self._taking:
            root = await asyncio.to_thread(self._take, root)
        if self._touching is None:
            self._touching = self._clock.call_later(ALIVE_EVERY_S, self._touch)
        held = self._held.get(root)
        try:
            yield None if held is None else held.alive_s
        finally:
            self._give(root)

    def _touch(self) -> None:
        """Record that this process is alive, for the next one after a crash."""
        self._touching = self._clock.call_later(ALIVE_EVERY_S, self._touch)
        now_s = self._clock.now_s()
        for root, held in list(self._held.items()):
            try:
                os.utime(held.descriptor, (now_s, now_s))
            except OSError as exc:
                log.warning("cannot touch the lock of %s: %s", root, exc.strerror)

    def _take(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        root = root.resolve()
        held = self._held.get(root)
        if held is not None:
            if not _is_at(held.descriptor, root / "culm.lock"):
                # The directory was removed, and our lock with it: lock the new one, or fail.
                anew, _ = self._lock(root)
                os.close(held.descriptor)
                held.descriptor = anew
            held.count += 1
            return root
        if not (root / ".gitignore").exists():
            # A data directory inside a project must not be committed to its repository.
            (root / ".gitignore").write_text("*\n")
        if self._locking:
            self._held[root] = _Held(*self._lock(root))
        return root

    def _give(self, root: Path) -> None:
        if held := self._held.get(root):
            held.count -= 1
            if not held.count:
                # Keep the file: the lock belongs to the inode.
                os.close(self._held.pop(root).descriptor)
        if not self._held and self._touching is not None:
            self._touching.cancel()
            self._touching = None

    def _lock(self, root: Path) -> tuple[int, float | None]:
        file = root / "culm.lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.read(descriptor, 4096).decode(errors="replace").strip()
            os.close(descriptor)
            raise DataLocked(str(root), _owner_text(owner)) from exc
        before = os.fstat(descriptor)
        owner = {"pid": os.getpid(), "version": __version__, "started": int(self._started_s)}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        now_s = self._clock.now_s()
        os.utime(descriptor, (now_s, now_s))
        return descriptor, before.st_mtime if before.st_size else None


def is_in_use(root: Path) -> bool:
    """Return True if the last process that locked a data directory is still alive.

    Read-only: taking the lock here could refuse a server that starts at the same moment.
    """
    try:
        pid = int(json.loads((root / "culm.lock").read_text())["pid"])
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _owner_text(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"another process (pid {int(owner['pid'])}, culm {owner['version']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


class KnownWorkspace(Struct, frozen=True):
    """A workspace that was opened before."""

    path: str
    root: str
    id: str


def remember_workspace(data_dir: Path, *, path: Path, root: Path, workspace_id: str) -> None:
    """Add to `<data>/workspaces.json`, replaced atomically; called from one thread at a time."""
    file = data_dir / "workspaces.json"
    known = read_workspaces(data_dir)
    entry = KnownWorkspace(str(path), str(root), workspace_id)
    if entry in known:
        return
    known = [other for other in known if other.path != entry.path] + [entry]
    replace_file(file, encode(known))


def read_workspaces(data_dir: Path) -> list[KnownWorkspace]:
    try:
        return decode((data_dir / "workspaces.json").read_bytes(), list[KnownWorkspace])
    except FileNotFoundError:
        return []
    except MsgspecError:
        return []  # Damaged: the list is a convenience, and every open rewrites it.
