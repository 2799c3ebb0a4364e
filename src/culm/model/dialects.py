"""The types of provider there are, and who makes their models: ours, and those of other packages.

A package adds a type by an entry point of the group `culm.models`: its name is the type, and what
it loads is called with a `Setup` and returns a `Model` (docs/models.md has an example).
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
    base_url: str = ""  # Where a provider of this type is, if it says nothing else.
    needs_key: bool = False  # A server of one's own may do without.
    needs_url: bool = True


# Each adapter is imported when it is first used: most servers use one.


def _openai(setup: ModelSetup) -> LanguageModel:
    from culm.model.openai.model import OpenAiModel

    return OpenAiModel(setup)


def _anthropic(setup: ModelSetup) -> LanguageModel:
    from culm.model.anthropic.model import AnthropicModel

    return AnthropicModel(setup)


def _offline(setup: ModelSetup) -> LanguageModel:
    from culm.model.offline.model import OfflineModel

    return OfflineModel(setup)


OURS: Mapping[str, ProviderType] = {
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
    """The dialect of a provider's type, or None if nobody here speaks it."""
    if (ours := OURS.get(type_)) is not None:
        return ours
    theirs = entry_points_of(GROUP).get(type_)
    return None if theirs is None else ProviderType(_maker(theirs), needs_url=False)


def dialect_types() -> list[str]:
    return [*OURS, *sorted(entry_points_of(GROUP).keys() - OURS.keys())]


@cache
def entry_points_of(group: str) -> dict[str, EntryPoint]:
    """What other packages bring for us, by its name."""
    try:
        return {point.name: point for point in entry_points(group=group)}
    except Exception:  # boundary: a package whose metadata is damaged
        log.exception("nothing of other packages is used for %s", group)
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
                hint="see the server's log, or remove the package that brings it",
            ) from exc

    return make
