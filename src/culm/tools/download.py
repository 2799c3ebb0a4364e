"""`download`: something of the network into a new file, whole or not at all.

Owns the file while it grows: it has another name in the same directory until all of it has come,
and is removed if it does not. No file that is there already is replaced.
"""

import errno
import os
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, PathText, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.fetch import coverage_of, resolve_target, resolved, shown_private, why
from culm.tools.files.change import FileToChange, find_file, special_path
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.kinds import size_text
from culm.tools.files.paths import MissingPath, WorkspacePaths
from culm.tools.files.read_tool import run_in_thread
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.files.writing import MODE_NEW
from culm.tools.tool_context import ToolContext
from culm.tools.web.addresses import CheckedTarget
from culm.tools.web.http_fetch import (
    TIMEOUT_S,
    FetchedPage,
    Network,
    TimeoutSeconds,
    UrlText,
    bounded,
    open_page,
)
from culm.wire.runs import CrashPolicy

FILE_BYTES_MAX = 100 << 20
BATCH_BYTES = 1 << 20  # Handed to a thread at once; a thread for each packet would cost more.
_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DESCRIPTION = (
    "Get something from the network by its URL (GET; http or https) and keep it as it is in a new "
    "file; a file that is there already is not replaced. Redirects are followed, but not to "
    "private addresses. No proxy and no cookies are used. At most "
    f"{size_text(FILE_BYTES_MAX)}."
)


class DownloadArguments(Struct, frozen=True):
    url: UrlText
    file_path: Annotated[PathText, Meta(min_length=1, description="The file to be made.")]
    timeout: TimeoutSeconds = 0


SPEC = make_spec("download", DESCRIPTION, DownloadArguments)


@dataclass(frozen=True, slots=True)
class DownloadTool:
    context: ToolContext
    network: Network
    bytes_max: int = FILE_BYTES_MAX
    spec: ToolSpec = SPEC
    parallel: bool = False
    crash: CrashPolicy = "ask"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            given = parse_arguments(call.arguments or {}, DownloadArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.context.work, lambda _: _find_new(self.context.inside, given.file_path)
        )
        if isinstance(found, CallResult):
            return found
        try:
            checked = await resolve_target(self.context, self.network, given.url)
        except OpenRefused as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        action = _action(self.context, call, given, checked, found)
        return CallPlan(action, lambda _: self._run(given, checked, found))

    async def _run(
        self, given: DownloadArguments, checked: CheckedTarget, found: FileToChange
    ) -> CallResult:
        seconds = given.timeout or TIMEOUT_S
        part = _Part(self.context.inside, found, f".culm-{self.context.ids.file()}.tmp")
        try:
            async with (
                bounded(self.context.clock, seconds),
                open_page(checked, self.network) as page,
            ):
                _check(page, self.bytes_max)
                await self.context.work.run(part.begin)
                await self._receive(page, part)
            # Its time is over with the last byte: a file that has its name is not denied.
            unkept = await run_in_thread(self.context.work, part.finish)
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            said = f"{checked.site.url} took more than {seconds} seconds; nothing was kept."
            return CallResult(said, is_error=True)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            return CallResult(f"{found.shown} cannot be written: {reason}.", is_error=True)
        finally:
            part.close()
        if unkept is not None:
            return unkept
        kind = f", {shown(page.kind)[:80]}" if page.kind else ""
        moved = "" if page.site.url == checked.site.url else f" (redirected to {page.site.url})"
        return CallResult(f"{found.shown} is there: {size_text(part.size)}{kind}{moved}.")

    async def _receive(self, page: FetchedPage, part: "_Part") -> None:
        batch = bytearray()
        async with aclosing(page.pieces()) as pieces:
            async for piece in pieces:
                batch += piece
                if part.size + len(batch) > self.bytes_max:
                    raise _too_large(page, self.bytes_max)
                if len(batch) >= BATCH_BYTES:
                    full, batch = batch, bytearray()
                    await self.context.work.run(lambda _, full=full: part.write(full))
        await self.context.work.run(lambda _: part.write(batch))


def make_download(
    context: ToolContext, network: Network | None = None, bytes_max: int = FILE_BYTES_MAX
) -> DownloadTool:
    return DownloadTool(context, network or Network(), bytes_max)


class _Part:
    """A file that grows under another name. Its methods run in threads, but for `close`."""

    def __init__(self, inside: WorkspacePaths, found: FileToChange, temporary: str) -> None:
        self.size = 0
        self._inside = inside
        self._found = found
        self._temporary = temporary
        self._directory: int | None = None
        self._file: int | None = None

    def begin(self, stop: StopFlag) -> None:
        with self._inside.open_parent(self._found.path, make=True) as (within, _):
            directory = os.dup(within)
        try:
            file = os.open(self._temporary, _TEMPORARY, MODE_NEW, dir_fd=directory)
        except BaseException:  # boundary: raised again; a descriptor is not lost
            os.close(directory)
            raise
        self._directory, self._file = directory, file
        if stop.is_set():  # Nobody may be left who would close it.
            self.close()
            raise OpenRefused(f"{self._found.shown} was not written: there was no time left.")

    def write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self.size += len(data)

    def finish(self, stop: StopFlag) -> None:
        """Give it its name, if nothing else has taken that meanwhile."""
        assert self._file is not None
        os.fsync(self._file)
        name = self._found.path.rpartition("/")[2]
        if stop.is_set():
            raise OpenRefused(f"{self._found.shown} was not written: there was no time left.")
        within = self._directory
        try:
            # Not a rename, which would replace what somebody made there meanwhile.
            os.link(
                *(self._temporary, name),
                src_dir_fd=within,
                dst_dir_fd=within,
                follow_symlinks=False,
            )
        except FileExistsError:
            raise _taken(self._found.shown) from None
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            # A file system without hard links: the name is taken first, then filled.
            os.close(os.open(name, _TEMPORARY, MODE_NEW, dir_fd=within))
            os.rename(self._temporary, name, src_dir_fd=within, dst_dir_fd=within)

    def close(self) -> None:
        """Let go of it, and remove what has not got its name. May be called again."""
        file, self._file = self._file, None
        directory, self._directory = self._directory, None
        if file is not None:
            os.close(file)
        if directory is not None:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=directory)
            os.close(directory)


def _find_new(inside: WorkspacePaths, path: str) -> FileToChange:
    """The place of a file that is not there yet; raises `Refused`."""
    try:
        target = inside.resolve(path)
    except MissingPath:
        return find_file(inside, path)
    raise _taken(inside.shown(target.path))


def _taken(name: str) -> OpenRefused:
    return OpenRefused(f"There is a {name} already, and it is not replaced. Use another name.")


def _action(
    context: ToolContext,
    call: CallRequest,
    given: DownloadArguments,
    checked: CheckedTarget,
    found: FileToChange,
) -> ResolvedAction:
    directory = os.path.dirname(found.path)  # noqa: PTH120 - of a text
    # One grain for both: a consent to keep files of one host in one directory is neither a consent
    # to other files of that host nor to other ways of writing.
    into = f" into {special_path(context, found.path) or directory}"
    whys = [why(checked)] if checked.private else []
    if not context.inside.contains(found.path):
        whys.append(f"{shown(found.path)} is outside the workspace")
    return ResolvedAction(
        call.name,
        "download",
        description=f"Download {checked.site.url}{shown_private(checked)} to {shown(found.path)}",
        path=shown(directory),
        params={
            "url": checked.site.url,
            "file_path": shown(found.path),
            "timeout": given.timeout,
        },
        resolved={**resolved(checked), "path": found.path},
        paths=(found.path,),
        coverage=tuple(grain + into for grain in coverage_of("download", checked)),
        why="; ".join(whys),
    )


def _check(page: FetchedPage, bytes_max: int) -> None:
    if not 200 <= page.status < 300:
        said = f"{page.site.url} answered {page.status} {page.reason}".rstrip()
        raise OpenRefused(f"{said}; nothing was kept.")
    if page.bytes_said is not None and page.bytes_said > bytes_max:
        raise _too_large(page, bytes_max)


def _too_large(page: FetchedPage, bytes_max: int) -> OpenRefused:
    return OpenRefused(f"{page.site.url} has more than {size_text(bytes_max)}; nothing was kept.")
