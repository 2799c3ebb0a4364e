"""`culm agent`: start, list and call agents that serve by themselves."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from culm.cli.groups import CommandGroup
from culm.cli.options import FILE, directory_option, discovery_option, tls_options
from culm.cli.render.text import table
from culm.cli.terminal.process import is_terminal, output_width, print_json, require_output
from culm.clock import LoopClock
from culm.errors import NotFound
from culm.files import is_safe_name
from culm.fleet.discovery.base import AgentRecord, Discovery
from culm.fleet.discovery.files import FileDiscovery
from culm.settings import default_data_dir
from culm.wire.codec import printable


@click.group(cls=CommandGroup)
def agent() -> None:
    """Start, list and call standalone agents.

    \b
    Example:
      culm agent serve --role reviewer &
      culm agent list
      culm agent call reviewer look at the last commit
    """


@agent.command("serve")
@click.option("--role", required=True, metavar="NAME", help="Role by which callers find the agent.")
@click.option("--label", "labels", multiple=True, metavar="NAME", help="Label. May be repeated.")
@click.option(
    "--id", "agent_id", default="", metavar="ID", help="Agent id. Default: derived from the role."
)
@click.option(
    "--executor",
    type=click.Choice(["bamboo_runtime", "echo", "cli_adapter"]),
    default="bamboo_runtime",
    show_default=True,
    help="What does the work: the culm agent loop, an echo, or an external agent program.",
)
@click.option("--command", metavar="TEXT", help="Program for cli_adapter, with its arguments.")
@click.option(
    "--profile",
    type=click.Choice(["claude", "codex", "crush"]),
    help="Input and output format of that program. Not verified against the real programs.",
)
@click.option(
    "--input",
    "input_",
    type=click.Choice(["stdin", "argument"]),
    default="stdin",
    help="How the program receives its assignment. Default: stdin.",
)
@click.option(
    "--output",
    type=click.Choice(["lines", "json"]),
    default="lines",
    help="What the program prints: lines of text, or events as JSON lines. Default: lines.",
)
@click.option(
    "--env",
    "names",
    multiple=True,
    metavar="NAME",
    help="Environment variable to pass to the program, such as an API key. May be repeated.",
)
@click.option(
    "-m",
    "--model",
    default="",
    metavar="NAME",
    help="PROVIDER/MODEL for bamboo_runtime. Default: as for `culm run` in this directory.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to listen on."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on. Default: any free port.",
)
@click.option(
    "--token-file",
    type=FILE,
    help="File with the token that callers must present, created if missing. Default: a new token "
    "in the discovery directory.",
)
@click.option("--no-auth", is_flag=True, help="Do not require a token. Loopback only.")
@tls_options
@directory_option
@discovery_option
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
    no_auth: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Serve as an agent in this directory until SIGINT or SIGTERM.

    Several callers can use the agent at once, independently of each other. It is announced in the
    discovery directory and removed from it when it ends. Callers of the same user find its token
    there; others need the token file. Permission requests go to the caller.

    \b
    Example:
      culm agent serve --role reviewer --label fast
      culm agent serve --role writer --executor cli_adapter --command claude --profile claude
    """
    # The runtime of an agent takes long to import, and `culm agent list` needs nothing of it.
    from culm.cli.commands.agent_serve import (
        AgentServeOptions,
        env_of,
        executor_of,
        find_model,
        serve_agent,
    )
    from culm.cli.config_report import location_of
    from culm.fleet.transport.tls import ServerTls

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    data_dir = (data_dir or default_data_dir(os.environ)).absolute()
    kind = executor_of(executor, command or "", profile or "", input_, output)
    named, credential = None, None
    if executor == "bamboo_runtime":
        location = location_of(directory, None, data_dir, dict(os.environ))
        named, credential = asyncio.run(find_model(location, model))
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
        env=env_of(os.environ, names) if executor == "cli_adapter" else None,
    )
    serve_agent(serving)


@agent.command("list")
@click.option("--role", default="", metavar="NAME", help="Only agents with this role.")
@click.option("--label", default="", metavar="NAME", help="Only agents with this label.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@discovery_option
def list_(role: str, label: str, as_json: bool, data_dir: Path | None) -> None:
    """List the running agents.

    Workers of a server are not listed: they serve only that server.

    \b
    Example:
      culm agent list
      culm agent list --role reviewer --json
    """
    discovery = discovery_of(data_dir or default_data_dir(os.environ))
    found = [one for one in discovery.discover(role=role, label=label) if _takes_calls(one)]
    if as_json:
        print_json(found)
    elif found:
        head = ("agent", "role", "pid", "labels", "endpoint")
        click.echo("\n".join(table(head, map(_row, found), output_width())))
    else:
        click.echo(
            "no matching agent is running" if role or label else "no agent is running", err=True
        )


@agent.command("call")
@click.argument("name", metavar="AGENT")
@click.argument("words", nargs=-1, required=True, metavar="ASSIGNMENT...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--approve",
    type=click.Choice(["yes", "no"]),
    help="Answer to all permission requests. Default: ask at this terminal.",
)
@click.option(
    "--token-file",
    type=FILE,
    help="File with the agent's token. Default: its token in the discovery directory, if any.",
)
@click.option(
    "--ca",
    type=FILE,
    help="PEM file with the only certificates to trust for wss://.",
)
@discovery_option
def call(
    name: str,
    words: tuple[str, ...],
    as_json: bool,
    approve: str | None,
    token_file: Path | None,
    ca: Path | None,
    data_dir: Path | None,
) -> None:
    """Give an agent an assignment and print its answer.

    AGENT is an id or a role from `culm agent list`, or an address ws://… or wss://…. Permission
    requests are shown at this terminal; without a terminal they are denied. Ctrl-C cancels the run
    and waits for its end; a second Ctrl-C exits at once. If this process ends, so does the run.

    With --json each line is an event of the agent as received, or {"type": "asked", "approved"}
    with the fields of a permission request. The last line is {"type": "end", "status", "result",
    "error"}.

    \b
    Exit status:
      0        completed
      1        failed; see stderr
      2        usage error, or no agent has that id or role
      4        canceled
      128 + n  ended at once by a second signal n; 141: stdout was closed

    \b
    Example:
      culm agent call reviewer look at the last commit
      culm agent call ws://127.0.0.1:4711 --token-file token hello
    """
    require_output()
    # `culm agent list` does not need the fleet's transport.
    from culm.cli.commands.agent_call import AgentCallOptions, call_agent

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


# --- discovery


SHOWN_MAX = 5  # Agents in a hint.


def discovery_of(data_dir: Path) -> FileDiscovery:
    return FileDiscovery(discovery_dir_of(data_dir), LoopClock())


def discovery_dir_of(data_dir: Path) -> Path:
    return data_dir / "fabric"


def _takes_calls(record: AgentRecord) -> bool:
    """Return False for a worker that a process owns: it serves that process alone."""
    return record.culm is None or record.culm.owner is None


def _row(record: AgentRecord) -> Sequence[str]:
    labels = ", ".join(record.labels) or "-"
    return record.agent_id, record.role or "-", str(record.pid), labels, record.endpoint


def get_agent(discovery: Discovery, name: str) -> AgentRecord:
    """The agent with this id, or the first with this role; raises `NotFound` with known ones."""
    found = discovery.resolve(name) if is_safe_name(name) else None
    if found is not None:
        return found
    known = [one for one in discovery.discover() if _takes_calls(one)]
    of_role = [record for record in known if name and record.role == name]
    if of_role:
        return of_role[0]
    shown = [f"{one.agent_id} ({one.role or 'no role'})" for one in known[:SHOWN_MAX]]
    if len(known) > SHOWN_MAX:
        shown.append(f"{len(known) - SHOWN_MAX} more")
    hint = f"running: {', '.join(shown)}" if shown else f"start one: culm agent serve --role {name}"
    raise NotFound(f"no agent has the id or role {printable(name)}", hint=printable(hint))
