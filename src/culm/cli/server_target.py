"""The workspace and server that a command is about, and the options that select them."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from culm.cli.options import directory_option
from culm.client.launch import ServerRequest, ServerStarter
from culm.settings import default_host

Command = Callable[..., None]

_token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the bearer token for TCP. Default: token in the data directory.",
)


@dataclass(frozen=True, slots=True)
class ServerTarget:
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


def _host_option(text: str) -> Callable[[Command], Command]:
    return click.option("--host", envvar="CULM_HOST", metavar="URL", help=text)


def at_server(command: Command) -> Command:
    """Add the options that select a workspace of a running server; passes it as `where`."""
    host = _host_option("Server address, as for `culm run`; no server is started.")

    @functools.wraps(command)
    def run(
        *args: object, directory: Path, host: str | None, token_file: Path | None, **options: object
    ) -> None:
        command(*args, where=make_target(directory, host, token_file), **options)

    return directory_option(host(_token_file_option(run)))


def at_own_server(command: Command) -> Command:
    """Like `at_server`, for commands that start a server if none is running."""
    host = _host_option(
        "Server address: unix:///path, tcp://host:port or https://host:port. Default: $CULM_HOST, "
        "or the per-user socket."
    )
    data_dir = click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Data directory, as for `culm serve`; used to start a server and to find the token.",
    )
    config = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
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
