"""Which models the configuration names, and how each is reached. Keys stay in here.

The decisions are functions of a merged document; who makes a `Model` of a choice is `assemble.py`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from msgspec import Struct, field

from culm.errors import InvalidRequest, ModelFailed
from culm.model.base import Access, Model
from culm.wire.codec import Json, fit
from culm.wire.config import Model as ModelInfo
from culm.wire.config import ModelType, SelectedModel

log = logging.getLogger(__name__)

Document = Mapping[str, Json]

OPENAI_URL = "https://api.openai.com/v1"
# The dialects there are adapters for, each with the address it has by itself.
DIALECTS: Mapping[str, str] = {
    "": "",
    "openai": OPENAI_URL,
    "openai-compat": "",
    "openrouter": "",
    "vercel": "",
}
NEED_KEY = ("openai", "openrouter", "vercel")  # A server of one's own may do without.


class _Provider(Struct):
    type: str = ""
    base_url: str = ""
    api_key: str = ""
    extra_headers: dict[str, str] = field(default_factory=dict[str, str])
    extra_body: dict[str, Json] = field(default_factory=dict[str, Json])
    disable: bool = False
    flat_rate: bool = False
    models: list[ModelInfo] = field(default_factory=list[ModelInfo])


class _Options(Struct):
    disable_auto_summarize: bool = False


class _Config(Struct):
    models: dict[str, SelectedModel] = field(default_factory=dict[str, SelectedModel])
    providers: dict[str, _Provider] = field(default_factory=dict[str, _Provider])
    options: _Options = field(default_factory=_Options)


class Chosen(NamedTuple):
    """A model of a provider, ready to be asked."""

    provider_id: str
    settings: SelectedModel
    info: ModelInfo
    access: Access
    flat_rate: bool


MakeModel = Callable[[Chosen], Model]


class Models:
    """The models of one workspace, by its present configuration."""

    def __init__(self, document: Callable[[], Document], make: MakeModel) -> None:
        self._document = document
        self._make = make
        self._config: _Config | None = None

    def forget(self) -> None:
        """The configuration has changed."""
        self._config = None

    @property
    def compacts(self) -> bool:
        return not self._read().options.disable_auto_summarize

    def choose(self, kind: ModelType) -> Chosen | None:
        """The model selected for large or small work; for small work the large one will do."""
        models = self._read().models
        for name in (kind, "large"):
            selected = models.get(name)
            if selected is not None and not self.why_not(selected.provider, selected.model):
                return self.get(selected.provider, selected.model)
        return None

    def selected(self, kind: ModelType) -> SelectedModel:
        """What the configuration names, whether it can be used or not."""
        return self._read().models.get(kind, SelectedModel())

    def why_not(self, provider_id: str, model_id: str) -> str:
        """Why this model cannot be used now; empty if it can."""
        provider = self._read().providers.get(provider_id)
        if provider is None or provider.disable:
            return f"provider {provider_id!r} is not configured"
        if not model_id:
            return f"no model of provider {provider_id!r} is selected"
        if provider.type not in DIALECTS:
            return f"this version of culm cannot talk to a provider of type {provider.type!r}"
        if not (provider.base_url or DIALECTS[provider.type]):
            return f"provider {provider_id!r} has no base_url"
        if provider.type in NEED_KEY and not (provider.api_key or provider.extra_headers):
            return f"provider {provider_id!r} has no api_key"
        if provider.api_key.startswith("$"):
            return f"the api_key of provider {provider_id!r} is a reference, which is not read yet"
        return ""

    def get(self, provider_id: str, model_id: str) -> Chosen:
        """Raises `ModelFailed` if it cannot be used."""
        if reason := self.why_not(provider_id, model_id):
            raise ModelFailed("Model not available", reason, hint="see docs/models.md")
        config = self._read()
        provider = config.providers[provider_id]
        settings = SelectedModel(model=model_id, provider=provider_id)
        for selected in config.models.values():
            if (selected.provider, selected.model) == (provider_id, model_id):
                settings = selected
                break
        known = {info.id: info for info in provider.models}
        info = known.get(model_id) or ModelInfo(id=model_id, name=model_id)
        access = Access(
            type=provider.type or "openai",
            base_url=provider.base_url or DIALECTS[provider.type],
            api_key=provider.api_key,
            headers=provider.extra_headers,
            body=provider.extra_body,
        )
        return Chosen(provider_id, settings, info, access, provider.flat_rate)

    def open(self, chosen: Chosen) -> Model:
        return self._make(chosen)

    def _read(self) -> _Config:
        if self._config is None:
            try:
                self._config = check_models(self._document())
            except InvalidRequest as exc:
                # Somebody else wrote it: what clients set and users configure was checked.
                log.error("no models: %s", exc.message)
                self._config = _Config()
        return self._config


def check_models(document: Document) -> _Config:
    """What a document says about models; raises `InvalidRequest`."""
    return fit(cast("Json", dict(document)), _Config)
