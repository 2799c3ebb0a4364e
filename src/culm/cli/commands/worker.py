"""`culm worker`: the process in which a server runs a sub-agent."""

import os
import sys

import click

# Some hosts ask before they spawn a worker with a restricting provision. Lists what we enforce.
CAPABILITIES = '{"provision_version":2,"capabilities":["typed_read_only_tool_policy_v1"]}'


@click.command()
@click.option(
    "--no-auth",
    is_flag=True,
    help="Serve without a token if the provision has none. Loopback only.",
)
@click.option(
    "--print-capabilities", is_flag=True, help="Print the capabilities of this worker and exit."
)
def worker(no_auth: bool, print_capabilities: bool) -> None:
    """Run a worker for a provision read from stdin.

    The worker serves the executor of the provision on a loopback WebSocket. A server starts workers
    for its sub-agents; docs/fleet.md describes the provision. The worker announces itself as
    DISCOVERY_DIR/CHILD_ID.json and removes that file when it ends. It ends when it has served, when
    no host connects in time, on a signal, or when its owner is gone. Nothing is printed on stdout,
    except by --print-capabilities.

    \b
    Exit status:
      0  served, or told to stop
      1  could not listen or announce itself, or no host connected; see stderr
      2  unusable provision, or usage error; one line on stderr has the reason

    \b
    Example:
      echo '{"version": 2, "identity": {"child_id": "echo-1", "role": "echo"},
             "executor": {"kind": "echo"}, "reusable": true,
             "fabric_dir": "'$HOME'/.local/share/culm/fabric"}' | culm worker --no-auth &
      culm agent call echo-1 hello
    """
    if print_capabilities:
        click.echo(CAPABILITIES)
        return
    if sys.stdin is not None and sys.stdin.isatty():
        click.echo("culm: reading a provision on stdin; Ctrl-D ends it", err=True)
    # Not at the top: a host that asks for capabilities should not wait for the runtime.
    from culm.fleet.worker.main import run_worker

    status = run_worker(no_auth=no_auth)
    # All work is done. Do not wait for a thread that hangs in a file system.
    os._exit(status)
