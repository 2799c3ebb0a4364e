"""Names of sessions, runs and agents as people type them: an id, a prefix of it, or a title."""

import difflib
from collections.abc import Sequence
from typing import Literal, NamedTuple

from culm.cli.render.text import head_of
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest, NotFound, SessionNotFound
from culm.ids import SessionId
from culm.wire.codec import printable

Kind = Literal["session", "run", "agent"]

SHORT_CHARS = 8  # The length in tables; more where that is ambiguous.
NEAREST_MAX = 5


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
