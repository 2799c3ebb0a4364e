"""The models of a turn: the model of the run, then its fallbacks in order.

Owns the choice of the current one. After a fallback the turn stays with that model to its end.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

from culm.errors import ModelFailed
from culm.model.choice import ChosenModel, Models
from culm.run.limits import price_of
from culm.run.loop import ActiveModel
from culm.run.system_prompt import ProjectContext, system_prompt

log = logging.getLogger(__name__)

# Discards the answer so far and switches to another model.
HandOver = Callable[[ChosenModel], Awaitable[None]]


class ConfiguredModelChain:
    """A chain of configured models. Created by `open_model_chain`."""

    def __init__(
        self,
        models: Models,
        context: ProjectContext,
        following: Iterable[ChosenModel],
        hand_over: HandOver,
    ) -> None:
        self._models = models
        self._context = context
        self._following = iter(following)  # Fallbacks that were not asked yet.
        self._hand_over = hand_over
        self._current: ActiveModel | None = None

    @property
    def current(self) -> ActiveModel:
        assert self._current is not None, "it was opened"
        return self._current

    async def open(self, chosen: ChosenModel) -> None:
        """Use this model; raises `ModelFailed`."""
        self._current = ActiveModel(
            model=await self._models.open(chosen),
            settings=chosen.settings,
            price=price_of(chosen.info, flat_rate=chosen.flat_rate),
            system=system_prompt(self._context, chosen.system_prefix),
        )

    async def fall_back(self, failure: ModelFailed) -> bool:
        """Switch to the next usable model; return False if there is none."""
        for chosen in self._following:
            name = f"{chosen.provider_id}/{chosen.settings.model}"
            try:
                await self.open(chosen)
            except ModelFailed as exc:
                log.warning("model %s is not usable: %s", name, exc.message)
                continue
            log.warning("%s; falling back to %s", failure.message, name)
            await self._hand_over(chosen)
            return True
        return False


async def open_model_chain(
    models: Models, context: ProjectContext, name: tuple[str, str], hand_over: HandOver
) -> ConfiguredModelChain:
    """Open the model recorded for a run, given as provider and model, with its fallbacks.

    All use the current configuration, which the turn keeps to its end.
    """
    config = models.current
    following = [config.get(one.provider, one.model) for one in config.after(*name)]
    chain = ConfiguredModelChain(models, context, following, hand_over)
    try:
        await chain.open(config.get(*name))
    except ModelFailed as exc:
        if not await chain.fall_back(exc):
            raise
    return chain
