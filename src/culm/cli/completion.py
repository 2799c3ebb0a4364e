"""`culm completion`: what a shell is told, and which ids it may offer."""

import asyncio
import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from msgspec import MsgspecError

from culm.cli.names import short_ids
from culm.cli.options import where_of
from culm.cli.render.call_lines import head_of
from culm.cli.server_target import ServerTarget
from culm.client.http import RequestRefused, open_client
from culm.client.launch import find_token
from culm.errors import AppError
from culm.wire.sessions import Session

PROGRAM = "culm"
COMPLETE_S = 0.5  # Whoever has pressed Tab waits for it.


def script_for(shell: str, command: click.Command) -> str:
    """What is to be evaluated by that shell; it is click's own."""
    kind = get_completion_class(shell)
    assert kind is not None, "one of the shells that may be named"
    completer = kind(command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE")
    # Not `source()`: for bash that starts one, to find out its version.
    return completer.source_template % completer.source_vars()


def ids_for(
    directory: Path, host: str | None, token_file: Path | None, incomplete: str
) -> list[tuple[str, str]]:
    """Ids of sessions with their titles; none if there is no server, or it is slow."""
    try:
        where = where_of(directory, host or os.environ.get("CULM_HOST"), token_file)
        sessions = asyncio.run(_sessions_at(where))
    except (AppError, RequestRefused, OSError, ExceptionGroup, MsgspecError):
        return []  # Nobody reads what is said here: it would stand in the line being typed.
    short = short_ids([one.id for one in sessions])
    return [
        (one.id if len(incomplete) > len(short[one.id]) else short[one.id], head_of(one.title))
        for one in sessions
        if one.id.startswith(incomplete)
    ]


async def _sessions_at(where: ServerTarget) -> list[Session]:
    async with asyncio.timeout(COMPLETE_S):
        token = find_token(where.server, where.token_file, os.environ)
        async with open_client(where.server.url, token=token) as client:
            workspace = await client.find_workspace(where.directory)
            return [] if workspace is None else await workspace.sessions()
