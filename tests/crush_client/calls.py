"""A client's calls on its workspace whose failure is not fatal: logged, shown, or a default.

Owns the snapshot of the workspace and the log of failures that are not shown. The order of calls
is in `client.py`, `polling.py` and `sessions.py`.
"""

import asyncio
from collections.abc import Mapping

from tests.crush_client.api import Api, CallError
from tests.crush_client.golang import Record, record
from tests.crush_client.screen import Screen
from tests.crush_client.types import check_config, is_configured


class Calls:
    def __init__(self, api: Api, screen: Screen) -> None:
        self.api = api
        self.screen = screen
        self.log: list[str] = []
        # The UI loop is sequential: no event is applied while it waits for a response.
        self.ui = asyncio.Lock()
        self.workspace: Record | None = None  # The snapshot to register again from.

    @property
    def config(self) -> Record:
        """Raises `Panic` where the client would."""
        assert self.workspace is not None, "attached"
        return check_config(self.workspace.find_record("config"))

    def adopt(self, workspace: Record) -> None:
        self.workspace = workspace
        self.api.workspace_id = workspace.text("id")
        check_config(workspace.find_record("config"))

    async def attempt(
        self,
        number: int,
        default: object = None,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        **ids: str,
    ) -> object:
        """Call a route; a failure is logged and gives the default."""
        try:
            return await self.api.call(number, body, query=query, **ids)
        except CallError as exc:
            self.log.append(f"route {number}: {exc}")
            return default

    async def flag(self, number: int, name: str, **ids: str) -> bool:
        """Call a route and return a field of the response; a failure is logged and false."""
        return flag_of(await self.attempt(number, None, None, query=None, **ids), name)

    async def call_or_toast(
        self, number: int, body: Mapping[str, object] | None, **ids: str
    ) -> bool:
        """Call a route and return True if it worked; a failure is a toast."""
        try:
            await self.api.call(number, body, query=None, **ids)
        except CallError as exc:
            self.screen.toasts.append(str(exc))
            return False
        return True

    async def select(self, session_id: str) -> None:
        """Send which session is open; a failure is logged at debug level."""
        try:
            await self.api.select(session_id)
        except CallError as exc:
            self.log.append(f"route 10: {exc}")

    async def init_agent(self) -> None:
        if is_configured(self.config):
            await self.attempt(37, None, {"interactive": True})


def flag_of(found: object, name: str) -> bool:
    return found is not None and record(found).flag(name)
