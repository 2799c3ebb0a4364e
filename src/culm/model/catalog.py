"""Well-known providers and models: where they are, what they can do and what they cost.

Owns `catalog.json` and the look-ups in it. A configuration goes over all of it, and a model that
is not in it works as well: its price and its window are then unknown, which is 0.
"""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pkgutil import get_data
from types import MappingProxyType
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from culm.wire.config import Model

# Servers of one's own: they have accents, but neither prices nor an address that tells.
LOCAL = frozenset({"ollama", "lmstudio", "llamacpp", "vllm"})
OPENROUTER = "openrouter"
# Whose model it is that OpenRouter passes on, where its word for them is not ours.
_OWNERS = {"google": "gemini", "mistralai": "mistral", "x-ai": "xai"}

# What a model's name may end in without being another model: `:free`, `@region`, a date.
_VARIANT = re.compile(r"[:@].*$")
_DATE = re.compile(r"-(latest|\d{4}-\d\d-\d\d|\d{8})$")
_MONTH = re.compile(r"-\d{4}$")  # Mistral's dates; who asks for one by hand means that model only.


class KnownProvider(Struct, frozen=True):
    id: str
    name: str
    type: str  # The dialect it speaks.
    base_url: str
    hosts: tuple[str, ...]  # These and those below them are this provider's.
    key_env: str  # The variable that holds a key for it ...
    url_env: str  # ... and the one that moves it elsewhere.
    large: str  # The models to take where nobody has chosen any.
    small: str
    models: tuple[Model, ...]
    source: str  # The public page that says so ...
    date: str  # ... and the month in which it did.


class _Catalog(Struct, frozen=True):
    date: str
    note: str
    providers: tuple[KnownProvider, ...]


def known_providers() -> Mapping[str, KnownProvider]:
    """All of them by id, the most preferred first. The models are the caller's own."""
    return {
        known.id: replace(known, models=tuple(_copied(model, model.id) for model in known.models))
        for known in _providers().values()
    }


def find_provider(provider_id: str) -> KnownProvider | None:
    """One of them, to look at only: it is everybody's."""
    return _providers().get(provider_id)


@lru_cache(256)  # Asked several times for every turn, of the few that are configured.
def vendor_of(provider_id: str, base_url: str) -> str:
    """Whose accent a provider has: by its address, else by its name; empty if neither tells."""
    host = _host_of(base_url)
    for known in _providers().values():
        if any(host == own or host.endswith(f".{own}") for own in known.hosts):
            return known.id
    return provider_id if provider_id in _providers() or provider_id in LOCAL else ""


def find_model(vendor: str, model_id: str) -> Model | None:
    """What is known of a model, under the id that was asked for and the caller's to keep."""
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
    """By its exact id, else by its name without variant and date."""
    models = _index().get(vendor, {})
    return models.get(model_id) or models.get(_stem(model_id))


def _stem(model_id: str) -> str:
    """The name of a model alone. Some write 4.5 where others write 4-5."""
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
    data = get_data(__name__, "catalog.json")  # `importlib.resources` takes 15 ms to be there.
    assert data is not None, "our loader reads files"
    catalog = msgspec.json.decode(data, type=_Catalog)
    return MappingProxyType({known.id: known for known in catalog.providers})


@cache
def _index() -> Mapping[str, Mapping[str, Model]]:
    """Every model of every vendor, by its id and by its name alone."""
    return {
        known.id: {_MONTH.sub("", _stem(model.id)): model for model in known.models}
        | {model.id: model for model in known.models}
        for known in _providers().values()
    }
