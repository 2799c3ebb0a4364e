"""Configuration: reading it without secrets, and changing it."""

from culm.config.documents import remove_key, select_model, set_key, step_of
from culm.errors import InvalidRequest, NotFound
from culm.server.api import WORKSPACE, Route
from culm.wire import config as wire
from culm.wire.codec import fit
from culm.workspace.workspace import LiveWorkspace


async def get_config(workspace: LiveWorkspace) -> wire.Config:
    """Show the configuration without keys, tokens and environment variables."""
    return workspace.configuration.shown


async def list_providers(workspace: LiveWorkspace) -> list[wire.Provider]:
    """List the configured providers in the form of a catalog."""
    providers = workspace.configuration.shown.providers.items()
    return [
        wire.Provider(i, p.name or i, p.type, p.base_url, models=p.models) for i, p in providers
    ]


async def set_config(workspace: LiveWorkspace, body: wire.SetConfig) -> None:
    """Set one key of the configuration of the user or the workspace."""
    await workspace.change_config(body.scope, set_key(body.key, body.value))


async def remove_config(workspace: LiveWorkspace, body: wire.RemoveConfig) -> None:
    """Remove one key. A missing key is not an error."""
    await workspace.change_config(body.scope, remove_key(body.key))


async def set_model(workspace: LiveWorkspace, body: wire.SetModel) -> None:
    """Select the large or the small model, and add it to the recent models."""
    await workspace.change_config(body.scope, select_model(body.model_type, body.model))


async def set_compact(workspace: LiveWorkspace, body: wire.SetCompact) -> None:
    """Turn the compact display on or off."""
    await workspace.change_config(body.scope, set_key("options.tui.compact_mode", body.enabled))


async def set_provider_key(workspace: LiveWorkspace, body: wire.SetProviderKey) -> None:
    """Store a provider's key or token. No route ever returns it."""
    if not body.provider_id:
        raise InvalidRequest("provider_id is required")
    provider = f"providers.{step_of(body.provider_id)}"
    match body.kind:
        case "string":
            if not isinstance(body.api_key, str):
                raise InvalidRequest("decode api key string: api_key is not a string")
            edit = set_key(f"{provider}.api_key", body.api_key)
        case "oauth":
            fit(body.api_key, wire.OAuthToken)
            edit = set_key(f"{provider}.oauth", body.api_key)
        case _:
            raise InvalidRequest(f'unsupported api key kind "{body.kind}"')
    await workspace.change_config(body.scope, edit)


async def import_copilot(workspace: LiveWorkspace) -> wire.ImportedToken:
    """Import a token of another program. This server reads no files of other programs."""
    return wire.ImportedToken()


async def refresh_oauth(workspace: LiveWorkspace, body: wire.RefreshOAuth) -> None:
    """Refresh a provider's token. No provider in this version has a token that can be refreshed."""
    raise NotFound(f"no token to refresh for provider {body.provider_id!r}")


ROUTES = [
    Route("GET", f"{WORKSPACE}/config", get_config),
    Route("GET", f"{WORKSPACE}/providers", list_providers),
    Route("POST", f"{WORKSPACE}/config/set", set_config),
    Route("POST", f"{WORKSPACE}/config/remove", remove_config),
    Route("POST", f"{WORKSPACE}/config/model", set_model),
    Route("POST", f"{WORKSPACE}/config/compact", set_compact),
    Route("POST", f"{WORKSPACE}/config/provider-key", set_provider_key),
    Route("POST", f"{WORKSPACE}/config/import-copilot", import_copilot),
    Route("POST", f"{WORKSPACE}/config/refresh-oauth", refresh_oauth),
]
