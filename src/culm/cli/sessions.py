"""`culm sessions`: what was talked about in a directory, looked at and put in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from culm.cli.exits import EXIT_FAILED
from culm.cli.names import find_named, short_ids
from culm.cli.render.ages import ago_text
from culm.cli.render.call_lines import call_line, head_of, without_controls
from culm.cli.render.printed import put, put_json
from culm.cli.render.tables import table
from culm.cli.render.text import counted
from culm.cli.render.transcript import GOOD_ENDS
from culm.cli.server import visit
from culm.cli.server_target import ServerTarget
from culm.cli.session_state import SessionState, find_session, get_state, known_sessions
from culm.cli.terminal.streams import is_terminal, need_output, output_width
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.errors import InvalidRequest
from culm.ids import SessionId
from culm.wire.messages import (
    BinaryPart,
    FinishPart,
    Message,
    Part,
    ShellCommandPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from culm.wire.sessions import Session

HEAD = ("session", "", "changed", "messages", "cost", "title")
BUSY = "*"


# --- listing


def list_sessions(where: ServerTarget, *, as_json: bool) -> None:
    need_output()
    found = visit(where, RemoteWorkspace.sessions)
    if as_json:
        put_json(found)
    elif found:
        rows = rows_of(found, LoopClock().now_s())
        # Of what does not fit, the cost is missed least.
        lines = table(rows, output_width() or None, right=(3, 4), spare=(4, 3))
        put("\n".join(lines) + "\n")
    else:
        click.echo("there is no session here; `culm run` begins one", err=True)


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


def show_session(where: ServerTarget, name: str, *, as_json: bool) -> None:
    need_output()

    async def read(workspace: RemoteWorkspace) -> SessionState:
        return await get_state(workspace, await find_session(workspace, name))

    state = visit(where, read)
    if as_json:
        put_json(state)
    else:
        for line in lines_of(state, LoopClock().now_s()):
            put(f"{line}\n")


def lines_of(state: SessionState, now_s: float) -> Iterator[str]:
    """A conversation as a person reads it: who said what, and a line for each call."""
    session = state.session
    used = f"{counted(session.message_count, 'message', 'messages')}, ${session.cost:.4f}"
    yield head_of(session.title) or "-"
    yield f"{session.id}, {ago_text(session.updated_at, now_s)}, {used}"
    for message in state.messages:
        lines = [line for part in message.parts for line in _part_lines(part)]
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


def _part_lines(part: Part) -> Iterator[str]:
    match part:
        case TextPart(data=data) if data.text.strip():
            yield from without_controls(data.text).strip("\n").split("\n")
        case BinaryPart(data=data):
            yield f"(attached: {head_of(data.path) or head_of(data.mime_type)})"
        case ToolCallPart(data=data):
            yield call_line(data)
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
    """What there is beside the conversation."""
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
    """Raises `InvalidRequest` for a title that says nothing."""
    title = " ".join(" ".join(words).split())
    if not title:
        raise InvalidRequest("a title has at least one word")

    async def rename(workspace: RemoteWorkspace) -> Session:
        return await workspace.rename_session(await find_session(workspace, name), title)

    renamed = visit(where, rename)
    put(f"renamed {short_ids([renamed.id])[renamed.id]}: {head_of(renamed.title)}\n")


@dataclass(frozen=True, slots=True)
class SessionToDelete:
    """A session somebody wants to be rid of."""

    id: SessionId
    text: str  # Its short id, its title, and how much goes with it.


def delete_sessions(where: ServerTarget, names: Sequence[str], *, yes: bool) -> int:
    """Remove them with all that is below them; returns the exit status.

    All are found before one is removed, and a person is asked first. The server refuses one that
    is at work, or has agents that are: it stays, and the others go. Raises `InvalidRequest` where
    nobody can be asked.
    """
    deleted = visit(where, lambda workspace: _find_to_delete(workspace, names))
    if not yes and not _is_confirmed(deleted):
        click.echo("nothing was removed", err=True)
        return EXIT_FAILED
    return visit(where, lambda workspace: _delete(workspace, deleted))


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
        words = f"{short[session_id]}  {head_of(session.title) or '-'} ({', '.join(much)})"
        found.append(SessionToDelete(session_id, words))
    return found


def _is_confirmed(deleted: Sequence[SessionToDelete]) -> bool:
    if not is_terminal():
        raise InvalidRequest("there is nobody to ask", hint="say --yes if you mean it")
    for one in deleted:
        click.echo(one.text, err=True)
    what = "this session" if len(deleted) == 1 else f"these {len(deleted)} sessions"
    return click.confirm(f"Remove {what} for good?", err=True)


async def _delete(workspace: RemoteWorkspace, deleted: Sequence[SessionToDelete]) -> int:
    status = 0
    for one in deleted:
        try:
            await workspace.delete_session(one.id)
        except RequestRefused as exc:
            if exc.status == 404:  # Somebody was faster; or it was below one that is gone.
                put(f"gone already: {one.text}\n")
                continue
            if exc.code != "session_busy":
                raise
            click.echo(f"culm: not removed, as it is at work: {one.text}", err=True)
            click.echo(f"hint: {exc.hint}", err=True)
            status = EXIT_FAILED
        else:
            put(f"removed {one.text}\n")
    return status
