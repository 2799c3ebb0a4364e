"""The turn of a run: open its models, run the loop, and return the ending."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from culm.clock import Clock, pause
from culm.errors import AppError, BudgetReached, ModelFailed
from culm.events.hub import TransientEvent
from culm.ids import Ids, SessionId
from culm.model.choice import ChosenModel, Models
from culm.permission.gate import PermissionGate, RunAdmission
from culm.run.context import has_text
from culm.run.journal import JournalSetting, TurnJournal
from culm.run.limits import effective, jittered
from culm.run.live_run import LiveRun
from culm.run.loop import TurnInput, summarize, take_turn
from culm.run.messages import Messages
from culm.run.model_chain import open_model_chain
from culm.run.rules import ending_of_error
from culm.run.system_prompt import ProjectContext
from culm.settings import Settings
from culm.store.store import Store
from culm.tools.base import CallRequest, Tool, Watch
from culm.tools.question import QUESTION
from culm.wire.codec import encode
from culm.wire.events import CallOutput
from culm.wire.runs import Ending, RunRetry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnContext:
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
        lambda chosen: journal.hand_over(_setting_of(context, chosen)),
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
        watch=lambda call: _watch(context, call),
        journal=journal,
        limits=lambda: effective(run.account.limits, context.settings),
        meter=run.account,
        pause=wait,
        spent=run.spent,
        compact=compact,
    )
    return await take_turn(turn, journal.reentered)


def _watch(context: TurnContext, call: CallRequest) -> Watch:
    """Publish the output of a call while it runs."""
    offset = 0

    def watch(text: str) -> None:
        nonlocal offset
        output = CallOutput(SessionId(call.session_id), call.id, offset, text)
        offset += len(text)
        context.publish(TransientEvent("call_output", call.session_id, encode(output)))

    return watch


def setting_of(context: TurnContext, run: LiveRun) -> JournalSetting:
    """Return the journal's settings for the model recorded at acceptance."""
    models = context.models.current
    if models.why_not(run.provider, run.model):
        return _setting(context, run.provider, run.model, window=0)
    return _setting_of(context, models.get(run.provider, run.model))


def _setting_of(context: TurnContext, chosen: ChosenModel) -> JournalSetting:
    window = chosen.info.context_window
    return _setting(context, chosen.provider_id, chosen.settings.model, window=window)


def _setting(
    context: TurnContext, provider_id: str, model_id: str, *, window: int
) -> JournalSetting:
    compacts = context.models.current.compacts
    return JournalSetting(model_id, provider_id, window, context.tools(), compacts)
