"""The configuration of one workspace: its layers, its public view, and its changes.

Clients change its documents (`config/documents.py`); people edit its files (`config/sources.py`),
which are checked every second. `layers_of` defines the precedence.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from culm.clock import Clock, pause
from culm.config.checking import Document
from culm.config.documents import SCOPES, DocumentFile, Edit, shown_config
from culm.config.layers import ToolConfig, provider_ids, read_tooling
from culm.config.references import run_command
from culm.config.sources import ConfigSources, LoadedConfig
from culm.errors import InvalidRequest, Rejected
from culm.model.choice import (
    USER_LAYER,
    WORKSPACE_LAYER,
    ModelConfig,
    check_models,
    layers_of,
    merged_config,
)
from culm.model.local_servers import NOTHING, FoundProviders
from culm.store.store import Store
from culm.wire.codec import encode
from culm.wire.config import Config
from culm.wire.events import ConfigChanged
from culm.workspace.roots import WorkspaceInfo

log = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0

FindProviders = Callable[[Mapping[str, str]], Awaitable[FoundProviders]]


class ConfigOrigins(Struct, frozen=True):
    """The sources of a workspace's configuration."""

    sources: ConfigSources
    documents: tuple[DocumentFile, DocumentFile]  # By scope: the user's, then the workspace's.
    find_providers: FindProviders


class WorkspaceConfig:
    """The configuration of one workspace, opened and closed with it."""

    def __init__(
        self,
        about: WorkspaceInfo,
        origins: ConfigOrigins,
        store: Store,
        *,
        base_env: Mapping[str, str],
        env: Mapping[str, str],
    ) -> None:
        self._about = about
        self._origins = origins
        self._store = store
        self._base_env = base_env  # The server's own environment.
        self._env = {**base_env, **env}  # A client's environment takes precedence.
        self._found = NOTHING
        self._loaded = LoadedConfig()
        self._whole: Document | None = None  # Cached until a layer changes.
        self._shown: Config | None = None
        self._models: ModelConfig | None = None
        self._tooling: ToolConfig | None = None
        self._unpublished = False
        self._is_loaded = False
        self._loading = asyncio.Lock()
        for document in origins.documents:
            document.listen(self.publish_changed)

    def close(self) -> None:
        for document in self._origins.documents:
            document.unlisten(self.publish_changed)

    # --- reading

    @property
    def shown(self) -> Config:
        """The configuration that clients see, without keys and tokens."""
        if self._shown is None:
            self._shown = self._show(self.document)
        return self._shown

    @property
    def document(self) -> Document:
        """The merged configuration with keys. A key never moves to an address of a later layer."""
        if self._whole is None:
            self._whole = merged_config(self._layers(), self._env)
        return self._whole

    @property
    def models(self) -> ModelConfig:
        """The selection of models and their providers."""
        if self._models is None:
            self._models = ModelConfig(self.document, self._env)
        return self._models

    @property
    def tooling(self) -> ToolConfig:
        """The trusted configuration of tools and permissions."""
        if self._tooling is None:
            self._tooling = read_tooling(self.document)
        return self._tooling

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of tools."""
        return {**self._env, **self.tooling.env}

    @property
    def notices(self) -> Sequence[str]:
        """Notices for a person, as sentences."""
        return self._loaded.notices

    def _layers(self) -> list[Document]:
        user, own = (document.value for document in self._origins.documents)
        return layers_of(self._found, self._loaded, user, own)

    def _show(self, document: Document) -> Config:
        return shown_config(document, data_directory=str(self._about.root), debug=self._about.debug)

    # --- changing

    async def change(self, scope: int, edit: Edit) -> None:
        """Change the document of a scope; raises `InvalidRequest` if the result is invalid."""
        if scope not in SCOPES:
            raise InvalidRequest("scope must be 0 (the user's) or 1 (the workspace's)")

        def check(new: Document) -> None:
            layers = self._layers()
            layers[WORKSPACE_LAYER if scope else USER_LAYER] = new
            whole = merged_config(layers, self._env)
            self._show(whole)
            read_tooling(whole)
            check_models(whole)

        await asyncio.shield(self._origins.documents[scope].change(edit, check))

    async def use_env(self, env: Mapping[str, str]) -> None:
        """Use a client's environment; its effects apply when this returns.

        It is for tools and keys: kept in memory only, never returned, stored or logged.
        """
        env = {**self._base_env, **env}
        if env != self._env:
            self._env = env
            self._models = None  # References may resolve to other values now.
            await self.load()

    async def run_command(self, command: str) -> str:
        """Run a command in place of a value; return its output. Raises `UnresolvedReference`.

        It does not run in the workspace: its files are untrusted, and many programs execute files
        from the current directory.
        """
        env = {**self._env, "CULM_WORKSPACE": str(self._about.path)}
        return await run_command(command, env, Path(env.get("HOME") or "/"))

    async def load(self) -> None:
        """Reload everything, and publish if it differs."""
        async with self._loading:
            found = await self._origins.find_providers(self._env)
            users = provider_ids(self._origins.documents[0].value)
            loaded = await self._origins.sources.load({*found.providers, *users})
            loaded = self._showable(found, loaded)
        for notice in loaded.notices:
            if notice not in self._loaded.notices:
                log.warning("%s", notice)
        before = self.document if self._is_loaded else None
        self._found, self._loaded = found, loaded
        self._forget_document()
        if before is not None and self.document != before:
            self.publish_changed()
        self._is_loaded = True

    def _showable(self, found: FoundProviders, loaded: LoadedConfig) -> LoadedConfig:
        """Return the loaded configuration without its invalid parts.

        If clients could not be shown the result, drop the project's part, and then use the previous
        user part.
        """
        user, own = (document.value for document in self._origins.documents)
        notices = loaded.notices
        for candidate in (loaded, LoadedConfig(loaded.user), LoadedConfig(self._loaded.user)):
            try:
                whole = merged_config(layers_of(found, candidate, user, own), self._env)
                self._show(whole)
                read_tooling(whole)
            except Rejected as exc:
                notices = (
                    *loaded.notices,
                    f"the configuration files are ignored in part: {exc.message}",
                )
            else:
                return replace(candidate, notices=notices)
        return LoadedConfig(notices=notices)

    async def watch(self, clock: Clock) -> None:
        """Reload when files change; runs until its task is cancelled."""
        sources = self._origins.sources
        while sources.can_change:
            await pause(clock, WATCH_EVERY_S)
            try:
                if await sources.changed():
                    await self.load()
            except Exception:  # boundary: the content of a file must not end the workspace
                log.exception("the configuration of %s cannot be read", self._about.path)

    def _forget_document(self) -> None:
        self._whole = self._shown = self._models = self._tooling = None

    def publish_changed(self) -> None:
        """Publish the change durably, later if the store cannot write now."""
        self._forget_document()
        self._unpublished = False
        payload = encode(ConfigChanged(self._about.id))

        def failed(_: Exception) -> None:
            self._unpublished = True

        self._store.append("config_changed", "updated", payload=payload, on_fail=failed)

    def on_healthy_store(self) -> None:
        if self._unpublished:
            self.publish_changed()
