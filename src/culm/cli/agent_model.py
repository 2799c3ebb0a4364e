"""The model of an agent that is started by hand: chosen as a server would choose it here.

An agent gets the one credential that its model needs, read now, and no configuration.
"""

from typing import NoReturn

from culm.cli.reading import ConfigLocation, read_location
from culm.config.references import UnresolvedReference
from culm.errors import InvalidRequest, ModelFailed
from culm.fleet.provision import Credential, ModelName
from culm.model.choice import ChosenModel, ModelConfig, Models
from culm.model.local_servers import OFFLINE


class _Read(Exception):
    """Carries the model out whose references have all been read."""

    def __init__(self, chosen: ChosenModel) -> None:
        super().__init__()
        self.chosen = chosen


def _give(chosen: ChosenModel) -> NoReturn:
    raise _Read(chosen)


async def _run_none(_: str) -> NoReturn:
    raise UnresolvedReference("a command that prints a key is not run for an agent")


async def find_model(
    place: ConfigLocation, name: str
) -> tuple[ModelName | None, Credential | None]:
    """PROVIDER/MODEL, else the configured one; raises `InvalidRequest`.

    Without either the agent has the embedded model, which needs no credential.
    """
    reading = await read_location(place)
    present = ModelConfig(reading.whole, place.env)
    models = Models(lambda: present, _give, _run_none)
    if name:
        provider_id, _, model_id = name.partition("/")
    else:
        selected = models.choose("large")
        if selected is None:
            return None, None
        provider_id, model_id = selected.provider, selected.model
    try:
        await models.open(models.get(provider_id, model_id))
    except ModelFailed as exc:
        hint = "culm models shows what can be used, and why"
        raise InvalidRequest(f"{provider_id}/{model_id}: {exc.message}", hint=hint) from exc
    except _Read as read:
        return ModelName(provider_id, model_id), _credential(read.chosen)
    raise AssertionError("a model that can be opened is given")


def _credential(chosen: ChosenModel) -> Credential | None:
    access = chosen.access
    if chosen.provider_id == OFFLINE:
        return None
    if access.headers:
        raise InvalidRequest(
            f"providers.{chosen.provider_id} has extra_headers, which an agent is not given"
        )
    return Credential(chosen.provider_id, access.api_key, access.base_url, access.type)
