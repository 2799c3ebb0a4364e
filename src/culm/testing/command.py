"""The model server as a program: `python -m culm.testing.model_server`."""

import asyncio
import resource
import signal
import sys
from pathlib import Path

import click
import uvloop

from culm.errors import AppError
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script, read_script

FILES = 4_096  # Twice the concurrent answers; the default of shells is 1,024.
DEFAULT = Script(
    otherwise=Reply(
        text="Hello! I am not a real model but a script: I always give the same answer, I cost"
        " nothing and I need no network. Use --script to give me a script of your own."
    )
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--script",
    "script_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with the script (docs/testing.md). Default: a greeting.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="TCP port; 0 selects a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def model_server(script_file: Path | None, port: int, host: str) -> None:
    """Play a language-model provider from a script, until SIGTERM or SIGINT.

    Implements POST /v1/chat/completions of OpenAI and POST /v1/messages of Anthropic. Prints one
    line `listening URL` when it is ready. Requires no key: anyone who can reach the address can
    use it.

    \b
    GET  /culm/requests     list the requests so far
    POST /culm/release      continue held answers (?n=3: only one)
    POST /culm/script       replace the script

    \b
    Example:
      echo '{"replies": [{"text": "Four."}]}' > four.json
      python -m culm.testing.model_server --script four.json --port 8099
    """
    script = DEFAULT if script_file is None else read_script(script_file)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(script, host, port))


def main() -> None:
    """Run, and report errors with their hints."""
    try:
        model_server(prog_name="python -m culm.testing.model_server")
    except AppError as exc:
        click.echo(f"model server: {exc.message}", err=True)
        if exc.hint:
            click.echo(f"hint: {exc.hint}", err=True)
        sys.exit(1)


async def _serve(script: Script, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_model_server(script, host=host, port=port) as server:
        # Scripts wait for this line; it must not stay in a buffer.
        print(f"listening {server.url}", flush=True)  # noqa: T201
        await stop.wait()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
