"""Options that several commands have in common. Only `click` is imported to print a help."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from culm.cli.server_target import ServerTarget

Command = Callable[..., None]

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    help="The workspace. Default: the current directory.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON.")
_token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Bearer token for TCP. Default: token in the data directory.",
)


def _host_option(words: str) -> Callable[[Command], Command]:
    return click.option("--host", envvar="CULM_HOST", metavar="URL", help=words)


def at_server(command: Command) -> Command:
    """Options that say which workspace of a running server is meant; given as `where`."""
    host = _host_option("The server, as for `culm run`. None is started.")

    @functools.wraps(command)
    def run(
        *args: object, directory: Path, host: str | None, token_file: Path | None, **options: object
    ) -> None:
        command(*args, where=where_of(directory, host, token_file), **options)

    return directory_option(host(_token_file_option(run)))


def at_own_server(command: Command) -> Command:
    """As `at_server`, for commands that start a server if there is none."""
    host = _host_option(
        "The server: unix:///path, tcp://host:port or https://host:port. Default: $CULM_HOST, "
        "or your own socket."
    )
    data_dir = click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="As for `culm serve`; used if a server is started, and to find the token.",
    )
    config = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="As for `culm serve`; used if a server is started.",
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
        where = where_of(directory, host, token_file, data_dir, config_file)
        command(*args, where=where, **options)

    return directory_option(host(_token_file_option(data_dir(config(run)))))


def where_of(
    directory: Path,
    host: str | None,
    token_file: Path | None,
    data_dir: Path | None = None,
    config_file: Path | None = None,
) -> "ServerTarget":
    import os

    from culm.cli.server_target import ServerTarget
    from culm.client.launch import ServerRequest
    from culm.settings import default_host

    server = ServerRequest(host or default_host(os.environ), data_dir, config_file)
    return ServerTarget(directory.resolve(), server, token_file)
