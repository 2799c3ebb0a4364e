"""The one model of a worker: as our own parent chose it, or as any parent's provision names it.

Its credential is the only one a worker has. It goes from the provision into the model's requests
and nowhere else; it is taken as it is written, so a `$` in it refers to nothing.
"""

from collections.abc import Sequence
from typing import get_args

from msgspec import UNSET
from msgspec.structs import replace

from culm.config.schema import ProviderFile
from culm.errors import ModelFailed
from culm.fleet.protocol.frames import Effort
from culm.fleet.provision import ModelName, Provision
from culm.model.choice import ChosenModel, chosen_of, why_unreachable
from culm.model.dialects import find_dialect
from culm.model.local_servers import OFFLINE
from culm.run.loop import ActiveModel
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel

EFFORTS: Sequence[str] = get_args(Effort)  # The least first.


class SingleModel:
    """Nobody else is asked when it fails: whoever gave the assignment may choose another model."""

    def __init__(self, active: ActiveModel) -> None:
        self.current = active

    async def fall_back(self, failure: ModelFailed) -> bool:
        return False


def choose(provision: Provision, given: ChosenModel | None, effort: str | None) -> ChosenModel:
    """Raises `ModelFailed`, which says what is missing and never a key."""
    if effort is not None and effort not in EFFORTS:
        raise _unusable(f"reasoning_effort must be one of {', '.join(EFFORTS)}")
    chosen = _named(provision) if given is None else given
    if find_dialect(chosen.access.type) is None:
        raise _unusable(f"nobody here speaks to a provider of type {chosen.access.type!r}")
    if effort is None:
        return chosen
    fitting = fitting_effort(effort, chosen.info) or UNSET
    return chosen._replace(settings=replace(chosen.settings, reasoning_effort=fitting))


def _named(provision: Provision) -> ChosenModel:
    named = provision.model or ModelName(OFFLINE, OFFLINE)
    provider = _provider(provision, named.provider)
    if reason := why_unreachable(named.provider, provider):
        raise _unusable(reason)
    if not named.model:
        raise _unusable(f"the provision names no model of provider {named.provider!r}")
    settings = SelectedModel(model=named.model, provider=named.provider)
    return chosen_of(named.provider, provider, settings)


def _provider(provision: Provision, name: str) -> ProviderFile:
    if name == OFFLINE:
        return ProviderFile(type=OFFLINE)
    for given in provision.secrets.provider_credentials:
        if given.provider == name:
            return ProviderFile(
                type=given.provider_type or "",
                base_url=given.base_url or "",
                api_key=given.api_key,
            )
    raise _unusable(f"the provision has no credential for provider {name!r}")


def _unusable(reason: str) -> ModelFailed:
    return ModelFailed("Model not available", reason)


def fitting_effort(effort: str, info: ModelInfo) -> str:
    """The greatest effort that a model knows and that is not greater; empty if it does not think.

    A host says the same word to every model. Of one that is unknown here, the word may be right.
    """
    if info.context_window and not info.can_reason:
        return ""
    if info.reasoning_levels is UNSET or effort in info.reasoning_levels:
        return effort
    allowed = EFFORTS[: EFFORTS.index(effort) + 1]
    known = [one for one in EFFORTS if one in info.reasoning_levels]
    return next((one for one in reversed(known) if one in allowed), known[0] if known else "")
