"""`culm ps`: the active runs of a directory, the agents that work for them, and processes.

Reads only: it joins no workspace and starts no server. The data is gathered first; rendering it is
pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from msgspec import Struct, field

from culm.cli.names import short_ids
from culm.cli.options import ServerTarget, at_server, json_option
from culm.cli.render.text import age_text, head_of, in_tree_order, size_text, table
from culm.cli.server import read_server, read_workspace
from culm.cli.terminal.process import output_width, print_json
from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.wire.agents import Agent
from culm.wire.asks import QuestionRequest
from culm.wire.codec import printable
from culm.wire.runs import Run
from culm.wire.workspaces import Process

WORK_HEAD = ("id", "kind", "state", "age", "tokens", "cost", "what")
PROCESS_HEAD = ("pid", "kind", "age", "memory", "command")


@click.command()
@click.option(
    "--all", "is_all", is_flag=True, help="Include every directory that the server has open."
)
@json_option
@at_server
def ps(is_all: bool, as_json: bool, where: ServerTarget) -> None:
    """Show active runs, agents and processes.

    Runs that have not ended come first, each with its state, the usage of it and all below it, and
    its agents. Their ids can be used with `culm stop` and `culm steer`. Then come processes:
    commands, jobs, hooks and workers of agents, each with its age and the memory of all its
    descendants. JSON output is one object, or with --all one object per directory.

    \b
    Example:
      culm ps
      culm ps --all
      culm ps --json
    """
    now_s = LoopClock().now_s()
    if is_all:
        everywhere = read_server(where, gather_all, {})
        if as_json:
            located = [
                LocatedActivity(activity.runs, activity.agents, activity.processes, path)
                for path, (activity, _) in everywhere.items()
            ]
            print_json(located)
            return
        busy = {path: seen for path, seen in everywhere.items() if seen[0]}
        pieces = [
            [printable(path), *lines_of(*seen, now_s, output_width())]
            for path, seen in busy.items()
        ]
        lines = [line for piece in pieces for line in ("", *piece)][1:]
    else:
        activity, known = read_workspace(
            where, gather, (WorkspaceActivity([], [], []), ActivityNames())
        )
        if as_json:
            print_json(activity)
            return
        lines = lines_of(activity, known, now_s, output_width())
    if lines:
        click.echo("\n".join(lines))
    else:
        click.echo("no active runs", err=True)


class WorkspaceActivity(Struct, frozen=True):
    """The activity in one workspace."""

    runs: list[Run]  # Not ended, in the order they were accepted.
    agents: list[Agent]  # Not ended.
    processes: list[Process]

    def __bool__(self) -> bool:
        return bool(self.runs or self.agents or self.processes)


class LocatedActivity(WorkspaceActivity, frozen=True):
    """`WorkspaceActivity` with its path, where there may be several workspaces."""

    path: str


class ActivityNames(Struct, frozen=True):
    """Further names and links, needed to render the activity as text."""

    parents: Mapping[str, str] = field(default_factory=dict[str, str])  # Of all agents, by id.
    titles: Mapping[str, str] = field(default_factory=dict[str, str])  # Of sessions, by id.
    asks: Mapping[str, str] = field(default_factory=dict[str, str])  # Awaited by a run, by its id.
    short: Mapping[str, str] = field(default_factory=dict[str, str])


Seen = tuple[WorkspaceActivity, ActivityNames]


async def gather(workspace: RemoteWorkspace) -> Seen:
    """Read all of it. It is not a snapshot: things change between two requests."""
    all_runs, all_agents = await workspace.runs(), await workspace.agents()
    activity = WorkspaceActivity(
        runs=sorted((run for run in all_runs if run.state != "ended"), key=lambda run: run.seq),
        agents=[agent for agent in all_agents if agent.state != "ended"],
        processes=await workspace.processes(),
    )
    asks: dict[str, str] = {}
    open_ = await workspace.open_asks()
    short_asks = short_ids([ask.request.id for ask in open_])
    for ask in open_:
        kind = "question" if isinstance(ask.request, QuestionRequest) else "ask"
        asks[ask.run_id] = f"{kind} {short_asks[ask.request.id]}"
    # Without a run of its own, a session appears only as the parent of its agents.
    sessions = await workspace.sessions() if activity.agents else []
    ids = [
        *(run.id for run in all_runs),
        *(agent.agent_id for agent in all_agents),
        *(session.id for session in sessions),
    ]
    known = ActivityNames(
        parents={agent.agent_id: agent.parent_id for agent in all_agents},
        titles={session.id: session.title for session in sessions},
        asks=asks,
        short=short_ids(ids),
    )
    return activity, known


async def gather_all(client: Client) -> dict[str, Seen]:
    """The activity of every workspace of the server, by its path."""
    found: dict[str, Seen] = {}
    for info in await client.workspaces():
        workspace = await client.find_workspace(Path(info.path))
        try:
            if workspace is not None:
                found[info.path] = await gather(workspace)
        except RequestRefused as exc:
            if exc.status != 404:  # Otherwise it has closed in the meantime.
                raise
    return found


# --- as text


def lines_of(
    activity: WorkspaceActivity, known: ActivityNames, now_s: float, width: int
) -> list[str]:
    """Runs with the agents below them, then processes, each as a table."""
    work = list(_work_rows(activity, known, now_s))
    lines = table(WORK_HEAD, work, width) if work else []
    if activity.processes:
        names: dict[str, str] = {
            agent.session_id: f"{_name_of(agent)} ({known.short[agent.agent_id]})"
            for agent in activity.agents
        }
        rows = [_process_row(one, names) for one in activity.processes]
        lines += [*([""] if lines else []), *table(PROCESS_HEAD, rows, width)]
    return lines


def _work_rows(
    activity: WorkspaceActivity, known: ActivityNames, now_s: float
) -> Iterator[Sequence[str]]:
    runs: dict[str, Run] = {run.id: run for run in activity.runs}
    agents: dict[str, Agent] = {agent.agent_id: agent for agent in activity.agents}
    for depth, one in in_tree_order(parents_of(activity, known)):
        name = "  " * depth + known.short.get(one, one)
        if (agent := agents.get(one)) is not None:
            yield name, "agent", *_agent_cells(agent, known, now_s)
        elif (run := runs.get(one)) is not None:
            yield name, "run", *_run_cells(run, known, now_s)
        else:
            yield name, "session", "-", "-", "-", "-", head_of(known.titles.get(one, ""))


def parents_of(activity: WorkspaceActivity, known: ActivityNames) -> dict[str, str]:
    """The parent of each: agents below agents, runs, or sessions without an active run.

    The run of an agent is shown in the line of the agent, not as a run.
    """
    at_work: set[str] = {agent.agent_id for agent in activity.agents}
    runs = [run for run in activity.runs if run.agent_id not in at_work]
    by_session: dict[str, str] = {}
    for run in runs:
        by_session.setdefault(run.session_id, run.id)
    doing: dict[str, Run] = {run.id: run for run in activity.runs}
    shown: set[str] = {run.id for run in runs}
    parents: dict[str, str] = {run.id: "" for run in runs}
    for agent in activity.agents:
        above = _above(agent, at_work, known.parents)
        does = doing.get(agent.run_id)
        if above and above not in at_work:
            started_by = "" if does is None else does.parent_run_id
            above = started_by if started_by in shown else by_session.get(above, above)
            parents.setdefault(above, "")
        parents[agent.agent_id] = above
    return parents


def _above(agent: Agent, at_work: set[str], parents: Mapping[str, str]) -> str:
    """The nearest active ancestor, else its session; empty if a client started it."""
    above = agent.parent_id
    passed: set[str] = {agent.agent_id}
    while above in parents and above not in at_work and above not in passed:
        passed.add(above)
        above = parents[above]
    return above


def _run_cells(run: Run, known: ActivityNames, now_s: float) -> Sequence[str]:
    state: str = run.state
    if run.id in known.asks:
        state = f"waits for {known.asks[run.id]}"
    elif run.state == "folded":
        state = f"read by {known.short.get(run.host_run_id, run.host_run_id)}"
    elif run.state == "held":
        state = f"held: {head_of(run.title)}" if run.title else "held"
    tokens = run.tree_tokens or run.prompt_tokens + run.completion_tokens
    used = _used(tokens, run.tree_cost or run.cost)
    return state, age_text(now_s - run.created_at), *used, head_of(run.prompt) or run.kind


def _agent_cells(agent: Agent, known: ActivityNames, now_s: float) -> Sequence[str]:
    state: str = agent.state
    if agent.run_id in known.asks:
        state = f"waits for {known.asks[agent.run_id]}"
    elif agent.waiting_for:
        state = f"waits for {'a slot' if agent.waiting_for == 'slot' else agent.waiting_for}"
    age = age_text(now_s - (agent.started_at or agent.created_at))
    return state, age, *_used(agent.tokens, agent.cost), _name_of(agent)


def _name_of(agent: Agent) -> str:
    return head_of(agent.name) or agent.role or "-"


def _used(tokens: int, cost: float) -> tuple[str, str]:
    return f"{tokens:,}" if tokens else "-", f"${cost:.4f}" if cost else "-"


def _process_row(process: Process, names: Mapping[str, str]) -> Sequence[str]:
    """A worker is shown with the name of its agent."""
    is_worker = process.kind == "worker"
    command = names.get(process.session_id, "") if is_worker else head_of(process.command)
    text = (command or head_of(process.command)) + (" (stopping)" if process.stopping else "")
    age, memory = age_text(process.age_s), size_text(process.rss_bytes)
    return str(process.pid), process.kind, age, memory, text
