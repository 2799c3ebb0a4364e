"""`culm stop`: stop runs, sessions and agents, and wait until they have ended.

The result of each is the one that the server recorded.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

import click

from culm.cli.names import SHORT_CHARS, NamedItem, NamedTargets, all_targets
from culm.cli.options import ServerTarget, at_server
from culm.cli.render.text import head_of
from culm.cli.server import use_workspace
from culm.cli.terminal.process import EXIT_FAILED
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.wire.codec import printable
from culm.wire.runs import Run, settled_by

STOP_S = 15.0  # The server gives up on a run that does not stop within 10 s.
LOOK_EVERY_S = 0.1
Result = Literal["canceled", "finished_first", "not_stopped", "already_ended", "held", "refused"]
_TEXTS: dict[Result, str] = {
    "canceled": "canceled",
    "finished_first": "finished first",
    "not_stopped": "did not stop",
    "already_ended": "had already ended",
    "held": "is held and not running; stop it by its own id to drop it",
    "refused": "cannot be stopped by itself",
}
_FAILED = ("not_stopped", "refused")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|SESSION|AGENT...")
@at_server
def stop(names: tuple[str, ...], where: ServerTarget) -> None:
    """Stop runs, sessions or agents, with everything below them.

    Each target is given by its id, the beginning of it, or its title; `culm ps` shows them. Work
    that is done is not undone. The command waits until everything has ended and prints the outcome
    of each target; the exit status is 1 if something did not stop.

    \b
    Example:
      culm stop 1d9c6a52
      culm stop 1d9c6a52 68263f22
    """

    async def stop_all(workspace: RemoteWorkspace) -> tuple[list[StopOutcome], list[str]]:
        targets = await all_targets(workspace)
        # Nothing is stopped if one of them is not found.
        wanted = dict.fromkeys(targets.get(name) for name in names)
        outcomes = [outcome for one in wanted for outcome in await _stop(workspace, targets, one)]
        return outcomes, await _behind(workspace, [one.id for one in wanted if one.kind == "run"])

    outcomes, notes = use_workspace(where, stop_all, "active runs")
    for line in (*(outcome.line() for outcome in outcomes), *notes):
        click.echo(line, err=True)
    sys.exit(EXIT_FAILED if any(outcome.result in _FAILED for outcome in outcomes) else 0)


class StopOutcome(NamedTuple):
    """The outcome for one target."""

    label: str
    result: Result
    pids: Sequence[int] = ()  # Processes that are left.
    why: str = ""  # Its outcome, or the reason of the server.

    def line(self) -> str:
        left = ", ".join(map(str, self.pids))
        more = f"; left: pid {left}" if left else f" ({self.why})" if self.why else ""
        return printable(f"{self.label}: {_TEXTS[self.result]}{more}")


async def _stop(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem
) -> list[StopOutcome]:
    match one.kind:
        case "run":
            return [await _stop_run(workspace, targets, one)]
        case "agent":
            return [await _stop_agent(workspace, targets, one)]
        case _:
            return await _stop_session(workspace, targets, one)


async def _behind(workspace: RemoteWorkspace, run_ids: Sequence[str]) -> list[str]:
    """Notes on the runs that go on in the sessions of the stopped runs."""
    sessions = {run.session_id for run in [await workspace.run(run_id) for run_id in run_ids]}
    runs = [run for session in sorted(sessions) for run in await workspace.runs(session)]
    return [
        f"(run {run.id[:SHORT_CHARS]} of the same session is still active: {head_of(run.prompt)}; "
        f"`culm stop {run.session_id[:SHORT_CHARS]}` stops all)"
        for run in runs
        if run.state not in ("ended", "held") and not run.agent_id
    ]


async def _stop_run(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem
) -> StopOutcome:
    try:
        answer = await workspace.cancel_run(one.id)
    except RequestRefused as exc:
        # It shares the turn of another run. The other targets are stopped all the same.
        return StopOutcome(targets.label(one), "refused", why=exc.message)
    pids = await _pids_of(workspace, [one.id]) if answer.result == "not_stopped" else []
    label = targets.label_of_run(answer.run)
    ended_before = answer.result == "already_ended" and answer.run.outcome
    return StopOutcome(label, answer.result, pids, ended_before or "")


async def _stop_agent(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem
) -> StopOutcome:
    """The request returns when the agent and all below it have ended, or after a timeout."""
    label = targets.label(one)
    before = targets.agents[one.id]
    agent = await workspace.cancel_agent(one.id)
    if agent.state != "ended":
        below = [other.run_id for other in await workspace.agents(one.id)]
        return StopOutcome(label, "not_stopped", await _pids_of(workspace, [agent.run_id, *below]))
    if before.state == "ended":
        return StopOutcome(label, "already_ended", why=agent.outcome or "")
    return StopOutcome(label, "canceled" if agent.outcome == "canceled" else "finished_first")


async def _stop_session(
    workspace: RemoteWorkspace, targets: NamedTargets, one: NamedItem
) -> list[StopOutcome]:
    """Stop every live run in the session and below it; held runs stay held."""
    live = targets.live_runs(one.id)
    below: set[str] = {agent.run_id for agent in await workspace.agents(one.id)}
    live += [run for run in targets.runs.values() if run.id in below and run.state != "ended"]
    if not live:
        return [StopOutcome(targets.label(one), "already_ended")]
    await workspace.cancel(SessionId(one.id))
    open_ = [run.id for run in live if run.state != "held"]
    ended = {run.id: run for run in await _ends_of(workspace, open_)}
    outcomes: list[StopOutcome] = []
    for run in live:
        label = targets.label_of_run(run)
        if run.state == "held":
            outcomes.append(StopOutcome(label, "held"))
        elif (end := ended.get(run.id)) is None:
            outcomes.append(StopOutcome(label, "not_stopped", await _pids_of(workspace, [run.id])))
        else:
            outcomes.append(StopOutcome(label, settled_by(end.outcome or "canceled")))
    return outcomes


async def _ends_of(workspace: RemoteWorkspace, run_ids: Sequence[str]) -> list[Run]:
    """The runs that end within the time limit."""
    ended: dict[str, Run] = {}
    loop = asyncio.get_running_loop()
    end_s = loop.time() + STOP_S
    while True:
        for run_id in run_ids:
            if run_id not in ended and (run := await workspace.run(run_id)).state == "ended":
                ended[run_id] = run
        if len(ended) == len(run_ids) or loop.time() > end_s:
            return [*ended.values()]
        await asyncio.sleep(LOOK_EVERY_S)


async def _pids_of(workspace: RemoteWorkspace, run_ids: Sequence[str]) -> list[int]:
    found = [one for one in await workspace.processes() if one.run_id in run_ids]
    return sorted({pid for one in found for pid in (one.pid, *one.pids)})
