"""Options and arguments that several commands share, and the server that they select."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click
from msgspec import Struct

from culm.client.launch import ServerRequest, ServerStarter
from culm.settings import default_host

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

P = ParamSpec("P")
R = TypeVar("R")

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    help="Workspace directory. Default: the current directory.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
FILE = click.Path(path_type=Path, dir_okay=False)
DIRECTORY = click.Path(path_type=Path, file_okay=False)


def tls_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options of a listener on TCP with TLS."""
    cert = click.option("--tls-cert", type=FILE, help="TLS certificate (PEM).")
    return cert(click.option("--tls-key", type=FILE, help="TLS private key (PEM).")(command))


def _with_data_dir(command: Callable[P, R], text: str) -> Callable[P, R]:
    option = click.option("--data-dir", type=DIRECTORY, help=text)
    return option(command)


def project_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select a project by its directory, read without a server."""
    text = "Data directory, as for `culm serve`."
    return directory_option(_with_data_dir(command, text))


def discovery_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option that selects the directory in which agents announce themselves."""
    text = "Data directory, as for `culm serve`; its folder `fabric` is the discovery directory."
    return _with_data_dir(command, text)


def config_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select the configuration of a directory."""
    return directory_option(user_config_options(command))


def user_config_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select the user's own configuration."""
    config_file = click.option(
        "--config",
        "config_file",
        type=FILE,
        help="Your configuration file, as for `culm serve`.",
    )
    return config_file(_with_data_dir(command, "Data directory, as for `culm serve`."))


# --- sessions


def complete_session(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Complete the id of a session that a running server knows; no server, no completions."""
    # Only a shell's Tab needs these, and no other command should wait for them.
    from click.shell_completion import CompletionItem

    from culm.cli.commands.completion import ids_for

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


# --- the workspace and server of a command


Command = Callable[..., None]

_token_file_option = click.option(
    "--token-file",
    type=FILE,
    help="File with the bearer token for TCP. Default: token in the data directory.",
)


class ServerTarget(Struct, frozen=True):
    """A workspace of a server."""

    directory: Path  # Absolute, with links resolved.
    server: ServerRequest
    token_file: Path | None = None

    def starter(self) -> ServerStarter:
        return ServerStarter(self.server, os.environ)


def make_target(
    directory: Path,
    host: str | None,
    token_file: Path | None,
    data_dir: Path | None = None,
    config_file: Path | None = None,
) -> ServerTarget:
    server = ServerRequest(host or default_host(os.environ), data_dir, config_file)
    return ServerTarget(directory.resolve(), server, token_file)


def host_option(text: str) -> Callable[[Command], Command]:
    """Add the option that selects a server by its address."""
    return click.option("--host", envvar="CULM_HOST", metavar="URL", help=text)


def at_server(command: Command) -> Command:
    """Add the options that select a workspace of a running server; passes it as `where`."""
    host = host_option("Server address, as for `culm run`; no server is started.")

    @functools.wraps(command)
    def run(
        *args: object, directory: Path, host: str | None, token_file: Path | None, **options: object
    ) -> None:
        command(*args, where=make_target(directory, host, token_file), **options)

    return directory_option(host(_token_file_option(run)))


def at_own_server(command: Command) -> Command:
    """Like `at_server`, for commands that start a server if none is running."""
    host = host_option(
        "Server address: unix:///path, tcp://host:port or https://host:port. Default: $CULM_HOST, "
        "or the per-user socket."
    )
    data_dir = click.option(
        "--data-dir",
        type=DIRECTORY,
        help="Data directory, as for `culm serve`; used to start a server and to find the token.",
    )
    config = click.option(
        "--config",
        "config_file",
        type=FILE,
        help="Configuration file, as for `culm serve`; used to start a server.",
    )

    @functools.wraps(command)
    def run(
        *args: object,
        directory: Path,
        host: str | None,
        token_file: Path | None,
        data_dir: Path | None,
        config_file: Path | None,
        **options: object,
    ) -> None:
        where = make_target(directory, host, token_file, data_dir, config_file)
        command(*args, where=where, **options)

    return directory_option(host(_token_file_option(data_dir(config(run)))))
