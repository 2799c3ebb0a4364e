"""Who answers in a turn: the model of the run, and the next of its fallbacks when that one fails.

Owns which of them is the present one. Whoever fell back stays with it until the turn ends.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

from culm.errors import ModelFailed
from culm.model.choice import ChosenModel, Models
from culm.run.limits import price_of
from culm.run.loop import ActiveModel
from culm.run.system_prompt import ProjectContext, system_prompt

log = logging.getLogger(__name__)

HandOver = Callable[
    [ChosenModel], Awaitable[None]
]  # What was said is taken back, and another speaks.


class ConfiguredModelChain:
    """Made by `open_lineup`."""

    def __init__(
        self,
        models: Models,
        around: ProjectContext,
        following: Iterable[ChosenModel],
        hand_over: HandOver,
    ) -> None:
        self._models = models
        self._around = around
        self._following = iter(following)  # Those not asked yet.
        self._hand_over = hand_over
        self._current: ActiveModel | None = None

    @property
    def current(self) -> ActiveModel:
        assert self._current is not None, "it was opened"
        return self._current

    async def open(self, chosen: ChosenModel) -> None:
        """Let this one speak; raises `ModelFailed`."""
        self._current = ActiveModel(
            model=await self._models.open(chosen),
            settings=chosen.settings,
            price=price_of(chosen.info, flat_rate=chosen.flat_rate),
            system=system_prompt(self._around, chosen.system_prefix),
        )

    async def fall_back(self, failure: ModelFailed) -> bool:
        """Let the next one speak; False if there is none."""
        for chosen in self._following:
            name = f"{chosen.provider_id}/{chosen.settings.model}"
            try:
                await self.open(chosen)
            except ModelFailed as exc:
                log.warning("model %s cannot be asked: %s", name, exc.message)
                continue
            log.warning("%s; %s is asked instead", failure.message, name)
            await self._hand_over(chosen)
            return True
        return False


async def open_model_chain(
    models: Models, around: ProjectContext, name: tuple[str, str], hand_over: HandOver
) -> ConfiguredModelChain:
    """The model recorded for a run, by provider and model, then those to be asked when it fails.

    All as they are configured now: a turn keeps what it began with.
    """
    following = [models.get(one.provider, one.model) for one in models.after(*name)]
    chain = ConfiguredModelChain(models, around, following, hand_over)
    try:
        await chain.open(models.get(*name))
    except ModelFailed as exc:
        if not await chain.fall_back(exc):
            raise
    return chain
