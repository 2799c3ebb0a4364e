"""Targets of `culm stop` and `culm steer`: a run, a session or an agent, as people name it."""

from collections.abc import Mapping
from typing import NamedTuple

from culm.cli.names import NamedItem, find_named, short_ids
from culm.cli.render.text import head_of
from culm.client.workspace import RemoteWorkspace
from culm.errors import NotFound
from culm.wire.agents import Agent
from culm.wire.runs import Run

BEGUN = ("active", "waiting")  # States of runs that can be steered.


class NamedTargets(NamedTuple):
    """All that can be named in a workspace, with its state."""

    named: list[NamedItem]
    runs: Mapping[str, Run]  # By id; the latest first.
    agents: Mapping[str, Agent]
    short: Mapping[str, str]

    def get(self, text: str) -> NamedItem:
        """The target with this name; raises `NotFound` or `InvalidRequest` with the nearest.

        Active targets are preferred to ended ones, unless the id is given in full.
        """
        if any(one.id == text for one in self.named):
            return find_named(self.named, text)
        live = [one for one in self.named if self.is_live(one)]
        if live:
            try:
                return find_named(live, text)
            except NotFound:
                pass  # An ended one may be near.
        return find_named(self.named, text)

    def is_live(self, one: NamedItem) -> bool:
        match one.kind:
            case "run":
                return self.runs[one.id].state != "ended"
            case "agent":
                return self.agents[one.id].state != "ended"
            case _:
                return bool(self.live_runs(one.id))

    def live_runs(self, session_id: str) -> list[Run]:
        """The runs of the session itself that have not ended, in the order they were accepted."""
        runs = [run for run in self.runs.values() if run.session_id == session_id]
        return [run for run in reversed(runs) if run.state != "ended"]

    def label(self, one: NamedItem) -> str:
        """A text by which people recognize it."""
        if one.kind == "run":
            return self.label_of_run(self.runs[one.id])
        title = head_of(one.title)
        return f"{one.kind} {self.short[one.id]}" + (f" ({title})" if title else "")

    def label_of_run(self, run: Run) -> str:
        """The label of the run, or of the agent that it belongs to."""
        agent = self.agents.get(run.agent_id)
        if agent is not None:
            return self.label(NamedItem("agent", agent.agent_id, agent.name))
        short = self.short.get(run.id, run.id)
        return f"run {short}" + (f" ({head_of(run.prompt)})" if run.prompt else "")


async def all_targets(workspace: RemoteWorkspace) -> NamedTargets:
    sessions, runs = await workspace.sessions(), await workspace.runs()
    agents = await workspace.agents()
    # The session and the runs of an agent have ids but no titles: the agent has the title.
    theirs: set[str] = {agent.session_id for agent in agents}
    # A session often has its first prompt as its title; the title then means the session.
    titles: dict[str, str] = {one.id: head_of(one.title).lower() for one in sessions}
    like_session = {run.id for run in runs if _has_title(run, titles.get(run.session_id))}
    named = [
        *(
            NamedItem("run", run.id, "" if run.agent_id or run.id in like_session else run.prompt)
            for run in runs
        ),
        *(NamedItem("agent", agent.agent_id, agent.name) for agent in reversed(agents)),
        *(NamedItem("session", one.id, "" if one.id in theirs else one.title) for one in sessions),
    ]
    distinct = {one.id: one for one in reversed(named)}  # A caller may choose any id for a run.
    return NamedTargets(
        [*reversed(distinct.values())],
        {run.id: run for run in runs},
        {agent.agent_id: agent for agent in agents},
        short_ids(list(distinct)),
    )


def _has_title(run: Run, title: str | None) -> bool:
    return head_of(run.prompt).lower() == title
