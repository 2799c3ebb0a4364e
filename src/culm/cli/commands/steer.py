"""`culm steer`: send a message to a run, which reads it before its next step."""

import shlex
import sys

import click

from culm.cli.names import BEGUN, NamedItem, NamedTargets, all_targets
from culm.cli.options import ServerTarget, at_server
from culm.cli.prompt_options import read_text
from culm.cli.server import use_workspace
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed
from culm.ids import SessionId
from culm.mail.letters import LETTER_BYTES_MAX
from culm.wire.codec import printable
from culm.wire.runs import Run


@click.command()
@click.argument("name", metavar="RUN|SESSION|AGENT")
@click.argument("words", nargs=-1, metavar="[TEXT...]")
@at_server
def steer(name: str, words: tuple[str, ...], where: ServerTarget) -> None:
    """Send a message to an active run, read before its next step.

    The target is given by its id, the beginning of it, or its title; `culm ps` shows them. Without
    TEXT, or if TEXT is -, the message is read from stdin. If the run ends before it reads the
    message, the message becomes a prompt of its own. If there is no active run, nothing is sent and
    the exit status is 1.

    \b
    Example:
      culm steer 1d9c6a52 leave the tests alone
      git diff | culm steer 1d9c6a52 -
    """
    if not words and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("TEXT is missing", click.get_current_context())
    text = read_text(words or ("-",), LETTER_BYTES_MAX)

    async def say(workspace: RemoteWorkspace) -> str:
        targets = await all_targets(workspace)
        return await _steer(workspace, targets, targets.get(name), text)

    reader = use_workspace(where, say, "active runs")
    click.echo(printable(f"{reader} reads it before its next step"), err=True)


class NothingToSteer(Failed):
    """No run is active there, so nothing would read the message."""

    code = "nothing_runs"

    def __init__(self, label: str, instead: str) -> None:
        hint = f"give it more to do with {instead} TEXT"
        super().__init__(printable(f"no active run in {label}"), hint=printable(hint))


async def _steer(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem, text: str
) -> str:
    """Send it; returns the label of the reader."""
    if one.kind == "run" and (agent_id := targets.runs[one.id].agent_id):
        agent = targets.agents[agent_id]
        if agent.run_id == one.id:
            one = NamedItem("agent", agent_id, agent.name)
    label = targets.label(one)
    if one.kind == "agent":
        agent = targets.agents[one.id]
        if agent.state == "ended":  # A message would start it again, which was not requested.
            raise NothingToSteer(label, f"culm mail send --to {targets.short[one.id]}")
        await workspace.steer_agent(one.id, text)
        return label
    session_id = targets.runs[one.id].session_id if one.kind == "run" else SessionId(one.id)
    instead = f"culm run --session {shlex.quote(session_id)}"
    reader = reader_of(targets, one, session_id)
    if reader is None:
        raise NothingToSteer(label, instead)
    try:
        await workspace.steer(session_id, text)
    except RequestRefused as exc:
        if exc.code == NothingToSteer.code:  # It has ended in the meantime.
            raise NothingToSteer(label, instead) from exc
        raise
    return targets.label_of_run(reader)


def reader_of(targets: NamedTargets, one: NamedItem, session_id: str) -> Run | None:
    """The active run of the session; raises `Failed` if it is not the one that was named."""
    live = targets.live_runs(session_id)
    reader = next((run for run in live if run.state in BEGUN), None)
    if reader is None or one.kind != "run" or reader.id == one.id:
        return reader
    if targets.runs[one.id].state == "ended":
        return None
    message = f"{targets.label(one)} is {targets.runs[one.id].state} and does not read messages yet"
    hint = f"culm steer {targets.short[reader.id]} TEXT reaches the active run of its session"
    raise Failed(printable(message), hint=hint)
