"""Names of sessions, runs and agents as people type them: an id, a prefix of it, or a title.

`NamedTargets` has all of them, for `culm stop` and `culm steer`, which work on any.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from culm.cli.render.text import head_of
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest, NotFound, SessionNotFound
from culm.ids import SessionId
from culm.wire.agents import Agent
from culm.wire.codec import printable
from culm.wire.runs import Run

Kind = Literal["session", "run", "agent"]

SHORT_CHARS = 8  # The length in tables; more where that is ambiguous.
NEAREST_MAX = 5
BEGUN = ("active", "waiting")  # States of runs that can be steered.


async def find_session(workspace: RemoteWorkspace, text: str) -> SessionId:
    """Find a session by its id (also an agent's session), a prefix of it, or its title."""
    try:
        if text:
            return (await workspace.session(SessionId(text))).id
    except RequestRefused as exc:
        if exc.code != SessionNotFound.code:
            raise
    return SessionId(find_named(await all_named(workspace, "session"), text).id)


class NamedItem(NamedTuple):
    """A session, run or agent that can be named."""

    kind: Kind
    id: str
    title: str = ""


async def all_named(workspace: RemoteWorkspace, *kinds: Kind) -> list[NamedItem]:
    """All items of these kinds in a workspace, the latest of each first."""
    found: list[NamedItem] = []
    if "session" in kinds:
        found += [NamedItem("session", one.id, one.title) for one in await workspace.sessions()]
    if "run" in kinds:
        found += [NamedItem("run", one.id, one.prompt) for one in await workspace.runs()]
    if "agent" in kinds:
        agents = await workspace.agents()
        found += [NamedItem("agent", one.agent_id, one.name) for one in reversed(agents)]
    return found


def find_named(known: Sequence[NamedItem], text: str) -> NamedItem:
    """The item with this name; raises `NotFound` or `InvalidRequest` with the nearest."""
    kinds = " or ".join(dict.fromkeys(one.kind for one in known)) or "session"
    for matches in (
        [one for one in known if one.id == text],
        [one for one in known if text and one.id.startswith(text)],
        [one for one in known if text and head_of(one.title).lower() == text.lower()],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            hint = f"which one: {_shown(matches[:NEAREST_MAX], known)}"
            message = f"{printable(text)!r} is ambiguous ({len(matches)} matches)"
            raise InvalidRequest(message, hint=hint)
    near = nearest(known, text)
    hint = f"did you mean {_shown(near, known)}" if near else _list_hint(kinds)
    raise NotFound(f"no {kinds} is named {printable(text)}", hint=hint)


def _list_hint(kinds: str) -> str:
    if "run" in kinds:
        return "`culm ps` and `culm sessions` list them"
    return "`culm agents` lists them" if "agent" in kinds else "`culm sessions` lists them"


def nearest(known: Sequence[NamedItem], text: str) -> list[NamedItem]:
    """Items that a mistyped or half-remembered name may mean."""
    wanted = text.lower()
    if not wanted:
        return []

    def likeness(one: NamedItem) -> float:
        title = head_of(one.title).lower()
        if wanted in title:
            return 1.0
        ids = difflib.SequenceMatcher(None, wanted, one.id[: len(wanted)].lower()).ratio()
        titles = difflib.SequenceMatcher(None, wanted, title[: len(wanted)]).ratio()
        return max(ids, titles)

    ranked = sorted(known, key=likeness, reverse=True)
    return [one for one in ranked if likeness(one) >= 0.6][:NEAREST_MAX]


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """A prefix of each id, long enough to be unique among them."""
    short: dict[str, str] = {}
    ordered = sorted(set(ids))
    for index, one in enumerate(ordered):
        around = (*ordered[max(index - 1, 0) : index], *ordered[index + 1 : index + 2])
        shared = max((_shared(one, other) for other in around), default=0)
        short[one] = one[: max(SHORT_CHARS, shared + 1)]
    return short


def _shared(one: str, other: str) -> int:
    """The length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _shown(some: Sequence[NamedItem], known: Sequence[NamedItem]) -> str:
    short = short_ids([one.id for one in known])
    items = (f"{one.kind} {short[one.id]} ({head_of(one.title) or '-'})" for one in some)
    return printable(", ".join(items))


# --- targets of stop and steer


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
