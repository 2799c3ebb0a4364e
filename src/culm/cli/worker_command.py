"""The options of `culm worker`. What it needs is imported when it runs."""

import sys

import click

# Some hosts ask before they spawn for a provision that narrows. Only what we hold is named.
CAPABILITIES = '{"provision_version":2,"capabilities":["typed_read_only_tool_policy_v1"]}'


@click.command()
@click.option(
    "--no-auth", is_flag=True, help="Serve without a token, if the provision has none. Loopback."
)
@click.option(
    "--print-capabilities", is_flag=True, help="Say what this worker holds, for a host that asks."
)
def worker(no_auth: bool, print_capabilities: bool) -> None:  # noqa: FBT001 - click passes by name
    """Be a worker: read a provision on stdin, serve its executor on a loopback WebSocket.

    This is what a server starts for its sub-agents; docs/fleet.md tells what a provision may say.
    The worker announces itself as FABRIC_DIR/CHILD_ID.json, which it withdraws at its end. It
    ends when it has served, when nobody connects for long, by a signal, or when its owner is gone.
    Nothing is printed on stdout, but with --print-capabilities.

    \b
    Exit status:
      0  it has served, or was told to leave
      1  it could not listen or announce itself, or nobody came; stderr says which
      2  the provision cannot be used, or wrong usage; one line on stderr says why

    \b
    Example:
      echo '{"version": 2, "identity": {"child_id": "echo-1", "role": "echo"},
             "executor": {"kind": "echo"}, "reusable": true,
             "fabric_dir": "'$HOME'/.local/share/culm/fabric"}' | culm worker --no-auth &
      culm agent call echo-1 hello
    """
    import os

    if print_capabilities:
        click.echo(CAPABILITIES)
        return
    if sys.stdin is not None and sys.stdin.isatty():
        click.echo("culm: reading a provision on stdin; Ctrl-D ends it", err=True)
    from culm.fleet.worker.main import run_worker

    status = run_worker(no_auth=no_auth)
    # All that must be done is done. A thread that hangs in a file system is not waited for.
    os._exit(status)
