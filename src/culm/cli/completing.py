"""Arguments that a shell completes. Only `click` is imported until somebody presses Tab."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_session(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """The ids of sessions that begin so, as a running server knows them; else nothing."""
    from click.shell_completion import CompletionItem

    from culm.cli.completion import ids_for

    host, directory = ctx.params.get("host"), ctx.params.get("directory")
    token_file = ctx.params.get("token_file")
    found = ids_for(
        directory if isinstance(directory, Path) else Path(),
        host if isinstance(host, str) else None,
        token_file if isinstance(token_file, Path) else None,
        incomplete,
    )
    return [CompletionItem(short, help=title) for short, title in found]


session_argument = click.argument("session", metavar="SESSION", shell_complete=complete_session)
sessions_argument = click.argument(
    "sessions", metavar="SESSION...", nargs=-1, required=True, shell_complete=complete_session
)
