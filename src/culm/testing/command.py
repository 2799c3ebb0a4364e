"""`python -m culm.testing.model_server`: the server as a program, for tests in other processes."""

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

FILES = 4_096  # Twice the answers at a time; a shell's default is 1,024.
DEFAULT = Script(
    otherwise=Reply(
        text="Hello! I am no real model but a script: I say the same to everybody, I cost nothing"
        " and I need no network. Give me a script of your own with --script."
    )
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--script",
    "script_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with the script (docs/testing.md). Default: a greeting for everybody.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="TCP port; 0 takes any free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def model_server(script_file: Path | None, port: int, host: str) -> None:
    """Play a language-model provider from a script, until SIGTERM or SIGINT.

    Speaks POST /v1/chat/completions as OpenAI does and POST /v1/messages as Anthropic does.
    Prints one line `listening URL` when it is ready. Asks for no key: anybody who can reach the
    address can use it.

    \b
    GET  /culm/requests     what was asked so far
    POST /culm/release      let held answers go on (?n=3: one)
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
    """Run, and say what failed and what to do about it."""
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
        # The one line a script waits for; it must not sit in a buffer.
        print(f"listening {server.url}", flush=True)  # noqa: T201
        await stop.wait()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
