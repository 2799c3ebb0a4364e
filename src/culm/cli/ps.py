"""`culm ps`: what is going on for a directory: runs, the agents that work for them, processes.

Looks and changes nothing; it joins no workspace and starts no server. What there is to see is
gathered first; how it is shown is pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field

from culm.cli.asks import all_in
from culm.cli.names import short_ids
from culm.cli.render.call_lines import head_of
from culm.cli.render.text import age_text, size_text, table
from culm.cli.render.trees import in_tree_order
from culm.cli.server import read_server, read_workspace
from culm.cli.server_target import ServerTarget
from culm.cli.terminal.streams import output_width
from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.wire.agents import Agent
from culm.wire.asks import QuestionRequest
from culm.wire.codec import printable
from culm.wire.processes import Process
from culm.wire.runs import Run

WORK_HEAD = ("id", "kind", "state", "age", "tokens", "cost", "what")
PROCESS_HEAD = ("pid", "kind", "age", "memory", "command")


class WorkspaceActivity(Struct, frozen=True):
    """What goes on in one workspace."""

    runs: list[Run]  # That have not ended, in the order they were accepted.
    agents: list[Agent]  # At work.
    processes: list[Process]

    def __bool__(self) -> bool:
        return bool(self.runs or self.agents or self.processes)


class LocatedActivity(WorkspaceActivity, frozen=True):
    """As `Going`, where there may be several workspaces."""

    path: str


class ActivityNames(Struct, frozen=True):
    """What is known beside it, to tell it in words."""

    parents: Mapping[str, str] = field(default_factory=dict[str, str])  # Of all agents, by id.
    titles: Mapping[str, str] = field(default_factory=dict[str, str])  # Of sessions, by id.
    asks: Mapping[str, str] = field(default_factory=dict[str, str])  # What a run waits for.
    short: Mapping[str, str] = field(default_factory=dict[str, str])


Seen = tuple[WorkspaceActivity, ActivityNames]


async def gather(workspace: RemoteWorkspace) -> Seen:
    """Ask for all of it. It is no snapshot: things move on between two questions."""
    all_runs, all_agents = await workspace.runs(), await workspace.agents()
    going = WorkspaceActivity(
        runs=sorted((run for run in all_runs if run.state != "ended"), key=lambda run: run.seq),
        agents=[agent for agent in all_agents if agent.state != "ended"],
        processes=await workspace.processes(),
    )
    asks: dict[str, str] = {}
    open_ = await all_in(workspace)
    short_asks = short_ids([ask.request.id for ask in open_])
    for ask in open_:
        word = "question" if isinstance(ask.request, QuestionRequest) else "ask"
        asks[ask.run_id] = f"{word} {short_asks[ask.request.id]}"
    # Without a run of its own a session is only the place of its agents.
    sessions = await workspace.sessions() if going.agents else []
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
    return going, known


async def gather_all(client: Client) -> dict[str, Seen]:
    """Of every workspace that the server has, by its path."""
    found: dict[str, Seen] = {}
    for info in await client.workspaces():
        workspace = await client.find_workspace(Path(info.path))
        try:
            if workspace is not None:
                found[info.path] = await gather(workspace)
        except RequestRefused as exc:
            if exc.status != 404:  # Else it has closed meanwhile.
                raise
    return found


def show_work(where: ServerTarget, *, is_all: bool, as_json: bool) -> None:
    now_s = LoopClock().now_s()
    if is_all:
        everywhere = read_server(where, gather_all, {})
        if as_json:
            told = [
                LocatedActivity(going.runs, going.agents, going.processes, path)
                for path, (going, _) in everywhere.items()
            ]
            click.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
            return
        busy = {path: seen for path, seen in everywhere.items() if seen[0]}
        pieces = [
            [printable(path), *lines_of(*seen, now_s, output_width())]
            for path, seen in busy.items()
        ]
        lines = [line for piece in pieces for line in ("", *piece)][1:]
    else:
        going, known = read_workspace(
            where, gather, (WorkspaceActivity([], [], []), ActivityNames())
        )
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(going), indent=2))
            return
        lines = lines_of(going, known, now_s, output_width())
    if lines:
        click.echo("\n".join(lines))
    else:
        click.echo("nothing runs here", err=True)


# --- as text


def lines_of(going: WorkspaceActivity, known: ActivityNames, now_s: float, width: int) -> list[str]:
    """Runs with the agents below them, then processes; each as a table."""
    work = list(_work_rows(going, known, now_s))
    lines = table(WORK_HEAD, work, width) if work else []
    if going.processes:
        names: dict[str, str] = {
            agent.session_id: f"{_name_of(agent)} ({known.short[agent.agent_id]})"
            for agent in going.agents
        }
        rows = [_process_row(one, names) for one in going.processes]
        lines += [*([""] if lines else []), *table(PROCESS_HEAD, rows, width)]
    return lines


def _work_rows(
    going: WorkspaceActivity, known: ActivityNames, now_s: float
) -> Iterator[Sequence[str]]:
    runs: dict[str, Run] = {run.id: run for run in going.runs}
    agents: dict[str, Agent] = {agent.agent_id: agent for agent in going.agents}
    for depth, one in in_tree_order(parents_of(going, known)):
        name = "  " * depth + known.short.get(one, one)
        if (agent := agents.get(one)) is not None:
            yield name, "agent", *_agent_cells(agent, known, now_s)
        elif (run := runs.get(one)) is not None:
            yield name, "run", *_run_cells(run, known, now_s)
        else:
            yield name, "session", "-", "-", "-", "-", head_of(known.titles.get(one, ""))


def parents_of(going: WorkspaceActivity, known: ActivityNames) -> dict[str, str]:
    """What stands below what: agents below agents, runs, or sessions in which nothing runs.

    What an agent does is told in its own line, not as a run.
    """
    at_work: set[str] = {agent.agent_id for agent in going.agents}
    runs = [run for run in going.runs if run.agent_id not in at_work]
    by_session: dict[str, str] = {}
    for run in runs:
        by_session.setdefault(run.session_id, run.id)
    doing: dict[str, Run] = {run.id: run for run in going.runs}
    shown: set[str] = {run.id for run in runs}
    parents: dict[str, str] = {run.id: "" for run in runs}
    for agent in going.agents:
        above = _above(agent, at_work, known.parents)
        does = doing.get(agent.run_id)
        if above and above not in at_work:
            started_by = "" if does is None else does.parent_run_id
            above = started_by if started_by in shown else by_session.get(above, above)
            parents.setdefault(above, "")
        parents[agent.agent_id] = above
    return parents


def _above(agent: Agent, at_work: set[str], parents: Mapping[str, str]) -> str:
    """The nearest above it that is at work, else its session; empty if a client started it."""
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
    """A worker is told with the name of the agent whose it is."""
    is_worker = process.kind == "worker"
    command = names.get(process.session_id, "") if is_worker else head_of(process.command)
    words = (command or head_of(process.command)) + (" (stopping)" if process.stopping else "")
    age, memory = age_text(process.age_s), size_text(process.rss_bytes)
    return str(process.pid), process.kind, age, memory, words
