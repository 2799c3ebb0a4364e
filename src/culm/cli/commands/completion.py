"""`culm completion`: the script for a shell, and the session ids that it may offer."""

import asyncio
import os
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class
from msgspec import MsgspecError

from culm.cli.names import short_ids
from culm.cli.options import ServerTarget, make_target
from culm.cli.render.text import head_of
from culm.cli.terminal.process import require_output, write
from culm.client.http import RequestRefused, open_client
from culm.client.launch import find_token
from culm.errors import AppError
from culm.wire.messages import Session

PROGRAM = "culm"
COMPLETE_S = 0.5  # A person waits for it after pressing Tab.


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    It completes commands, options and session ids. The ids come from the running server, if it has
    this directory open.

    \b
    Example:
      echo 'eval "$(culm completion bash)"' >> ~/.bashrc
      echo 'eval "$(culm completion zsh)"' >> ~/.zshrc
      culm completion fish > ~/.config/fish/completions/culm.fish
    """
    require_output()
    write(sys.stdout, script_for(shell, ctx.find_root().command) + "\n")


def script_for(shell: str, command: click.Command) -> str:
    """The script to evaluate in that shell; it is click's own."""
    kind = get_completion_class(shell)
    assert kind is not None, "the option allows only known shells"
    completer = kind(command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE")
    # Not `source()`: for bash it starts a shell to find its version.
    return completer.source_template % completer.source_vars()


def ids_for(
    directory: Path, host: str | None, token_file: Path | None, incomplete: str
) -> list[tuple[str, str]]:
    """Session ids with their titles; empty if there is no server, or it is slow."""
    try:
        where = make_target(directory, host or os.environ.get("CULM_HOST"), token_file)
        sessions = asyncio.run(_sessions_at(where))
    except (AppError, RequestRefused, OSError, ExceptionGroup, MsgspecError):
        return []  # A message would appear in the line that is being typed.
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
