"""The options of `culm agent`. What its commands need is imported when they run."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from culm.cli.commands import CommandGroup
from culm.cli.options import directory_option
from culm.cli.terminal.streams import is_terminal, need_output

if TYPE_CHECKING:  # Only `click` is needed to print a help.
    from culm.fleet.provision import AnyKind

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="As for `culm serve`; agents are found in its folder `fabric`.",
)


@click.group(cls=CommandGroup)
def agent() -> None:
    """Agents that serve by themselves: start one, list them, call one.

    \b
    Example:
      culm agent serve --role reviewer &
      culm agent list
      culm agent call reviewer look at the last commit
    """


@agent.command("serve")
@click.option("--role", required=True, metavar="NAME", help="What it is good for.")
@click.option("--label", "labels", multiple=True, metavar="NAME", help="May be repeated.")
@click.option("--id", "agent_id", default="", metavar="ID", help="Default: made from the role.")
@click.option(
    "--executor",
    type=click.Choice(["bamboo_runtime", "echo", "cli_adapter"]),
    default="bamboo_runtime",
    show_default=True,
    help="Who does the work: culm's own loop, an echo, or a program that is an agent itself.",
)
@click.option("--command", metavar="TEXT", help="The program of cli_adapter, with its arguments.")
@click.option(
    "--profile",
    type=click.Choice(["claude", "codex", "crush"]),
    help="How that program is spoken to. Not verified against the real programs.",
)
@click.option(
    "--input",
    "input_",
    type=click.Choice(["stdin", "argument"]),
    default="stdin",
    help="How it is given its assignment. Default: stdin.",
)
@click.option(
    "--output",
    type=click.Choice(["lines", "json"]),
    default="lines",
    help="What it prints: lines of text, or events as JSON lines. Default: lines.",
)
@click.option(
    "--env",
    "names",
    multiple=True,
    metavar="NAME",
    help="A variable that program gets beside the usual ones, such as a key. May be repeated.",
)
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="PROVIDER/MODEL of bamboo_runtime. Default: as for `culm run` in this directory.",
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: any free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The token callers must show, made if missing. Default: a new one beside the record.",
)
@click.option("--no-auth", is_flag=True, help="Ask for no token. Loopback only.")
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="PEM file.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="PEM file.")
@directory_option
@data_dir_option
def serve(
    role: str,
    labels: tuple[str, ...],
    agent_id: str,
    executor: str,
    command: str | None,
    profile: str | None,
    input_: str,
    output: str,
    names: tuple[str, ...],
    model: str,
    host: str,
    port: int,
    token_file: Path | None,
    no_auth: bool,  # noqa: FBT001 - click passes by name
    tls_cert: Path | None,
    tls_key: Path | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Serve as an agent in this directory until SIGINT or SIGTERM.

    Many may call it at once, each for itself. It is announced in the fabric, and withdrawn when it
    ends. Callers of the same user find its token there; others need it as a file. What needs
    permission is asked of whoever called.

    \b
    Example:
      culm agent serve --role reviewer --label fast
      culm agent serve --role writer --executor cli_adapter --command claude --profile claude
    """
    import asyncio
    import os

    from culm.cli.agent_serve import AgentServeOptions, serve_agent
    from culm.fleet.transport.tls import ServerTls
    from culm.settings import default_data_dir

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key are given together")
    data_dir = (data_dir or default_data_dir(os.environ)).absolute()
    kind = _kind(executor, command or "", profile or "", input_, output)
    named, credential = None, None
    if executor == "bamboo_runtime":
        from culm.cli.agent_model import find_model
        from culm.cli.reading import location_of

        place = location_of(directory, None, data_dir, dict(os.environ))
        named, credential = asyncio.run(find_model(place, model))
    tls = ServerTls(tls_cert, tls_key) if tls_cert and tls_key else None
    serving = AgentServeOptions(
        role,
        kind,
        data_dir,
        directory.resolve(),
        agent_id=agent_id,
        labels=labels,
        host=host,
        port=port,
        token_file=token_file,
        auth=not no_auth,
        tls=tls,
        model=named,
        credential=credential,
        env=_env(os.environ, names) if executor == "cli_adapter" else None,
    )
    serve_agent(serving)


def _env(own: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if name not in own]
    if missing:
        raise click.UsageError(f"--env {missing[0]}: it is not set")
    return {name: own[name] for name in names}


def _kind(executor: str, command: str, profile: str, input_: str, output: str) -> "AnyKind":
    import shlex
    from typing import Literal, cast

    from culm.fleet.provision import CliKind, EchoKind, RuntimeKind

    if executor != "cli_adapter":
        if command or profile:
            raise click.UsageError("--command and --profile are for --executor cli_adapter")
        return EchoKind() if executor == "echo" else RuntimeKind()
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise click.UsageError(f"--command cannot be read: {exc}") from exc
    if not words:
        raise click.UsageError("--executor cli_adapter needs a --command")
    # The choices of the options are these.
    given = cast("Literal['stdin', 'argument']", input_)
    said = cast("Literal['lines', 'json']", output)
    return CliKind(words[0], words[1:], profile, given, said)


@agent.command("list")
@click.option("--role", default="", metavar="NAME", help="Only those of this role.")
@click.option("--label", default="", metavar="NAME", help="Only those with this label.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@data_dir_option
def list_(
    role: str,
    label: str,
    as_json: bool,  # noqa: FBT001
    data_dir: Path | None,
) -> None:
    """List the agents that serve now. The workers of a server are its own, and not listed.

    \b
    Example:
      culm agent list
      culm agent list --role reviewer --json
    """
    import os

    from culm.cli.agents import discovery_of, show_agents
    from culm.settings import default_data_dir

    discovery = discovery_of(data_dir or default_data_dir(os.environ))
    show_agents(discovery, role, label, as_json=as_json)


@agent.command("call")
@click.argument("name", metavar="AGENT")
@click.argument("words", nargs=-1, required=True, metavar="ASSIGNMENT...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
@click.option(
    "--approve",
    type=click.Choice(["yes", "no"]),
    help="What happens to a call that needs permission. Default: you are asked, if you can be.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The agent's token. Default: the one it keeps beside its record, if it does.",
)
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PEM file; for wss:// these certificates are trusted, and no others.",
)
@data_dir_option
def call(
    name: str,
    words: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
    approve: str | None,
    token_file: Path | None,
    ca: Path | None,
    data_dir: Path | None,
) -> None:
    """Give an agent an assignment and print what it says.

    AGENT is an id or a role that `culm agent list` shows, or an address ws://… or wss://…. What
    needs permission is asked at this terminal; where nobody can be asked it is denied. Ctrl-C
    cancels the run and waits for its end; a second one leaves at once. If this process ends, so
    does the run.

    With --json the lines are the agent's events as they come, {"type": "asked", "approved", what
    was asked}, and at last {"type": "end", "status", "result", "error"}.

    \b
    Exit status:
      0        it is done
      1        it is not; stderr says why
      2        wrong usage, or nobody has that id or role
      4        cancelled
      128 + n  ended at once by a second signal n; 141: nobody reads stdout

    \b
    Example:
      culm agent call reviewer look at the last commit
      culm agent call ws://127.0.0.1:4711 --token-file token hello
    """
    import os

    need_output()
    from culm.cli.agent_call import AgentCallOptions, call_agent
    from culm.settings import default_data_dir

    calling = AgentCallOptions(
        name,
        " ".join(words),
        data_dir or default_data_dir(os.environ),
        token_file=token_file,
        ca=ca,
        as_json=as_json,
        approve=None if approve is None else approve == "yes",
        interactive=not as_json and is_terminal(),
    )
    sys.exit(call_agent(calling))
