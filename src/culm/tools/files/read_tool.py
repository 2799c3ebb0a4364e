"""Tools that read one path: the access check, the record of what was read, and the tool itself.

A session knows the stamp of each file when it last read or wrote it: an edit of a file with another
stamp would overwrite contents that the model has never seen.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from culm.errors import AppError
from culm.model.base import ToolSpec
from culm.store.base import Unit
from culm.store.sessions import mark_read, read_stamp
from culm.store.store import Store
from culm.tools.arguments import InvalidArguments, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.files.file_executor import FileExecutor, StopFlag
from culm.tools.files.paths import MissingPath, PathTarget, WorkspacePaths, is_below
from culm.tools.files.safe_open import OpenRefused, list_directory, shown
from culm.tools.search.patterns import BadPattern
from culm.wire.codec import encodable
from culm.wire.runs import CrashPolicy

SIMILAR_MAX = 3
NAMES_COMPARED_MAX = 2000  # Comparing takes time, and a longer list does not help.


class FileAccess(Protocol):
    """The services that file tools need; `ToolContext` implements it."""

    @property
    def paths(self) -> WorkspacePaths: ...

    @property
    def executor(self) -> FileExecutor: ...

    @property
    def store(self) -> Store: ...

    @property
    def outputs(self) -> Path: ...


class ReadAccess(Struct, frozen=True):
    """The target of a read, and whether it is free."""

    target: PathTarget
    is_free: bool  # In the workspace, or kept output of its commands.


def check_read(access: FileAccess, path: str, stop: StopFlag) -> ReadAccess:
    """Resolve the path to be read; raises `OpenRefused`. Does blocking disk I/O."""
    try:
        target = access.paths.resolve(path)
    except MissingPath as missing:
        raise OpenRefused(f"{missing}{_similar(access, missing, stop)}") from missing
    return ReadAccess(target, _is_free(access, target.path))


def _is_free(access: FileAccess, path: str) -> bool:
    return access.paths.contains(path) or is_below(path, os.path.realpath(access.outputs))


def _similar(access: FileAccess, missing: MissingPath, stop: StopFlag) -> str:
    """Suggest similar names; none where reading is not free."""
    if not _is_free(access, missing.within):
        return ""
    try:
        with access.paths.open_real(missing.within) as opened:
            entries, _ = list_directory(opened.descriptor, opened.parts, stop.is_set)
            names = {entry.name.casefold(): entry.parts for entry in entries[:NAMES_COMPARED_MAX]}
            import difflib  # Only a misspelled name needs it.

            close = difflib.get_close_matches(missing.name.casefold(), names, SIMILAR_MAX)
            if not close:
                return ""
            return f" Similar: {', '.join(opened.shown_below(names[name]) for name in close)}."
    except (OpenRefused, OSError):
        return ""


def reading_action(
    call: CallRequest,
    name: str,
    verb: str,
    found: ReadAccess,
    arguments: msgspec.Struct,
    field: str,
) -> ResolvedAction:
    """Return the action of a call that reads; `field` is the argument with the path."""
    path = shown(found.target.path)
    values = encodable(msgspec.to_builtins(arguments))
    return ResolvedAction(
        tool=call.name,
        name=name,
        description=f"{verb} {path}",
        path=shown(found.target.directory),
        params={**values, field: path},
        resolved={"path": exact(found.target.path), "arguments": values},
        is_free=found.is_free,
        paths=(path,),
        coverage=(f"{name}:{exact(found.target.directory)}",),
        why="" if found.is_free else f"{path} is outside the workspace",
    )


def exact(path: str) -> str:
    """Return a path for the digest and for grants: different paths stay different, UTF-8 or not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"bytes:{os.fsencode(path).hex()}"
    return path


# --- the state of files that a session knows


class ReadResult(Struct, frozen=True):
    """A result, and the file that the session knows now."""

    result: CallResult
    path: str  # Real.
    stamp: str


def stamp_of(status: os.stat_result) -> str:
    """Return a value that changes when the file is written or replaced."""
    return f"{status.st_mtime_ns}:{status.st_size}:{status.st_ino}"


async def note_read(access: FileAccess, session_id: str, read: ReadResult) -> None:
    """Store it durably. If that fails, the model may have to read the file again."""
    if exact(read.path) == read.path:  # Otherwise it cannot be stored as text.
        with suppress(AppError):
            await asyncio.shield(access.store.write(mark_read(session_id, read.path, read.stamp)))


class OwnWrites:
    """Stamps of files written by this process until the store has them, by session and path.

    It saves the next edit the wait for a commit; the store is authoritative.
    """

    def __init__(self) -> None:
        self._stamps: dict[tuple[str, str], str] = {}

    def note(self, access: FileAccess, session_id: str, path: str, stamp: str, unit: Unit) -> None:
        """Record a write that has happened, without waiting.

        The store keeps the order, so a durable result always has its versions stored, too.
        """
        key = session_id, path
        self._stamps[key] = stamp

        def forget(_: object) -> None:
            if self._stamps.get(key) == stamp:
                del self._stamps[key]

        access.store.write(unit, on_commit=forget, on_fail=forget)

    def has(self, session_id: str, path: str, stamp: str) -> bool:
        return self._stamps.get((session_id, path)) == stamp


async def find_staleness(store: Store, session_id: str, path: str, stamp: str) -> str | None:
    """Return why a session may not write a file with this `stamp`; None if it may."""
    known = await store.read(read_stamp(session_id, path))
    if known != stamp:
        await store.write(lambda tx: None)  # A write of this process may be pending: wait for it.
        known = await store.read(read_stamp(session_id, path))
    if not known:
        return "was not read in this session yet; view it first"
    return None if known == stamp else "has changed since it was last read; view it again first"


# --- the tool


A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")


class ReadTool(Struct, Generic[A], frozen=True):
    """A tool that only reads: it may run concurrently, and again after a crash.

    Its path is resolved before approval; the same path is opened afterwards.
    """

    access: FileAccess
    spec: ToolSpec
    arguments: type[A]
    path_of: Callable[[A], str]
    # Runs in a thread; the stamp of a file that was read is stored.
    effect: Callable[[A, PathTarget, StopFlag], CallResult | ReadResult]
    action: Literal["read", "list"] = "read"
    verb: str = "Read"
    path_field: str = "path"
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, self.arguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.access.executor, lambda stop: self._inspect(arguments, stop)
        )
        if isinstance(found, CallResult):
            return found
        action = reading_action(call, self.action, self.verb, found, arguments, self.path_field)
        return CallPlan(action, lambda _: self._run(call, arguments, found.target))

    def _inspect(self, arguments: A, stop: StopFlag) -> ReadAccess:
        return check_read(self.access, self.path_of(arguments), stop)

    async def _run(self, call: CallRequest, arguments: A, target: PathTarget) -> CallResult:
        outcome = await run_in_thread(
            self.access.executor, lambda stop: self.effect(arguments, target, stop)
        )
        if isinstance(outcome, CallResult):
            return outcome
        await note_read(self.access, call.session_id, outcome)
        return outcome.result


async def run_in_thread(executor: FileExecutor, job: Callable[[StopFlag], T]) -> T | CallResult:
    """Run `job` in a thread; a refusal becomes a result."""
    try:
        return await executor.run(job)
    except BadPattern as exc:
        return CallResult(f"This pattern cannot be used: {exc}.", is_error=True)
    except OpenRefused as exc:
        return CallResult(str(exc), is_error=True)
    except TimeoutError:
        return CallResult(
            f"The disk did not answer within {executor.wall_s:g} seconds.", is_error=True
        )
