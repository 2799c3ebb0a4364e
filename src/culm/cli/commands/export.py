"""`culm sessions export`: a conversation as Markdown or JSON, on stdout or in a file."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Literal

import msgspec

from culm.cli.render.transcript import markdown_of
from culm.cli.server import visit
from culm.cli.server_target import ServerTarget
from culm.cli.session_state import SessionTreeState, find_session, get_state
from culm.cli.terminal.progress import Step, progress
from culm.cli.terminal.streams import print_output, require_output
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest
from culm.wire.codec import printable

Format = Literal["markdown", "json"]
STDOUT = Path("-")  # The usual convention.


def export_session(
    where: ServerTarget, name: str, format_: Format, file: Path | None, *, agents: bool, force: bool
) -> None:
    """Raises `InvalidRequest` if the file cannot be written, and leaves nothing behind then."""
    file = None if file == STDOUT else file
    if file is None:
        require_output()
    else:
        check_target(file, force=force)  # Before reading anything.
    state = visit(where, lambda workspace: read_all(workspace, name, agents=agents))
    with _shown_beside(file, state) as step:
        pieces = _json_of(state) if format_ == "json" else _page_of(state, step)
        if file is None:
            for piece in pieces:
                print_output(piece)
        else:
            write_whole(file, pieces, force=force)


def _shown_beside(file: Path | None, state: SessionTreeState) -> AbstractContextManager[Step]:
    """Progress on stderr, unless it would interrupt a page on the screen."""
    if file is None and sys.stdout.isatty():
        return nullcontext(lambda n: None)
    return progress("exporting", sum(len(one.messages) for one in (state, *state.below)))


async def read_all(workspace: RemoteWorkspace, name: str, *, agents: bool) -> SessionTreeState:
    """Read a session and, if requested, those of its agents."""
    state = await get_state(workspace, await find_session(workspace, name))
    if agents:
        # An agent that is removed in the meantime makes the whole export fail.
        with progress("reading", len(state.agents)) as step:
            for agent in state.agents:
                state.below.append(await get_state(workspace, agent.session_id))
                step(1)
    return state


def _json_of(state: SessionTreeState) -> Iterator[str]:
    yield msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n"


def _page_of(state: SessionTreeState, step: Step) -> Iterator[str]:
    yield from markdown_of(state.session, state.messages, step=step)
    for one in state.below:
        yield "\n"
        yield from markdown_of(one.session, one.messages, 2, step)


# --- a file, whole or not at all


def check_target(file: Path, *, force: bool) -> None:
    """Raises `InvalidRequest` if the file cannot or must not be written."""
    shown = printable(str(file))
    try:
        found = file.stat()
    except FileNotFoundError:
        found = None
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    if found is not None and not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise InvalidRequest(f"cannot write {shown}: it is {what}", hint="choose a file with -o")
    if found is not None and not force:
        raise InvalidRequest(f"{shown} already exists", hint="use --force to overwrite it")
    folder = file.resolve().parent
    if not folder.is_dir():
        message = f"cannot write {shown}: there is no directory {printable(str(folder))}"
        raise InvalidRequest(message, hint="create it first")


def write_whole(file: Path, pieces: Iterable[str], *, force: bool) -> None:
    """Replace the file atomically; raises `InvalidRequest`."""
    target = file.resolve()  # Replaces the target of a link, not the link.
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as out:
            os.fchmod(descriptor, _mode_of(target))
            out.writelines(pieces)
            out.flush()
            os.fsync(descriptor)
        check_target(file, force=force)  # It may have been created in the meantime.
        draft.replace(target)
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    finally:
        with suppress(OSError):  # It exists only if the replacement failed.
            draft.unlink(missing_ok=True)


def _mode_of(target: Path) -> int:
    """The mode of the file that is replaced, or that of a new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except OSError:
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask


def cannot_write(file: Path, exc: OSError) -> InvalidRequest:
    reason = exc.strerror or str(exc)
    return InvalidRequest(
        f"cannot write {printable(str(file))}: {reason}", hint="choose another file with -o"
    )
