"""The turn of a run: open its models, run the loop, and return the ending."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

from msgspec import Struct

from culm.clock import Clock, pause
from culm.errors import AppError, BudgetReached, ModelFailed
from culm.events.hub import TransientEvent
from culm.ids import Ids
from culm.model.choice import ChosenModel, ModelConfig, Models
from culm.permission.gate import PermissionGate, RunAdmission
from culm.run.context import has_text
from culm.run.journal import JournalSetting, TurnJournal
from culm.run.limits import Price, effective, jittered, price_of
from culm.run.live_run import LiveRun
from culm.run.loop import ActiveModel, TurnInput, summarize, take_turn
from culm.run.messages import Messages
from culm.run.project_context import ProjectContext, system_prompt
from culm.run.rules import ending_of_error
from culm.settings import Settings
from culm.store.store import Store
from culm.tools.base import CallRequest, Tool, Watch
from culm.tools.question import QUESTION
from culm.wire.codec import encode
from culm.wire.config import SelectedModel
from culm.wire.runs import Ending, RunRetry

log = logging.getLogger(__name__)


class TurnContext(Struct, frozen=True):
    """The context that all runs of a workspace share."""

    path: str
    store: Store
    messages: Messages
    models: Models
    tools: Callable[[], Mapping[str, Tool]]  # Reads the current configuration.
    gate: PermissionGate
    read_project_context: Callable[[], Awaitable[ProjectContext]]
    publish: Callable[[TransientEvent], None]
    # Finds processes of a run's calls that are still there after it was stopped.
    find_left: Callable[[str], Awaitable[list[int]]]
    # Runs the turn of an agent's run, in a process of its own.
    run_elsewhere: Callable[[LiveRun, TurnJournal], Coroutine[Any, Any, Ending]]
    clock: Clock
    ids: Ids
    settings: Settings
    tasks: asyncio.TaskGroup


async def run_turn(
    context: TurnContext, run: LiveRun, journal: TurnJournal, begin_title: Callable[[], None]
) -> Ending:
    """Run a turn to its end; only a cancel leaves it as an exception."""
    try:
        return await _run_loop(context, run, journal, begin_title)
    except AppError as exc:
        return ending_of_error(exc)
    except Exception:  # boundary: a bug in one run is that run's error
        log.exception("run %s failed", run.id)
        return Ending("error", "Internal error", "See the server's log.")


async def _run_loop(
    context: TurnContext, run: LiveRun, journal: TurnJournal, begin_title: Callable[[], None]
) -> Ending:
    project = await context.read_project_context()
    models = await open_model_chain(
        context.models,
        project,
        (run.provider, run.model),
        lambda one: journal.hand_over(setting_of(context, one.provider_id, one.settings.model)),
    )

    async def wait(delay_s: float, failure: ModelFailed) -> None:
        retry = RunRetry(run.id, run.session_id, delay_s, failure.title, failure.message)
        context.publish(TransientEvent("run_retry", run.session_id, encode(retry)))
        await pause(context.clock, jittered(delay_s, context.ids.chance()))

    if run.kind == "summary":
        if journal.history:
            await summarize(models, journal, wait, run.account)
        return Ending("end_turn")
    if not has_text(journal.history) and not journal.session.parent_session_id:
        journal.on_answer = begin_title

    async def compact(ending: Ending | None) -> None:
        if not journal.is_nearly_full():
            return
        if ending is not None:
            await journal.end_step(ending)
        prompt = "" if ending is not None else journal.user_text()
        try:
            await summarize(models, journal, wait, run.account, prompt)
        except BudgetReached:
            if ending is None:
                # The turn cannot continue. With an ending, the answer is stored and the next turn
                # retries.
                raise

    tools = dict(context.tools())
    if run.asked.approval.headless:
        tools.pop(QUESTION, None)  # Nobody can answer.
    turn = TurnInput(
        models=models,
        tools=tools,
        admit=RunAdmission(context.gate, run.asked.approval).admit,
        watch=lambda call: _watch(context, journal, call),
        journal=journal,
        limits=lambda: effective(run.account.limits, context.settings),
        meter=run.account,
        pause=wait,
        spent=run.spent,
        compact=compact,
    )
    return await take_turn(turn, journal.reentered)


def _watch(context: TurnContext, journal: TurnJournal, call: CallRequest) -> Watch:
    """Publish the output of a call while it runs."""

    def watch(text: str) -> None:
        if (output := journal.record_output(call.id, text)) is not None:
            context.publish(TransientEvent("call_output", call.session_id, encode(output)))

    return watch


def setting_of(context: TurnContext, provider_id: str, model_id: str) -> JournalSetting:
    """Return the journal's settings for a model, which may be missing by now."""
    models = context.models.current
    window = 0
    if models.compacts and not models.why_not(provider_id, model_id):
        window = models.get(provider_id, model_id).info.context_window
    price = current_price(models, provider_id, model_id)
    return JournalSetting(model_id, provider_id, window, context.tools(), price)


def current_price(models: ModelConfig, provider_id: str, model_id: str) -> Price:
    """Return the price of a model, even if it cannot be used now."""
    provider = models.providers.get(provider_id)
    info = models.info(SelectedModel(model=model_id, provider=provider_id))
    return price_of(info, flat_rate=provider is not None and provider.flat_rate)


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
            # Not the message: it may quote the conversation, which can be deleted; a log cannot.
            log.warning("%s; falling back to %s", failure.title, name)
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
