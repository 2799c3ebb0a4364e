"""What a run does when its turn has come: find its model, hold the turn, and say how it ended."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from culm.clock import Clock, pause
from culm.errors import AppError, ModelFailed, StoreBusy
from culm.ids import Ids
from culm.model.choice import Models
from culm.run.compaction import summarize
from culm.run.context import SYSTEM, has_text
from culm.run.journal import Setting, TurnJournal
from culm.run.limits import effective, price_of
from culm.run.live import LiveRun
from culm.run.loop import Turn, take_turn
from culm.run.messages import Messages
from culm.run.rules import ending_of_stop
from culm.settings import Settings
from culm.store.store import Store
from culm.tools.base import Tool
from culm.wire.endings import Ending

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """What all runs of a workspace share."""

    path: str
    store: Store
    messages: Messages
    models: Models
    tools: Mapping[str, Tool]
    clock: Clock
    ids: Ids
    settings: Settings
    tasks: asyncio.TaskGroup


async def hold_turn(
    world: World, run: LiveRun, journal: TurnJournal, begin_title: Callable[[], None]
) -> Ending:
    """Hold a run's turn to its end; only a cancel gets out of here as an exception."""
    try:
        return await _hold(world, run, journal, begin_title)
    except ModelFailed as exc:
        return Ending("error", exc.title, exc.message)
    except StoreBusy:
        return ending_of_stop("store")
    except AppError as exc:
        return Ending("error", "The run failed", exc.message)
    except Exception:  # boundary: a bug in one run is that run's error
        log.exception("run %s failed", run.id)
        return Ending("error", "Internal error", "See the server's log.")


async def _hold(
    world: World, run: LiveRun, journal: TurnJournal, begin_title: Callable[[], None]
) -> Ending:
    chosen = world.models.get(run.provider, run.model)
    model = world.models.open(chosen)
    price = price_of(chosen.info, flat_rate=chosen.flat_rate)
    wait = partial(pause, world.clock)
    if run.kind == "summary":
        if journal.history:
            await summarize(model, chosen.settings, price, journal, wait)
        return Ending("end_turn")
    if not has_text(journal.history) and not journal.session.parent_session_id:
        journal.on_answer = begin_title

    async def compact(ending: Ending | None) -> None:
        if not journal.is_nearly_full():
            return
        if ending is not None:
            await journal.end_step(ending)
        prompt = "" if ending is not None else journal.said()
        await summarize(model, chosen.settings, price, journal, wait, prompt)

    turn = Turn(
        model=model,
        tools=world.tools,
        journal=journal,
        limits=effective(run.asked.limits, world.settings),
        price=price,
        system=SYSTEM.format(path=world.path),
        settings=chosen.settings,
        pause=wait,
        compact=compact,
    )
    return await take_turn(turn)


def setting_of(world: World, run: LiveRun) -> Setting:
    """What its journal must know of the model recorded at its acceptance."""
    models = world.models
    usable = not models.why_not(run.provider, run.model)
    return Setting(
        model_id=run.model,
        provider_id=run.provider,
        window=models.get(run.provider, run.model).info.context_window if usable else 0,
        tools=world.tools,
        compacts=models.compacts,
    )
