"""The configuration of one workspace: three layers, what is shown of them, and that they changed.

The lowest is what the user wrote, over it lie the user's document and the workspace's, which
clients change. How a document is edited and kept is `config.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from culm.config.documents import SCOPES, Document, DocumentFile, Edit, merged, shown_config
from culm.errors import InvalidRequest
from culm.ids import WorkspaceId
from culm.model.choice import check_models
from culm.store.store import Store
from culm.wire.codec import Json, encode
from culm.wire.config import Config
from culm.wire.events import ConfigChanged

_SECRETS = ("api_key", "oauth", "extra_headers")


class Configuration:
    """Made with the workspace, and closed with it."""

    def __init__(
        self,
        workspace_id: WorkspaceId,
        written: Document,
        documents: tuple[DocumentFile, DocumentFile],
        store: Store,
        *,
        data_directory: str,
        debug: bool,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._workspace_id = workspace_id
        self._written = written
        self._documents = documents  # By scope: the user's, this workspace's.
        self._store = store
        self._data_directory = data_directory
        self._debug = debug
        self._shown: Config | None = None  # Until a document changes.
        self._untold = False
        for document in documents:
            document.listen(self.tell_changed)

    def close(self) -> None:
        for document in self._documents:
            document.unlisten(self.tell_changed)

    @property
    def shown(self) -> Config:
        """What clients are shown: no key, no token."""
        if self._shown is None:
            self._shown = self._show(self._layers())
        return self._shown

    @property
    def document(self) -> Document:
        """All of it, keys included; but no key goes to an address that came after it."""
        return without_strayed_keys(self._layers(), merged(self._layers()))

    def _layers(self) -> list[Document]:
        return [self._written, *(document.value for document in self._documents)]

    def _show(self, layers: list[Document]) -> Config:
        return shown_config(layers, data_directory=self._data_directory, debug=self._debug)

    async def change(self, scope: int, edit: Edit) -> None:
        """Change the document of a scope; raises `InvalidRequest` if no client could read it."""
        if scope not in SCOPES:
            raise InvalidRequest("scope must be 0 (the user's) or 1 (the workspace's)")

        def check(new: Document) -> None:
            layers = self._layers()
            layers[1 + scope] = new
            self._show(layers)
            check_models(without_strayed_keys(layers, merged(layers)))

        await asyncio.shield(self._documents[scope].change(edit, check))

    def tell_changed(self) -> None:
        """Tell it durably; if that cannot be now, when the store is well again."""
        self._shown = None
        self._untold = False
        self.on_change()
        payload = encode(ConfigChanged(self._workspace_id))

        def failed(_: Exception) -> None:
            self._untold = True

        self._store.append("config_changed", "updated", payload=payload, on_fail=failed)

    def on_healthy_store(self) -> None:
        if self._untold:
            self.tell_changed()


def without_strayed_keys(layers: Sequence[Document], whole: Document) -> Document:
    """The merged document, without what a provider's owner meant for another address.

    Whoever may set a `base_url` could otherwise have a key sent there that no route shows.
    """
    return {
        key: _kept(layers, cast("Document", value))
        if key.lower() == "providers" and isinstance(value, dict)
        else value
        for key, value in whole.items()
    }


def _kept(layers: Sequence[Document], providers: Document) -> Document:
    kept: Document = {}
    for name, provider in providers.items():
        address = _last_layer(layers, name, "base_url")
        secrets = [s for s in _SECRETS if _last_layer(layers, name, s) < address]
        if isinstance(provider, dict) and secrets:
            fields = cast("Document", provider)
            provider = {k: value for k, value in fields.items() if k.lower() not in secrets}
        kept[name] = provider
    return kept


def _last_layer(layers: Sequence[Document], provider: str, field: str) -> int:
    """The highest layer that says something about a field of a provider, or -1."""
    found = -1
    for n, layer in enumerate(layers):
        for providers in _spelled(layer, "providers"):
            known = cast("Document", providers) if isinstance(providers, dict) else {}
            fields = known.get(provider)
            if isinstance(fields, dict) and any(_spelled(cast("Document", fields), field)):
                found = n
    return found


def _spelled(document: Document, name: str) -> list[Json]:
    """All values under a name, which is read whatever its case."""
    return [value for key, value in document.items() if key.lower() == name and value is not None]
