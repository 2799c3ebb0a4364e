"""`culm steer`: say something to what works, which it reads before its next step."""

import shlex

import click

from culm.cli.mail import text_given
from culm.cli.names import NamedItem
from culm.cli.server import read_workspace
from culm.cli.server_target import ServerTarget
from culm.cli.targets import BEGUN, NamedTargets, all_targets
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, NotFound
from culm.ids import SessionId
from culm.wire.codec import printable
from culm.wire.runs import Run


class NothingToSteer(Failed):
    """Nothing works there, so nobody would read it."""

    code = "nothing_runs"

    def __init__(self, label: str, instead: str) -> None:
        hint = f"{instead} TEXT gives it more to do"
        super().__init__(printable(f"nothing is at work in {label}"), hint=printable(hint))


def steer(where: ServerTarget, name: str, words: tuple[str, ...]) -> None:
    """Say it, and who will read it; raises `NotFound`, `InvalidRequest`, `NobodyHears`."""
    text = text_given(words or ("-",))

    async def say(workspace: RemoteWorkspace) -> str:
        targets = await all_targets(workspace)
        return await _steer(workspace, targets, targets.get(name), text)

    reader = read_workspace(where, say, None)
    if reader is None:
        hint = "`culm run` begins something; `culm ps --all` shows what is going on elsewhere"
        raise NotFound(f"nobody is at work in {printable(str(where.directory))}", hint=hint)
    click.echo(printable(f"{reader} reads it before its next step"), err=True)


async def _steer(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem, text: str
) -> str:
    """Returns the label of who reads it."""
    if one.kind == "run" and (agent_id := targets.runs[one.id].agent_id):
        agent = targets.agents[agent_id]
        if agent.run_id == one.id:
            one = NamedItem("agent", agent_id, agent.name)
    label = targets.label(one)
    if one.kind == "agent":
        agent = targets.agents[one.id]
        if agent.state == "ended":  # It would begin anew, and that is not what was asked for.
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
        if exc.code == NothingToSteer.code:  # It has ended meanwhile.
            raise NothingToSteer(label, instead) from exc
        raise
    return targets.label_of_run(reader)


def reader_of(targets: NamedTargets, one: NamedItem, session_id: str) -> Run | None:
    """The run that works in the session; raises `Failed` if it is not the one that was named."""
    live = targets.live_runs(session_id)
    reader = next((run for run in live if run.state in BEGUN), None)
    if reader is None or one.kind != "run" or reader.id == one.id:
        return reader
    if targets.runs[one.id].state == "ended":
        return None
    words = f"{targets.label(one)} is {targets.runs[one.id].state}, and reads nothing yet"
    hint = f"culm steer {targets.short[reader.id]} TEXT reaches what works in its session"
    raise Failed(printable(words), hint=hint)
