"""Selection of models from a workspace's configuration, and access to their providers.

The decisions are pure functions of one document, which is merged from its layers at the end of
this module. Keys do not leave this package.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import msgspec
from msgspec import Struct, field

from culm.config.checking import Document
from culm.config.layers import provider_ids, without_strayed_keys
from culm.config.references import (
    Run,
    UnresolvedReference,
    Variables,
    resolve,
    why_unresolved,
)
from culm.config.schema import ProviderFile
from culm.config.sources import LoadedConfig
from culm.errors import InvalidRequest, ModelFailed
from culm.model.base import LanguageModel, ModelSetup, ProviderAccess
from culm.model.catalog import (
    ProviderType,
    dialect_types,
    find_dialect,
    find_model,
    find_provider,
    vendor_of,
)
from culm.model.local_servers import LOCAL_SERVERS, FoundProviders
from culm.wire.codec import Json, fit
from culm.wire.config import Model as ModelInfo
from culm.wire.config import ModelType, SelectedModel

if TYPE_CHECKING:
    import aiohttp  # See `base.py`.

log = logging.getLogger(__name__)

# In `layers_of`: the documents that clients change.
USER_LAYER, WORKSPACE_LAYER = 2, -1
COMMANDS_MAX = 8  # Concurrent commands that print keys, per workspace.


class ChosenModel(NamedTuple):
    """A model of a provider. Its access may contain unresolved references."""

    provider_id: str
    settings: SelectedModel
    info: ModelInfo
    access: ProviderAccess
    flat_rate: bool
    system_prefix: str = ""


class _Options(Struct):
    disable_auto_summarize: bool = False


class _Document(Struct):
    """The part of a document that concerns models. It holds keys, so it is never shown."""

    models: dict[str, SelectedModel] = field(default_factory=dict[str, SelectedModel])
    fallbacks: dict[str, list[SelectedModel]] = field(
        default_factory=dict[str, list[SelectedModel]]
    )
    providers: dict[str, ProviderFile] = field(default_factory=dict[str, ProviderFile])
    options: _Options = field(default_factory=_Options)
    env: dict[str, str] = field(default_factory=dict[str, str])


def check_models(document: Document) -> _Document:
    """The parts of a document that concern models; raises `InvalidRequest`."""
    return fit(cast("Json", dict(document)), _Document)


_NOBODY = SelectedModel()


class ModelConfig:
    """The models of one configuration, and the choices among them. Does not change."""

    def __init__(self, document: Document, env: Mapping[str, str]) -> None:
        try:
            parsed = check_models(document)
        except InvalidRequest as exc:
            # Documents from clients and users were checked before, so this one is not theirs.
            log.error("no models: %s", exc.message)
            parsed = _Document()
        self.providers = parsed.providers
        self.fallbacks = parsed.fallbacks
        self.compacts = not parsed.options.disable_auto_summarize
        self.variables = Variables(parsed.env, env)
        self._models = parsed.models
        # Clients ask for these again and again.
        self._chosen: dict[ModelType, SelectedModel | None] = {}
        self._infos: dict[tuple[str, str], ModelInfo] = {}

    def choose(self, kind: ModelType) -> SelectedModel | None:
        """The first model named for this type that can be used.

        If none can be used, it is the selected model, whose use then fails with the reason.
        """
        if kind not in self._chosen:
            named = self._named(kind)
            self._chosen[kind] = next(iter(self._usable(named) or named), None)
        return self._chosen[kind]

    def after(self, provider_id: str, model_id: str) -> Sequence[SelectedModel]:
        """The fallbacks after this large model, in order."""
        named = self._named("large")
        try:
            here = [(one.provider, one.model) for one in named].index((provider_id, model_id))
        except ValueError:
            return ()  # The model was requested explicitly, so there is no fallback.
        return self._usable(named[here + 1 :])

    def names(self) -> list[str]:
        """All configured models that can be used, as `provider/model`."""
        usable = self._usable([*self._named("large"), *self._named("small")])
        return list(dict.fromkeys(f"{one.provider}/{one.model}" for one in usable))

    def selected(self, kind: ModelType) -> SelectedModel:
        """The selected model, even if it cannot be used."""
        return self._models.get(kind, _NOBODY)

    def small_of(self, provider_id: str) -> SelectedModel:
        """The small model to use beside a large model of this provider."""
        small = self.choose("small")
        if small is not None and small.provider == provider_id:
            return small
        known = find_provider(provider_id)
        if known is not None and provider_id in self.providers:
            return SelectedModel(model=known.small, provider=provider_id)
        return self.selected("large")

    def why_not(self, provider_id: str, model_id: str) -> str:
        """Why this model cannot be used now; empty if it can."""
        provider = self.providers.get(provider_id)
        if provider is None:
            return _why_unknown(provider_id)
        if not model_id:
            return f"no model of provider {provider_id!r} is selected"
        return why_unusable(provider_id, provider, self.variables)

    def why_unlisted(self, provider_id: str, model_id: str) -> str:
        """Why a model is unknown: its provider has a list of models without it; empty if known."""
        provider = self.providers.get(provider_id, ProviderFile())
        listed = [model.id for model in provider.models]
        named = f"{provider_id}/{model_id}" in self.names()
        if not listed or model_id in listed or named:
            return ""
        return f"provider {provider_id!r} has no such model, but {', '.join(listed[:20])}"

    def info(self, named: SelectedModel) -> ModelInfo:
        """The facts about a model, even if it cannot be used."""
        key = named.provider, named.model
        if key not in self._infos:
            provider = self.providers.get(named.provider, ProviderFile())
            vendor = vendor_of(named.provider, provider.base_url)
            self._infos[key] = _info(provider, vendor, named.model)
        return self._infos[key]

    def get(self, provider_id: str, model_id: str) -> ChosenModel:
        """A model with its settings; raises `ModelFailed` if it cannot be used."""
        if reason := self.why_not(provider_id, model_id):
            raise ModelFailed(
                "Model not available", reason, hint="culm models lists the usable models"
            )
        settings = SelectedModel(model=model_id, provider=provider_id)
        for selected in (*self._named("large"), *self._named("small")):
            if (selected.provider, selected.model) == (provider_id, model_id):
                settings = selected
                break
        return chosen_of(provider_id, self.providers[provider_id], settings)

    def _named(self, kind: ModelType) -> list[SelectedModel]:
        """The selected model and its fallbacks; for small work, followed by the large ones."""
        named: list[SelectedModel] = []
        for role in dict.fromkeys((kind, "large")):
            if self._models.get(role, _NOBODY) != _NOBODY:
                named.append(self._models[role])
            named += self.fallbacks.get(role, [])
        return named

    def _usable(self, named: Sequence[SelectedModel]) -> list[SelectedModel]:
        return [one for one in named if not self.why_not(one.provider, one.model)]


class ModelConfigSource(Protocol):
    """The owner of a configuration that can change."""

    @property
    def models(self) -> ModelConfig: ...


MakeModel = Callable[[ChosenModel], LanguageModel]


class Models:
    """The models of one workspace, according to its current configuration."""

    def __init__(self, source: ModelConfigSource, make: MakeModel, run: Run) -> None:
        self._source = source
        self._make = make
        self._run = run  # For references that are commands.
        self._commands = asyncio.Semaphore(COMMANDS_MAX)

    @property
    def current(self) -> ModelConfig:
        """The configuration of this moment; read it once for each decision."""
        return self._source.models

    async def open(self, chosen: ChosenModel) -> LanguageModel:
        """An adapter for the model; raises `ModelFailed`."""
        return self._make(await self.resolve(chosen))

    async def resolve(self, chosen: ChosenModel) -> ChosenModel:
        """The model with all references in its access resolved; raises `ModelFailed`."""
        return await resolved(chosen, self.current.variables, self._run_command)

    async def _run_command(self, command: str) -> str:
        async with self._commands:
            return await self._run(command)


async def resolved(chosen: ChosenModel, variables: Variables, run: Run) -> ChosenModel:
    """The model with all references in its access resolved; raises `ModelFailed`."""
    access, key = chosen.access, f"providers.{chosen.provider_id}"

    async def read(name: str, text: str) -> str:
        try:
            return await resolve(text, variables, run)
        except UnresolvedReference as exc:
            raise ModelFailed(
                "Unresolved reference", f"{key}.{name}: {exc}", hint=exc.hint
            ) from None

    access = msgspec.structs.replace(
        access,
        base_url=await read("base_url", access.base_url),
        api_key=await read("api_key", access.api_key),
        headers={k: await read("extra_headers", v) for k, v in access.headers.items()},
    )
    return chosen._replace(access=access)


# --- providers


def _type_of(provider_id: str, provider: ProviderFile) -> str:
    known = find_provider(provider_id)
    return provider.type or (known.type if known is not None else "openai-compat")


def _url_of(provider_id: str, provider: ProviderFile, dialect: ProviderType) -> str:
    if provider.base_url:
        return provider.base_url
    known = find_provider(provider_id)
    if known is not None and provider.type in ("", known.type):
        return known.base_url
    local = [server for server in LOCAL_SERVERS if server.id == provider_id]
    return f"http://127.0.0.1:{local[0].port}/v1" if local else dialect.base_url


def _why_unknown(provider_id: str) -> str:
    known = find_provider(provider_id)
    if known is not None:
        return f"{known.name} is not configured: set {known.key_env}"
    return f"provider {provider_id!r} is not configured"


# Headers that replace a key.
_CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})


def why_unreachable(provider_id: str, provider: ProviderFile) -> str:
    """Why a provider cannot be used, regardless of its references; empty if it can."""
    if provider.disable:
        return f"provider {provider_id!r} is disabled"
    type_ = _type_of(provider_id, provider)
    dialect = find_dialect(type_)
    if dialect is None:
        known = ", ".join(dialect_types())
        return f"unknown provider type {type_!r}; known types: {known}"
    url = _url_of(provider_id, provider, dialect)
    if dialect.needs_url and not url:
        return f"provider {provider_id!r} has no base_url"
    credentials = {name.lower() for name in provider.extra_headers} & _CREDENTIALS
    if dialect.needs_key and not (provider.api_key or credentials):
        known = find_provider(provider_id)
        how = f": set {known.key_env}, or" if known is not None else ":"
        return f"provider {provider_id!r} has no key{how} write providers.{provider_id}.api_key"
    return ""


def why_unusable(provider_id: str, provider: ProviderFile, variables: Variables) -> str:
    """Why a provider cannot be used, including its references; empty if it can."""
    if reason := why_unreachable(provider_id, provider):
        return reason
    access = _access(provider_id, provider)
    texts = {"api_key": provider.api_key, "base_url": access.base_url}
    texts |= {f"extra_headers.{name}": text for name, text in provider.extra_headers.items()}
    for name, text in texts.items():
        if reason := why_unresolved(text, variables):
            return f"providers.{provider_id}.{name}: {reason}"
    return ""


def _access(provider_id: str, provider: ProviderFile) -> ProviderAccess:
    type_ = _type_of(provider_id, provider)
    dialect = find_dialect(type_)
    assert dialect is not None, "the provider was checked before"
    url = _url_of(provider_id, provider, dialect)
    return ProviderAccess(
        type=type_,
        vendor=vendor_of(provider_id, url),
        base_url=url,
        api_key=provider.api_key,
        headers=provider.extra_headers,
        body={**provider.provider_options, **provider.extra_body},
    )


def chosen_of(provider_id: str, provider: ProviderFile, settings: SelectedModel) -> ChosenModel:
    """A model of a usable provider."""
    access = _access(provider_id, provider)
    info = _info(provider, access.vendor, settings.model)
    prefix = provider.system_prompt_prefix
    return ChosenModel(provider_id, settings, info, access, provider.flat_rate, prefix)


def make_model(
    chosen: ChosenModel, http: "aiohttp.ClientSession", *, first_byte_s: float, stall_s: float
) -> LanguageModel:
    """An adapter for a model whose references are resolved."""
    dialect = find_dialect(chosen.access.type)
    assert dialect is not None, "the provider was checked before"
    return dialect.make(ModelSetup(http, chosen.access, chosen.info, first_byte_s, stall_s))


_UNKNOWN = ModelInfo()


def _info(provider: ProviderFile, vendor: str, model_id: str) -> ModelInfo:
    """The facts about a model; the configuration overrides the catalog."""
    known = find_model(vendor, model_id) or ModelInfo(id=model_id, name=model_id)
    for written in provider.models:
        if written.id == model_id:
            configured = {
                name: value
                for name in ModelInfo.__struct_fields__
                if (value := getattr(written, name)) != getattr(_UNKNOWN, name)
            }
            return msgspec.structs.replace(known, **configured)
    return known


# --- the document of a workspace


def layers_of(
    found: FoundProviders, loaded: LoadedConfig, user: Document, workspace: Document
) -> list[Document]:
    """The layers of a workspace's configuration; later ones override earlier ones.

    Discovered providers, the user's file, the user's document, the project's files, the
    workspace's document.
    """
    return [found.document, loaded.user, user, *loaded.project, workspace]


def merged_config(layers: Sequence[Document], env: Mapping[str, str]) -> Document:
    """The merged document, including keys. It selects a large model if there is any.

    A key is never combined with an address from a later layer.
    """
    # The discovered providers and the user's file belong to the same person.
    whole = without_strayed_keys(layers, own=USER_LAYER)
    return with_defaults(whole, preferred(layers), env)


def preferred(layers: Sequence[Document]) -> list[str]:
    """All providers, the most preferred first: configured ones before discovered ones."""
    found, *configured = (provider_ids(layer) for layer in layers)
    return list(dict.fromkeys([*chain.from_iterable(configured), *found]))


def with_defaults(document: Document, order: Sequence[str], env: Mapping[str, str]) -> Document:
    """The document, with a large and a small model selected if it selects none.

    They are the default models of the first usable provider in `order`.
    """
    config = check_models(document)
    if config.models.get("large", SelectedModel()) != SelectedModel():
        return dict(document)
    variables = Variables(config.env, env)
    for provider_id in order:
        provider = config.providers.get(provider_id)
        if provider is None or why_unusable(provider_id, provider, variables):
            continue
        large, small = _default_models(provider_id, provider)
        if large:
            chosen = {
                "large": {"model": large, "provider": provider_id},
                "small": {"model": small, "provider": provider_id},
            }
            models = cast("Document", document.get("models") or {})
            return {**document, "models": {**chosen, **models}}
    return dict(document)


def _default_models(provider_id: str, provider: ProviderFile) -> tuple[str, str]:
    listed = [model.id for model in provider.models if model.id]
    known = find_provider(provider_id)
    if known is not None and (not listed or {known.large, known.small} <= set(listed)):
        return known.large, known.small
    return (listed[0], listed[0]) if listed else ("", "")
