"""`culm serve`: run a server in this process: the event loop, the signals, the output."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from culm import __version__
from culm.cli.options import DIRECTORY, FILE, Command, tls_options
from culm.cli.terminal.process import ECHO_S
from culm.clock import LoopClock
from culm.config.sources import read_user_file
from culm.file_limit import raise_file_limit
from culm.heap import limit_heap
from culm.ids import Ids
from culm.logs import set_up_logs
from culm.settings import (
    DETACHED,
    ServeOptions,
    default_data_dir,
    default_host,
    default_state_dir,
    settings_with,
)

log = logging.getLogger(__name__)


def _seconds_option(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(name, type=click.FloatRange(min=0), metavar="S", help=text)


@click.command()
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="URL",
    help="Address to listen on: unix:///path or tcp://host:port (0: any port). May be repeated. "
    "Default: the per-user socket.",
)
@click.option(
    "--data-dir",
    type=DIRECTORY,
    help="Data directory. Default: $XDG_DATA_HOME/culm, or ~/.local/share/culm.",
)
@click.option(
    "--token-file",
    type=FILE,
    help="File with the bearer token for TCP, created if missing. Default: token in the data "
    "directory.",
)
@click.option("--no-auth", is_flag=True, help="Do not require a token on TCP. Loopback only.")
@click.option(
    "--allow-host",
    "allow_hosts",
    multiple=True,
    metavar="NAME",
    help="Additional name to accept in Host headers, for a proxy in front. May be repeated.",
)
@tls_options
@click.option(
    "--insecure-plaintext-network",
    is_flag=True,
    help="Listen beyond loopback without TLS. Anybody on the network can read the traffic.",
)
@_seconds_option(
    "--linger", "Seconds to keep running after the last workspace closed. Default: 60."
)
@_seconds_option("--create-grace", "Seconds for a client to open its event stream. Default: 30.")
@_seconds_option("--detach-grace", "Seconds for a disconnected client to reconnect. Default: 10.")
@click.option(
    "--config",
    "config_file",
    type=FILE,
    help="JSON file with models (docs/models.md) and settings (docs/settings.md); options "
    "override it. Default: $XDG_CONFIG_HOME/culm/culm.json, or ~/.config/culm/culm.json.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum level of log entries.",
)
@click.option("--log-json", is_flag=True, help="Write one JSON object per log entry.")
def serve(
    hosts: tuple[str, ...],
    data_dir: Path | None,
    token_file: Path | None,
    no_auth: bool,
    allow_hosts: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure_plaintext_network: bool,
    linger: float | None,
    create_grace: float | None,
    detach_grace: float | None,
    config_file: Path | None,
    log_level: str,
    log_json: bool,
) -> None:
    """Run the server until it is idle, or until SIGTERM or SIGINT.

    Prints one line `listening URL` per listener when it is ready. Logs go to stderr and to
    $XDG_STATE_HOME/culm/culm.log. Clients on TCP send the token as `Authorization: Bearer`.

    \b
    Exit status:
      0        idle, or ended cleanly after a signal
      1        could not start, for example because the address is in use
      2        usage error
      128 + n  ended at once by a second signal n, at least 0.2 s after the first

    \b
    Example:
      culm serve --host tcp://127.0.0.1:7777 --linger 600
    """
    overrides = {"linger_s": linger, "create_grace_s": create_grace, "detach_grace_s": detach_grace}
    settings, found = read_user_file(config_file, os.environ)
    state_dir = default_state_dir(os.environ)
    options = ServeOptions(
        data_dir=(data_dir or default_data_dir(os.environ)).absolute(),
        hosts=hosts or (default_host(os.environ),),
        token_file=token_file,
        auth=not no_auth,
        allow_hosts=allow_hosts,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plaintext_network=insecure_plaintext_network,
        settings=settings_with(settings, overrides),
        config_file=found,
    )
    try:
        set_up_logs(state_dir, level=log_level, as_json=log_json)
    except OSError as exc:
        raise click.ClickException(f"cannot write logs to {state_dir}: {exc}") from exc
    run_server(options)


def run_server(options: ServeOptions) -> None:
    """Serve until nobody needs the server or a signal arrives.

    Raises `ListenFailed` or `TooFewFiles`.
    """
    raise_file_limit()
    limit_heap()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options))
        # All work is done. Do not wait for a thread that hangs in a file system.
        logging.shutdown()
        os._exit(0)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop  # Not at the top, for the same reason as the server.

    return uvloop.new_event_loop


async def _serve(options: ServeOptions) -> None:
    # Not at the top: `culm serve --help` must not load aiohttp and SQLite.
    from culm.assemble import open_server

    stop = asyncio.Event()
    signals: list[float] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_on_signal, number, stop, signals))
    async with open_server(options, LoopClock(), Ids(), stop.set) as server:
        gc.freeze()  # What exists now stays, so no collection has to look at it.
        log.info("culm %s, data in %s", __version__, options.data_dir)
        for address in server.addresses:
            # Scripts wait for this line, so it must not stay in a buffer.
            print(f"listening {address}", flush=True)  # noqa: T201
        if os.environ.get(DETACHED):
            _let_go_of_output()
        await stop.wait()
        log.info("leaving")


def _let_go_of_output() -> None:
    """Close stdout and stderr: the client that started us has read the address."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _on_signal(number: signal.Signals, stop: asyncio.Event, before: list[float]) -> None:
    now_s = asyncio.get_running_loop().time()
    if before and now_s - before[0] > ECHO_S:
        os._exit(128 + number)  # A second signal: exit at once, without a clean shutdown.
    before.append(now_s)
    stop.set()
