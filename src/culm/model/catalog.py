"""Provider types and their adapters, and well-known providers and models with their prices.

Owns `catalog.json` and the look-ups in it. A configuration overrides all of it. Models that are
not in the catalog work as well; their price and context window are unknown, which is 0.

A package adds a provider type by an entry point of the group `culm.models`: its name is the type,
and it loads a callable that takes a `ModelSetup` and returns a `LanguageModel` (docs/models.md has
an example).
"""

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pkgutil import get_data
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from culm.errors import ModelFailed
from culm.model.base import LanguageModel, MakeModel, ModelSetup
from culm.wire.config import Model

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

# Local servers: they have quirks, but no prices and no address that identifies them.
LOCAL = frozenset({"ollama", "lmstudio", "llamacpp", "vllm"})
OPENROUTER = "openrouter"
# OpenRouter's names of model owners, where they differ from our provider ids.
_OWNERS = {"google": "gemini", "mistralai": "mistral", "x-ai": "xai"}

# Suffixes that do not make it another model: `:free`, `@region`, a date.
_VARIANT = re.compile(r"[:@].*$")
_DATE = re.compile(r"-(latest|\d{4}-\d\d-\d\d|\d{8})$")
_MONTH = re.compile(r"-\d{4}$")  # Mistral's dates; an id with such a date is only matched exactly.


class KnownProvider(Struct, frozen=True):
    id: str
    name: str
    type: str  # The dialect.
    base_url: str
    hosts: tuple[str, ...]  # Including their subdomains.
    key_env: str  # The environment variable with its key.
    url_env: str  # The environment variable that overrides its address.
    large: str  # The default models.
    small: str
    models: tuple[Model, ...]
    source: str  # The public page with these facts.
    date: str  # The month in which the page was read.


class _Catalog(Struct, frozen=True):
    date: str
    note: str
    providers: tuple[KnownProvider, ...]


def load_catalog() -> None:
    """Read the catalog now: a server that is out of descriptors later could not."""
    _index()


def known_providers() -> Mapping[str, KnownProvider]:
    """All providers by id, the most preferred first. The models are copies."""
    return {
        known.id: replace(known, models=tuple(_copied(model, model.id) for model in known.models))
        for known in _providers().values()
    }


def find_provider(provider_id: str) -> KnownProvider | None:
    """A known provider. It is shared: do not modify it."""
    return _providers().get(provider_id)


@lru_cache(256)  # Called several times per turn, for the few configured providers.
def vendor_of(provider_id: str, base_url: str) -> str:
    """The vendor of a provider, by its address, else by its id; empty if unknown."""
    host = _host_of(base_url)
    for known in _providers().values():
        if any(host == own or host.endswith(f".{own}") for own in known.hosts):
            return known.id
    return provider_id if provider_id in _providers() or provider_id in LOCAL else ""


def find_model(vendor: str, model_id: str) -> Model | None:
    """The facts about a model, as a copy with the requested id."""
    found = _find(vendor, model_id)
    if found is None and vendor == OPENROUTER:
        owner, _, name = model_id.partition("/")
        found = _find(_OWNERS.get(owner, owner), name)
    if found is None:
        return None
    model = _copied(found, model_id)
    if model_id.endswith(":free"):
        model.cost_per_1m_in = model.cost_per_1m_in_cached = 0.0
        model.cost_per_1m_out = model.cost_per_1m_out_cached = 0.0
    return model


def _find(vendor: str, model_id: str) -> Model | None:
    """Look up a model by its exact id, else by its name without variant and date."""
    models = _index().get(vendor, {})
    return models.get(model_id) or models.get(_stem(model_id))


def _stem(model_id: str) -> str:
    """The name without variant and date. Some vendors write 4.5, others 4-5."""
    return _DATE.sub("", _VARIANT.sub("", model_id)).replace(".", "-")


def _copied(model: Model, model_id: str) -> Model:
    levels = model.reasoning_levels
    return replace(model, id=model_id, reasoning_levels=UNSET if levels is UNSET else list(levels))


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


@cache
def _providers() -> Mapping[str, KnownProvider]:
    data = get_data(__name__, "catalog.json")  # Importing `importlib.resources` takes 15 ms.
    assert data is not None, "our loader reads files"
    catalog = msgspec.json.decode(data, type=_Catalog)
    return MappingProxyType({known.id: known for known in catalog.providers})


@cache
def _index() -> Mapping[str, Mapping[str, Model]]:
    """All models of each vendor, by id and by name without variant and date."""
    return {
        known.id: {_MONTH.sub("", _stem(model.id)): model for model in known.models}
        | {model.id: model for model in known.models}
        for known in _providers().values()
    }


# --- provider types

GROUP = "culm.models"
_GEMINI_URL = "https://generativelanguage.googleapis.com/v1beta/openai"


class ProviderType(NamedTuple):
    make: MakeModel
    base_url: str = ""  # The default address.
    needs_key: bool = False  # Local servers often need none.
    needs_url: bool = True


# Each adapter is imported at its first use, because most servers use only one.


def _openai(setup: ModelSetup) -> LanguageModel:
    from culm.model.openai.model import OpenAiModel

    return OpenAiModel(setup)


def _anthropic(setup: ModelSetup) -> LanguageModel:
    from culm.model.anthropic.model import AnthropicModel

    return AnthropicModel(setup)


def _offline(setup: ModelSetup) -> LanguageModel:
    from culm.model.offline.model import OfflineModel

    return OfflineModel(setup)


BUILT_IN: Mapping[str, ProviderType] = {
    "openai": ProviderType(_openai, "https://api.openai.com/v1", needs_key=True),
    "openai-compat": ProviderType(_openai),
    "openrouter": ProviderType(_openai, "https://openrouter.ai/api/v1", needs_key=True),
    "vercel": ProviderType(_openai, "https://ai-gateway.vercel.sh/v1", needs_key=True),
    "google": ProviderType(_openai, _GEMINI_URL, needs_key=True),
    "gemini": ProviderType(_openai, _GEMINI_URL, needs_key=True),
    "anthropic": ProviderType(_anthropic, "https://api.anthropic.com/v1", needs_key=True),
    "offline": ProviderType(_offline, needs_url=False),
}


def find_dialect(type_: str) -> ProviderType | None:
    """The dialect of a provider type, or None if the type is unknown."""
    if (built_in := BUILT_IN.get(type_)) is not None:
        return built_in
    point = entry_points_of(GROUP).get(type_)
    return None if point is None else ProviderType(_maker(point), needs_url=False)


def dialect_types() -> list[str]:
    return [*BUILT_IN, *sorted(entry_points_of(GROUP).keys() - BUILT_IN.keys())]


@cache
def entry_points_of(group: str) -> "dict[str, EntryPoint]":
    """The entry points of other packages, by name."""
    from importlib.metadata import entry_points  # Slow to import, and not needed to start.

    try:
        return {point.name: point for point in entry_points(group=group)}
    except Exception:  # boundary: a package whose metadata is damaged
        log.exception("cannot read the entry points of %s; none are used", group)
        return {}


def _maker(point: "EntryPoint") -> MakeModel:
    def make(setup: ModelSetup) -> LanguageModel:
        try:
            return point.load()(setup)
        except ModelFailed:
            raise
        except Exception as exc:  # boundary: another package's code
            log.exception("the provider type %s of %s failed", point.name, point.value)
            raise ModelFailed(
                "Model not available",
                f"the provider type {point.name!r} ({point.value}) cannot be used: "
                f"{type(exc).__name__}",
                hint="see the server's log, or remove the package that provides it",
            ) from exc

    return make
