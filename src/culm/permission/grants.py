"""Permissions that outlive one call: for a session, or for the whole workspace."""

import asyncio

from msgspec import Struct, field

from culm.errors import GrantNotFound
from culm.ids import GrantId
from culm.store.asks import all_grants, delete_grant
from culm.store.store import Store
from culm.tools.base import ResolvedAction
from culm.wire.asks import Grant


class Grants(Struct, eq=False):
    """The stored grants of one workspace."""

    store: Store
    _grants: dict[GrantId, Grant] = field(default_factory=dict[GrantId, Grant])

    async def load(self) -> None:
        self._grants = {grant.id: grant for grant in await self.store.read(all_grants)}

    def add(self, grant: Grant) -> None:
        """Apply a grant that has been stored."""
        self._grants[grant.id] = grant

    def all(self) -> list[Grant]:
        return list(self._grants.values())

    def covering(self, action: ResolvedAction, session_id: str) -> frozenset[str]:
        """Return the coverage granted for this tool and action in this session."""
        return frozenset(
            item
            for grant in self._grants.values()
            if grant.tool_name == action.tool
            and grant.action == action.name
            and (grant.scope == "workspace" or grant.session_id == session_id)
            for item in grant.grains
        )

    async def revoke(self, grant_id: str) -> None:
        """Revoke a grant; from now on it allows no call. Raises `GrantNotFound`."""
        grant = self._grants.pop(GrantId(grant_id), None)
        if grant is None:
            raise GrantNotFound(grant_id)

        def failed(_: Exception) -> None:
            self._grants[grant.id] = grant

        await asyncio.shield(self.store.write(delete_grant(grant.id), on_fail=failed))

    def forget_session(self, session_id: str) -> None:
        """Drop the grants of a deleted session."""
        self._grants = {
            grant_id: grant
            for grant_id, grant in self._grants.items()
            if grant.scope == "workspace" or grant.session_id != session_id
        }
