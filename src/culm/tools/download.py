"""`download`: a URL saved to a new file, completely or not at all.

Owns the file while it grows: it has a temporary name in the same directory until it is complete,
and is removed if it fails. An existing file is never replaced.
"""

import os
from contextlib import aclosing, suppress
from typing import Annotated

from msgspec import Meta, Struct

from culm.clock import time_limit
from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, PathText, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, ToolContext
from culm.tools.fetch import resolve_target
from culm.tools.files.change import (
    CREATE_FLAGS,
    MODE_NEW,
    FileToChange,
    find_file,
    name_file,
    special_path,
    write_all,
)
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.kinds import size_text
from culm.tools.files.paths import MissingPath, WorkspacePaths
from culm.tools.files.read_tool import run_in_thread
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.web.addresses import CheckedTarget
from culm.tools.web.http_fetch import (
    TIMEOUT_S,
    FetchedPage,
    Network,
    TimeoutSeconds,
    UrlText,
    open_page,
)
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

FILE_BYTES_MAX = 100 << 20
BATCH_BYTES = 1 << 20  # Written by a thread at once; one thread call per packet would cost more.
DESCRIPTION = (
    "Download a URL (GET; http or https) and save it unchanged in a new file; an existing file is "
    "not replaced. Redirects are followed, but not to "
    "private addresses. No proxy and no cookies are used. At most "
    f"{size_text(FILE_BYTES_MAX)}."
)


class DownloadArguments(Struct, frozen=True):
    url: UrlText
    file_path: Annotated[PathText, Meta(min_length=1, description="The file to create.")]
    timeout: TimeoutSeconds = 0


SPEC = make_spec(
    "download",
    DESCRIPTION,
    DownloadArguments,
    ToolFacts(kind="fetch", path_arguments=("file_path",), shown_arguments=("url", "file_path")),
)


class DownloadTool(Struct, frozen=True):
    context: ToolContext
    network: Network
    bytes_max: int = FILE_BYTES_MAX
    spec: ToolSpec = SPEC
    parallel: bool = False
    crash: CrashPolicy = "ask"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, DownloadArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.context.executor, lambda _: _find_new(self.context.paths, arguments.file_path)
        )
        if isinstance(found, CallResult):
            return found
        try:
            checked = await resolve_target(self.context, self.network, arguments.url)
        except OpenRefused as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        action = _action(self.context, call, arguments, checked, found)
        return CallPlan(action, lambda _: self._run(arguments, checked, found))

    async def _run(
        self, arguments: DownloadArguments, checked: CheckedTarget, found: FileToChange
    ) -> CallResult:
        seconds = arguments.timeout or TIMEOUT_S
        part = _Part(self.context.paths, found, f".culm-{self.context.ids.file()}.tmp")
        try:
            async with (
                time_limit(self.context.clock, seconds),
                open_page(checked, self.network) as page,
            ):
                _check(page, self.bytes_max)
                await self.context.executor.run(part.begin)
                await self._receive(page, part)
            # The time limit ends with the last byte, so a complete file is never reported as
            # failed.
            failure = await run_in_thread(self.context.executor, part.finish)
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            message = f"{checked.site.url} took more than {seconds} seconds; nothing was saved."
            return CallResult(message, is_error=True)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            return CallResult(f"{found.shown} cannot be written: {reason}.", is_error=True)
        finally:
            part.close()
        if failure is not None:
            return failure
        kind = f", {shown(page.kind)[:80]}" if page.kind else ""
        moved = "" if page.site.url == checked.site.url else f" (redirected to {page.site.url})"
        return CallResult(f"{found.shown} was saved: {size_text(part.size)}{kind}{moved}.")

    async def _receive(self, page: FetchedPage, part: "_Part") -> None:
        batch = bytearray()
        async with aclosing(page.pieces()) as pieces:
            async for piece in pieces:
                batch += piece
                if part.size + len(batch) > self.bytes_max:
                    raise _too_large(page, self.bytes_max)
                if len(batch) >= BATCH_BYTES:
                    full, batch = batch, bytearray()
                    await self.context.executor.run(lambda _, full=full: part.write(full))
        await self.context.executor.run(lambda _: part.write(batch))


def make_download(
    context: ToolContext, network: Network | None = None, bytes_max: int = FILE_BYTES_MAX
) -> DownloadTool:
    return DownloadTool(context, network or Network(), bytes_max)


class _Part:
    """A growing file under a temporary name. Its methods run in threads, except `close`."""

    def __init__(self, paths: WorkspacePaths, found: FileToChange, temporary: str) -> None:
        self.size = 0
        self._paths = paths
        self._found = found
        self._temporary = temporary
        self._directory: int | None = None
        self._file: int | None = None

    def begin(self, stop: StopFlag) -> None:
        """Create the temporary file, and missing directories."""
        with self._paths.open_parent(self._found.path, make=True) as (within, _):
            directory = os.dup(within)
        try:
            file = os.open(self._temporary, CREATE_FLAGS, MODE_NEW, dir_fd=directory)
        except BaseException:  # boundary: raised again; a descriptor is not lost
            os.close(directory)
            raise
        self._directory, self._file = directory, file
        if stop.is_set():  # The caller may be gone, and nobody else would close it.
            self.close()
            raise OpenRefused(f"{self._found.shown} was not written: there was no time left.")

    def write(self, data: bytes | bytearray) -> None:
        assert self._file is not None
        write_all(self._file, data)
        self.size += len(data)

    def finish(self, stop: StopFlag) -> None:
        """Give it its name, unless that has been taken meanwhile."""
        assert self._file is not None
        assert self._directory is not None
        os.fsync(self._file)
        name = self._found.path.rpartition("/")[2]
        if stop.is_set():
            raise OpenRefused(f"{self._found.shown} was not written: there was no time left.")
        try:
            name_file(self._directory, self._temporary, name)
        except FileExistsError:
            raise _taken(self._found.shown) from None

    def close(self) -> None:
        """Close it, and remove it if it is incomplete. May be called again."""
        file, self._file = self._file, None
        directory, self._directory = self._directory, None
        if file is not None:
            os.close(file)
        if directory is not None:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=directory)
            os.close(directory)


def _find_new(paths: WorkspacePaths, path: str) -> FileToChange:
    """Return the path of a file that does not exist yet; raises `OpenRefused`."""
    try:
        target = paths.resolve(path)
    except MissingPath:
        return find_file(paths, path)
    raise _taken(paths.shown(target.path))


def _taken(name: str) -> OpenRefused:
    return OpenRefused(f"{name} already exists and is not replaced. Use another name.")


def _action(
    context: ToolContext,
    call: CallRequest,
    arguments: DownloadArguments,
    checked: CheckedTarget,
    found: FileToChange,
) -> ResolvedAction:
    directory = os.path.dirname(found.path)  # noqa: PTH120 - of a text
    # One entry for both: an approval to save files of one host in one directory covers neither
    # other downloads from that host nor other ways of writing.
    into = f" into {special_path(context, found.path) or directory}"
    whys = [checked.why] if checked.private else []
    if not context.paths.contains(found.path):
        whys.append(f"{shown(found.path)} is outside the workspace")
    return ResolvedAction(
        call.name,
        "download",
        description=f"Download {checked.shown} to {shown(found.path)}",
        path=shown(directory),
        params={
            "url": checked.site.url,
            "file_path": shown(found.path),
            "timeout": arguments.timeout,
        },
        resolved={**checked.resolved, "path": found.path},
        paths=(found.path,),
        coverage=tuple(entry + into for entry in checked.coverage("download")),
        why="; ".join(whys),
    )


def _check(page: FetchedPage, bytes_max: int) -> None:
    if not 200 <= page.status < 300:
        status = f"{page.site.url} answered {page.status} {page.reason}".rstrip()
        raise OpenRefused(f"{status}; nothing was saved.")
    if page.content_length is not None and page.content_length > bytes_max:
        raise _too_large(page, bytes_max)


def _too_large(page: FetchedPage, bytes_max: int) -> OpenRefused:
    return OpenRefused(f"{page.site.url} has more than {size_text(bytes_max)}; nothing was saved.")
