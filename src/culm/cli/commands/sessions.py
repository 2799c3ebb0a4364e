"""`culm sessions`: list, show, rename, delete and export the sessions of a directory."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Literal

import click
import msgspec
from msgspec import Struct

from culm.cli.groups import CommandGroup
from culm.cli.names import NamedItem, all_named, find_named, short_ids
from culm.cli.options import (
    ServerTarget,
    at_own_server,
    json_option,
    session_argument,
    sessions_argument,
)
from culm.cli.render.call_lines import KnownTools, call_line
from culm.cli.render.text import ago_text, counted, fitted_table, head_of, without_controls
from culm.cli.render.transcript import GOOD_ENDS, markdown_of
from culm.cli.server import visit
from culm.cli.terminal.process import (
    EXIT_FAILED,
    is_terminal,
    output_width,
    print_json,
    print_output,
    require_output,
)
from culm.cli.terminal.progress import Step, progress
from culm.client.http import RequestRefused
from culm.client.workspace import AnyAsk, RemoteWorkspace
from culm.clock import LoopClock
from culm.errors import InvalidRequest
from culm.ids import SessionId
from culm.wire.agents import Agent
from culm.wire.codec import printable
from culm.wire.messages import (
    BinaryPart,
    FinishPart,
    Message,
    Part,
    Session,
    ShellCommandPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from culm.wire.runs import QueuedPrompt, Run

HELP_OPTIONS = ("-h", "--help")
HEAD = ("session", "", "changed", "messages", "cost", "title")
BUSY = "*"
Format = Literal["markdown", "json"]
STDOUT = Path("-")  # The usual convention.


class DefaultListGroup(CommandGroup):
    """Without the name of a subcommand this group runs `list`, with its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in HELP_OPTIONS):
            args = ["list", *args]
        return super().parse_args(ctx, args)


class SessionState(Struct):
    """The parts as on the wire, read one after another: consistent while the session is idle."""

    session: Session
    messages: list[Message]  # The oldest first.
    runs: list[Run]  # The latest first, as many as the server lists.
    agents: list[Agent]  # All below it, in the order they were started.
    queue: list[QueuedPrompt]
    asks: list[AnyAsk]  # Its own open ones: permissions, then questions.


class SessionTreeState(SessionState, omit_defaults=True):
    """A session with the sessions of its agents, if requested."""

    below: list[SessionState] = []


@click.group(cls=DefaultListGroup)
def sessions() -> None:
    """List, show, rename, delete and export sessions.

    SESSION is an id, the beginning of one, or a title. Without a command, the sessions of this
    directory are listed.

    \b
    Example:
      culm sessions
      culm sessions show 68263f22
      culm sessions export 68263f22 -o talk.md
    """


@sessions.command("list")
@json_option
@at_own_server
def list_(as_json: bool, where: ServerTarget) -> None:
    """List the sessions of this directory, the last changed first.

    Sessions of agents are not listed. "*" marks a busy session. The cost of a session includes its
    agents. Titles are shortened on a narrow terminal.

    \b
    Example:
      culm sessions list
      culm sessions list --json
    """
    require_output()
    found = visit(where, RemoteWorkspace.sessions)
    if as_json:
        print_json(found)
    elif found:
        rows = rows_of(found, LoopClock().now_s())
        # On a narrow terminal the cost is dropped first.
        lines = fitted_table(rows, output_width() or None, right=(3, 4), spare=(4, 3))
        print_output("\n".join(lines) + "\n")
    else:
        click.echo("no sessions here; `culm run` starts one", err=True)


@sessions.command()
@session_argument
@json_option
@at_own_server
def show(session: str, as_json: bool, where: ServerTarget) -> None:
    """Show a conversation, with one line per tool call and result.

    With --json, print one object with session, messages, runs, agents, queue and open asks, each as
    the server has it.

    \b
    Example:
      culm sessions show 68263f22
      culm sessions show 68263f22 --json
    """
    require_output()

    async def read(workspace: RemoteWorkspace) -> tuple[SessionState, KnownTools]:
        state = await get_state(workspace, await find_session(workspace, session))
        return state, {tool.name: tool for tool in await workspace.tools()}

    state, tools = visit(where, read)
    if as_json:
        print_json(state)
    else:
        for line in lines_of(state, LoopClock().now_s(), tools):
            print_output(f"{line}\n")


@sessions.command()
@session_argument
@click.argument("title", nargs=-1, required=True, metavar="TITLE...")
@at_own_server
def rename(session: str, title: tuple[str, ...], where: ServerTarget) -> None:
    """Change the title of a session.

    \b
    Example:
      culm sessions rename 68263f22 the flaky test
    """
    rename_session(where, session, title)


@sessions.command()
@sessions_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@at_own_server
@click.pass_context
def delete(ctx: click.Context, sessions: tuple[str, ...], yes: bool, where: ServerTarget) -> None:
    """Delete sessions with their messages, runs and agents.

    You are asked for confirmation; without a terminal, use --yes. A session that is busy or has a
    busy agent is not deleted: cancel its run first. The other sessions are deleted, and the exit
    status is 1.

    \b
    Example:
      culm sessions delete 68263f22
      culm sessions delete --yes 68263f22 5b1f03aa
    """
    ctx.exit(delete_sessions(where, sessions, yes=yes))


@sessions.command()
@session_argument
@click.option(
    "--format",
    "format_",
    type=click.Choice(["markdown", "json"]),
    default="markdown",
    show_default=True,
    help="A page for people, or the output of `culm sessions show --json`.",
)
@click.option(
    "--output",
    "-o",
    "file",
    type=click.Path(path_type=Path),
    help="Output file, written completely or not at all. Default: stdout.",
)
@click.option("--agents", is_flag=True, help="Include the sessions of its agents.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@at_own_server
def export(
    session: str,
    format_: Literal["markdown", "json"],
    file: Path | None,
    agents: bool,
    force: bool,
    where: ServerTarget,
) -> None:
    """Export a conversation as Markdown or JSON.

    The Markdown page has every tool call with its result.

    \b
    Example:
      culm sessions export 68263f22 > talk.md
      culm sessions export 68263f22 --agents -o talk.md
      culm sessions export 68263f22 --format json -o talk.json
    """
    file = None if file == STDOUT else file
    if file is None:
        require_output()
    else:
        check_target(file, force=force)  # Before reading anything.
    state = visit(where, lambda workspace: read_all(workspace, session, agents=agents))
    with _shown_beside(file, state) as step:
        pieces = _json_of(state) if format_ == "json" else _page_of(state, step)
        if file is None:
            for piece in pieces:
                print_output(piece)
        else:
            write_whole(file, pieces, force=force)


# --- listing


def rows_of(sessions: Sequence[Session], now_s: float) -> list[Sequence[str]]:
    short = short_ids([one.id for one in sessions])
    return [
        HEAD,
        *(
            (
                short[one.id],
                BUSY if one.is_busy else "",
                ago_text(one.updated_at, now_s),
                f"{one.message_count:,}",
                f"${one.cost:.4f}",
                one.title or "-",
            )
            for one in sessions
        ),
    ]


# --- showing


def lines_of(state: SessionState, now_s: float, tools: KnownTools) -> Iterator[str]:
    """The conversation for a person: the messages, and a line for each call."""
    session = state.session
    used = f"{counted(session.message_count, 'message', 'messages')}, ${session.cost:.4f}"
    yield head_of(session.title) or "-"
    yield f"{session.id}, {ago_text(session.updated_at, now_s)}, {used}"
    for message in state.messages:
        lines = [line for part in message.parts for line in _part_lines(part, tools)]
        if lines and message.role != "tool":
            yield ""
            yield f"{_author(message)}:"
        yield from lines
    yield from _open_lines(state)


def _author(message: Message) -> str:
    if message.is_summary_message:
        return "summary"
    if message.role != "assistant":
        return "you" if message.role == "user" else message.role
    return head_of("/".join(filter(None, (message.provider, message.model)))) or message.role


def _part_lines(part: Part, tools: KnownTools) -> Iterator[str]:
    match part:
        case TextPart(data=data) if data.text.strip():
            yield from without_controls(data.text).strip("\n").split("\n")
        case BinaryPart(data=data):
            yield f"(attached: {head_of(data.path) or head_of(data.mime_type)})"
        case ToolCallPart(data=data):
            yield call_line(data, tools)
        case ToolResultPart(data=data):
            yield f"{'✗' if data.is_error else '←'} {head_of(data.name)}: {head_of(data.content)}"
        case ShellCommandPart(data=data):
            yield f"$ {head_of(data.command)}"
            yield f"← {data.exit_code}: {head_of(data.output)}"
        case FinishPart(data=data) if (data.culm_reason or data.reason) not in GOOD_ENDS:
            reason = data.culm_reason or data.reason
            yield f"({head_of(': '.join(filter(None, (reason, data.message, data.details))))})"
        case _:
            pass


def _open_lines(state: SessionState) -> Iterator[str]:
    """The agents, queued prompts and open asks of the session, as one line."""
    open_ = [
        f"{counted(len(state.agents), 'agent', 'agents')} worked for it" if state.agents else "",
        f"{counted(len(state.queue), 'prompt waits', 'prompts wait')}" if state.queue else "",
        f"{counted(len(state.asks), 'ask is', 'asks are')} open" if state.asks else "",
        "busy" if state.session.is_busy else "",
    ]
    if any(open_):
        yield ""
        yield f"({'; '.join(filter(None, open_))})"


# --- changing


def rename_session(where: ServerTarget, name: str, words: Sequence[str]) -> None:
    """Raises `InvalidRequest` for an empty title."""
    title = " ".join(" ".join(words).split())
    if not title:
        raise InvalidRequest("the title is empty")

    async def rename(workspace: RemoteWorkspace) -> Session:
        return await workspace.rename_session(await find_session(workspace, name), title)

    renamed = visit(where, rename)
    print_output(f"renamed {short_ids([renamed.id])[renamed.id]}: {head_of(renamed.title)}\n")


class SessionToDelete(Struct, frozen=True):
    """A session that is to be deleted."""

    id: SessionId
    text: str  # Its short id, its title, and the size of its content.


def delete_sessions(where: ServerTarget, names: Sequence[str], *, yes: bool) -> int:
    """Delete the sessions with everything below them; returns the exit status.

    All are found before the first is deleted, and a person is asked first. The server refuses a
    session that is busy or has busy agents; the others are deleted. Raises `InvalidRequest` where
    nobody can be asked.
    """
    found = visit(where, lambda workspace: _find_to_delete(workspace, names))
    if not yes and not _is_confirmed(found):
        click.echo("nothing was deleted", err=True)
        return EXIT_FAILED
    return visit(where, lambda workspace: _delete(workspace, found))


async def _find_to_delete(
    workspace: RemoteWorkspace, names: Sequence[str]
) -> list[SessionToDelete]:
    known = await known_sessions(workspace)
    short = short_ids([one.id for one in known])
    found: list[SessionToDelete] = []
    for session_id in dict.fromkeys(SessionId(find_named(known, name).id) for name in names):
        session = await workspace.session(session_id)
        below = len(await workspace.agents(session_id))
        much = [counted(session.message_count, "message", "messages")]
        much += [counted(below, "agent", "agents")] if below else []
        text = f"{short[session_id]}  {head_of(session.title) or '-'} ({', '.join(much)})"
        found.append(SessionToDelete(session_id, text))
    return found


def _is_confirmed(found: Sequence[SessionToDelete]) -> bool:
    if not is_terminal():
        raise InvalidRequest("cannot ask for confirmation without a terminal", hint="use --yes")
    for one in found:
        click.echo(one.text, err=True)
    what = "this session" if len(found) == 1 else f"these {len(found)} sessions"
    return click.confirm(f"Delete {what} permanently?", err=True)


async def _delete(workspace: RemoteWorkspace, found: Sequence[SessionToDelete]) -> int:
    status = 0
    for one in found:
        try:
            await workspace.delete_session(one.id)
        except RequestRefused as exc:
            if exc.status == 404:  # Another client deleted it, or it was below a deleted one.
                print_output(f"already deleted: {one.text}\n")
                continue
            if exc.code != "session_busy":
                raise
            click.echo(f"culm: not deleted, because it is busy: {one.text}", err=True)
            click.echo(f"hint: {exc.hint}", err=True)
            status = EXIT_FAILED
        else:
            print_output(f"deleted {one.text}\n")
    return status


# --- state


async def get_state(workspace: RemoteWorkspace, session_id: SessionId) -> SessionTreeState:
    """Read a session; raises `RequestRefused` if it does not exist."""
    return SessionTreeState(
        session=await workspace.session(session_id),
        messages=await workspace.messages(session_id),
        runs=await workspace.runs(session_id),
        agents=await workspace.agents(session_id),
        queue=await workspace.queue(session_id),
        asks=await workspace.open_asks(session_id),
    )


async def known_sessions(workspace: RemoteWorkspace) -> list[NamedItem]:
    """All sessions that can be named, including those of agents."""
    agents = [
        NamedItem("session", one.session_id, one.name) for one in reversed(await workspace.agents())
    ]
    own = {one.id for one in agents}  # An agent that a client started may be in both lists.
    return [one for one in await all_named(workspace, "session") if one.id not in own] + agents


async def find_session(workspace: RemoteWorkspace, text: str) -> SessionId:
    """The session with this name; raises `NotFound`, `InvalidRequest`."""
    return SessionId(find_named(await known_sessions(workspace), text).id)


# --- export


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
