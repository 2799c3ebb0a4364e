"""Requests about the configuration of a workspace and about its project.

Changes are written to one of two documents: the user's or the workspace's.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

from culm.wire.codec import Json
from culm.wire.config import (
    Config,
    ImportedToken,
    ModelType,
    OAuthToken,
    Provider,
    RefreshOAuth,
    RemoveConfig,
    SelectedModel,
    SetCompact,
    SetConfig,
    SetModel,
    SetProviderKey,
)
from culm.wire.workspaces import InitPrompt, NeedsInit

if TYPE_CHECKING:
    from culm.client.workspace import RemoteWorkspace

Scope = Literal["user", "workspace"]
_SCOPES: dict[Scope, int] = {"user": 0, "workspace": 1}  # The numbers of the wire format.


class RemoteConfig:
    """The configuration of a workspace, as `RemoteWorkspace.config`."""

    def __init__(self, workspace: "RemoteWorkspace") -> None:
        self._client = workspace.client
        self._path = workspace.path

    async def show(self) -> Config:
        """The effective configuration of all layers, without keys, tokens or environment."""
        return await self._client.ask("GET", self._path("/config"), Config)

    async def providers(self) -> list[Provider]:
        """The configured providers, in the form of a catalog."""
        return await self._client.ask("GET", self._path("/providers"), list[Provider])

    async def set(self, key: str, value: Json, *, scope: Scope = "workspace") -> None:
        """Set one key: a dotted path, in which a dot inside a name is written `\\.`."""
        await self._change("set", SetConfig(_SCOPES[scope], key, value))

    async def remove(self, key: str, *, scope: Scope = "workspace") -> None:
        """Remove one key; a missing key is not an error."""
        await self._change("remove", RemoveConfig(_SCOPES[scope], key))

    async def select_model(
        self, model: SelectedModel, kind: ModelType = "large", *, scope: Scope = "workspace"
    ) -> None:
        """Choose a model for all future runs; it is added to the recent models."""
        await self._change("model", SetModel(_SCOPES[scope], kind, model))

    async def set_compact(self, *, on: bool, scope: Scope = "workspace") -> None:
        """Turn the compact display on or off."""
        await self._change("compact", SetCompact(_SCOPES[scope], on))

    async def set_provider_key(
        self, provider_id: str, key: str | OAuthToken, *, scope: Scope = "workspace"
    ) -> None:
        """Store a provider's key or token. No request returns it."""
        kind = "string" if isinstance(key, str) else "oauth"
        body = SetProviderKey(_SCOPES[scope], provider_id, kind, msgspec.to_builtins(key))
        await self._change("provider-key", body)

    async def import_copilot(self) -> ImportedToken:
        """Import the token of another program, if the server supports it."""
        return await self._client.ask("POST", self._path("/config/import-copilot"), ImportedToken)

    async def refresh_oauth(self, provider_id: str, *, scope: Scope = "workspace") -> None:
        """Renew a provider's token; refused (404) if it has no token that can be renewed."""
        await self._change("refresh-oauth", RefreshOAuth(_SCOPES[scope], provider_id))

    async def _change(self, action: str, body: msgspec.Struct) -> None:
        await self._client.request("POST", self._path(f"/config/{action}"), body)


class RemoteProject:
    """The project of a workspace, and its introduction for agents."""

    def __init__(self, workspace: "RemoteWorkspace") -> None:
        self._client = workspace.client
        self._path = workspace.path

    async def needs_init(self) -> bool:
        """Return True if the user should be offered to generate an introduction."""
        found = await self._client.ask("GET", self._path("/project/needs-init"), NeedsInit)
        return found.needs_init

    async def init(self) -> None:
        """Record that the offer was accepted or declined."""
        await self._client.request("POST", self._path("/project/init"))

    async def init_prompt(self) -> str:
        """The prompt with which an agent writes the introduction."""
        return (
            await self._client.ask("GET", self._path("/project/init-prompt"), InitPrompt)
        ).prompt
