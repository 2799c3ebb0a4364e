"""The known provider types and their adapters: built-in ones, and those of other packages.

A package adds a type by an entry point of the group `culm.models`: its name is the type, and it
loads a callable that takes a `ModelSetup` and returns a `LanguageModel` (docs/models.md has an
example).
"""

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from culm.errors import ModelFailed
from culm.model.base import LanguageModel, MakeModel, ModelSetup

log = logging.getLogger(__name__)

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
def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """The entry points of other packages, by name."""
    try:
        return {point.name: point for point in entry_points(group=group)}
    except Exception:  # boundary: a package whose metadata is damaged
        log.exception("cannot read the entry points of %s; none are used", group)
        return {}


def _maker(point: EntryPoint) -> MakeModel:
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
