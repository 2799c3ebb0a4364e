"""Everything that a server shows of a workspace, read by its public routes."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.flow.conftest import FlowServer
from tests.flow.drive import open_events, send
from tests.frozen.data.tree import ROOT, WORKSPACE, workspace_id
from tests.frozen.storage import Json, parse_json
from tests.support import WAIT_S

CLIENT = "7a1d8f3c-0000-4000-8000-000000000001"
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_ACTIVE_STATES = ("accepted", "queued", "active", "ending")
_OF_WORKSPACE = (
    "sessions",
    "runs",
    "runs?state=held",
    "permissions/asks?state=all",
    "permissions/grants",
    "questions?state=all",
    "agents",
    "mail",
    "messages/user",
    "config",
    "stats",
)
_OF_SESSION = (
    "sessions/{id}",
    "sessions/{id}/messages",
    "sessions/{id}/history",
    "sessions/{id}/filetracker/files",
    "agent/sessions/{id}/queue",
)


class Reader:
    """One client of a server. `known` is the text of the stored tree."""

    def __init__(self, flow: FlowServer, known: str) -> None:
        self._flow = flow
        self._known = known
        self._new: dict[str, str] = {}  # Newer ids, numbered in order of appearance.
        self.workspace_id = ""

    async def read_all(self, project: Path, sessions: Sequence[str]) -> dict[str, Json]:
        """Return the answers of all routes that show stored data, by path."""
        body = f'{{"path": "{project}", "client_id": "{CLIENT}"}}'.encode()
        opened = await send(self._flow, "POST", "/v1/workspaces", body)
        assert opened.status == 200, opened
        self.workspace_id = str(parse_json(opened.body)["id"])
        assert self.workspace_id == workspace_id(project), "clients could not find it again"
        await self._until_idle()
        found: dict[str, Json] = {}
        for path in _OF_WORKSPACE:
            found[path] = await self._get(path)
        for session in sessions:
            for path in _OF_SESSION:
                target = path.format(id=session)
                found[target] = await self._get(target)
        for agent in _ids(found["agents"], "agent_id"):
            found[f"agents/{agent}"] = await self._get(f"agents/{agent}")
        return found

    async def count_events(self, project: Path) -> dict[str, Json]:
        """Count the events of each type in a replay of the whole log."""
        remote = await (await self._flow.client()).open_workspace(project)
        cursor = (await remote.snapshot()).cursor
        first = f"{cursor.partition('.')[0]}.0"
        async with open_events(self._flow, remote, cursor=first) as stream:
            await stream.until(f"id: {cursor}\n".encode())
            counts = Counter(event.type for event in stream.events() if event.cursor)
        return dict(sorted(counts.items()))

    async def _until_idle(self) -> None:
        """Wait until every active run waits for a person again, as all recorded ones do."""
        async with asyncio.timeout(WAIT_S):
            while any(_field(run, "state") in _ACTIVE_STATES for run in await self._rows("runs")):
                await asyncio.sleep(0.001)

    async def _rows(self, path: str) -> list[Json]:
        rows = await self._get(path)
        assert isinstance(rows, list)
        return rows

    async def _get(self, path: str) -> Json:
        target = f"/v1/workspaces/{self.workspace_id}/{path}"
        answer = await send(self._flow, "GET", target)
        assert answer.status == 200, (path, answer)
        text = answer.body.decode().replace(str(self._flow.folder), ROOT)
        text = text.replace(self.workspace_id, WORKSPACE)
        return parse_json(f'{{"is": {_UUID.sub(self._name, text)}}}')["is"]

    def _name(self, found: re.Match[str]) -> str:
        if found[0] in self._known:
            return found[0]
        return self._new.setdefault(found[0], f"<new {len(self._new) + 1}>")


def _field(row: Json, key: str) -> Json:
    assert isinstance(row, dict)
    return row[key]


def _ids(rows: Json, key: str) -> dict[str, None]:
    """Return the ids in the order of the answer."""
    assert isinstance(rows, list)
    return {str(_field(row, key)): None for row in rows}
