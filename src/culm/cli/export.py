"""`culm sessions export`: a conversation as a page or as data, on stdout or in a file."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Literal

import msgspec

from culm.cli.render.printed import put
from culm.cli.render.transcript import markdown_of
from culm.cli.server import visit
from culm.cli.server_target import ServerTarget
from culm.cli.session_state import SessionTreeState, find_session, get_state
from culm.cli.terminal.progress import Step, progress
from culm.cli.terminal.streams import need_output
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest
from culm.wire.codec import printable

Format = Literal["markdown", "json"]
STDOUT = Path("-")  # As other programs have it.


def export_session(
    where: ServerTarget, name: str, format_: Format, file: Path | None, *, agents: bool, force: bool
) -> None:
    """Raises `InvalidRequest` if the file cannot be written, and then leaves nothing."""
    file = None if file == STDOUT else file
    if file is None:
        need_output()
    else:
        check_target(file, force=force)  # Before anything is read.
    state = visit(where, lambda workspace: read_all(workspace, name, agents=agents))
    with _shown_beside(file, state) as step:
        pieces = _json_of(state) if format_ == "json" else _page_of(state, step)
        if file is None:
            for piece in pieces:
                put(piece)
        else:
            write_whole(file, pieces, force=force)


def _shown_beside(file: Path | None, state: SessionTreeState) -> AbstractContextManager[Step]:
    """How far it is; but not in the middle of a page on the screen."""
    if file is None and sys.stdout.isatty():
        return nullcontext(lambda n: None)
    return progress("exporting", sum(len(one.messages) for one in (state, *state.below)))


async def read_all(workspace: RemoteWorkspace, name: str, *, agents: bool) -> SessionTreeState:
    """A session, and those of its agents if wanted."""
    state = await get_state(workspace, await find_session(workspace, name))
    if agents:
        # As many may be gone by now as somebody removes meanwhile: then it is refused as a whole.
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
    """Raises `InvalidRequest` if nothing can or shall be written there."""
    shown = printable(str(file))
    try:
        found = file.stat()
    except FileNotFoundError:
        found = None
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    if found is not None and not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "no file"
        raise InvalidRequest(f"cannot write {shown}: it is {what}", hint="name a file")
    if found is not None and not force:
        raise InvalidRequest(f"{shown} is there already", hint="--force replaces it")
    folder = file.resolve().parent
    if not folder.is_dir():
        words = f"cannot write {shown}: there is no directory {printable(str(folder))}"
        raise InvalidRequest(words, hint="make it first")


def write_whole(file: Path, pieces: Iterable[str], *, force: bool) -> None:
    """Whoever looks sees the file before or the whole one after; raises `InvalidRequest`."""
    place = file.resolve()  # What a link leads to is replaced, and not the link.
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as out:
            os.fchmod(descriptor, _mode_of(place))
            out.writelines(pieces)
            out.flush()
            os.fsync(descriptor)
        check_target(file, force=force)  # Somebody may have made one meanwhile.
        draft.replace(place)
    except OSError as exc:
        raise cannot_write(file, exc) from exc
    finally:
        with suppress(OSError):  # It is there only if it did not become the file.
            draft.unlink(missing_ok=True)


def _mode_of(place: Path) -> int:
    """As the file has that is replaced, else as any new one would."""
    try:
        return stat.S_IMODE(place.stat().st_mode)
    except OSError:
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask


def cannot_write(file: Path, exc: OSError) -> InvalidRequest:
    reason = exc.strerror or str(exc)
    return InvalidRequest(
        f"cannot write {printable(str(file))}: {reason}", hint="choose another file with -o"
    )
