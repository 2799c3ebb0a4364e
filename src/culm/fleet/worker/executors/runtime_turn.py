"""One run to its end: the loop of every run, with a journal that tells its host.

What differs from a run of the server: nobody falls back on another model, nothing is summarized
once the turn is over, and what the host said too late for the last step gets another one.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from culm.clock import pause
from culm.errors import AppError, ModelFailed
from culm.fleet.executor import (
    CANCELLED,
    DENIED_PREFIX,
    CancelToken,
    Outcome,
    RunEnded,
    completed,
    failed,
    limit_error,
)
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.executors.runtime_events import EventSender
from culm.fleet.worker.executors.runtime_gate import RuntimeGate
from culm.fleet.worker.executors.runtime_journal import EventJournal
from culm.fleet.worker.executors.runtime_model import SingleModel
from culm.fleet.worker.executors.runtime_tools import RuntimeTools
from culm.run.compaction import summarize
from culm.run.limits import jittered, over_limit
from culm.run.loop import TurnInput, UsageMeter, take_turn
from culm.run.project_context import ContextPaths, read_project_context
from culm.run.rules import ending_of_error
from culm.run.system_prompt import ProjectContext
from culm.store.history import forget_versions
from culm.store.sessions import find_session
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, Watch
from culm.tools.files.file_executor import FileExecutor
from culm.tools.process.waiting import within
from culm.wire.endings import CANCELED, Ending, error_text
from culm.wire.runs import Limits

log = logging.getLogger(__name__)

WRITES = frozenset({"write", "download"})  # What an action is called that changes its paths.
CLOSING_S = 1.0  # For the last words of a cancelled run; a host that is deaf must not hold it.


@dataclass(frozen=True, slots=True)
class TurnWork:
    """All that a turn is made of."""

    services: WorkerServices
    events: EventSender
    journal: EventJournal
    bench: RuntimeTools
    admission: RuntimeGate
    models: SingleModel
    limits: Limits
    meter: UsageMeter


async def find_project_context(
    work: FileExecutor, path: Path, paths: ContextPaths, now_s: float
) -> ProjectContext:
    """What a model is told of the place; a disk that does not answer must not hold it."""
    try:
        return await work.run(lambda stop: read_project_context(path, paths, now_s, stop.is_set))
    except TimeoutError:
        return ProjectContext(str(path))


async def run_turn(work: TurnWork, cancel: CancelToken) -> Ending:
    """Work until there is an end, or the cancel; of that, too, nothing is left running."""
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(_bounded(work), name="turn")
        cancelled = tasks.create_task(cancel.wait(), name="cancel of a turn")
        await asyncio.wait({turn, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        turn.cancel()  # If it is done this does nothing.
        cancelled.cancel()
    return CANCELED if turn.cancelled() else turn.result()


async def _bounded(work: TurnWork) -> Ending:
    """Only a cancel gets out of here as an exception."""
    try:
        return await _take_turns(work)
    except AppError as exc:
        return ending_of_error(exc)
    except RunEnded:  # Nobody is left to work for.
        return CANCELED
    except Exception:  # boundary: a bug in one run is that run's error
        log.exception("a turn failed")
        return Ending("error", "Internal error", "See the worker's log.")


async def _take_turns(work: TurnWork) -> Ending:
    services, journal = work.services, work.journal

    async def wait(delay_s: float, failure: ModelFailed) -> None:
        words = {"delay_s": delay_s, "title": failure.title, "details": failure.message}
        work.events.send_nowait({"type": "run_retry", **words})
        await pause(services.clock, jittered(delay_s, services.ids.chance()))

    async def compact(ending: Ending | None) -> None:
        store, session_id = work.bench.context.store, journal.session.id
        store.write(forget_versions(session_id))
        if ending is not None or not journal.is_nearly_full():
            return
        journal.session = await store.read(find_session(session_id)) or journal.session
        await summarize(work.models, journal, wait, work.meter, journal.said())

    turn = TurnInput(
        models=work.models,
        tools=work.bench.tools,
        admit=partial(_admit, work),
        watch=partial(_watch, work.events),
        journal=journal,
        limits=lambda: work.limits,
        meter=work.meter,
        pause=wait,
        spent=journal.spent,
        compact=compact,
    )
    while True:
        ending = await take_turn(replace(turn, spent=journal.spent))
        if ending.outcome != "end_turn" or not journal.is_steered():
            return ending
        if (over := over_limit(journal.spent, work.limits)) is not None:
            return over
        await journal.end(ending)


async def _admit(
    work: TurnWork, tool: Tool | CallResult, call: CallRequest
) -> CallPlan | CallResult:
    """A call that changes files also tells which. One of what is withheld is told why."""
    if isinstance(tool, CallResult) and call.name in work.bench.withheld:
        return CallResult(work.bench.withheld[call.name], is_error=True)
    plan = await work.admission.admit(tool, call)
    if isinstance(plan, CallResult) or plan.action.name not in WRITES:
        return plan
    run, told = plan.run, {"type": "files_changed", "paths": list(plan.action.paths)}

    async def telling(watch: Watch) -> CallResult:
        result = await run(watch)
        if not result.is_error:
            work.events.send_nowait(told)
        return result

    return replace(plan, run=telling)


def _watch(telling: EventSender, call: CallRequest) -> Watch:
    return lambda text: telling.grow("tool_token", text, call.id)


# --- the end


async def end(work: TurnWork, ending: Ending) -> Outcome:
    """Say the last words, and how the run ended."""
    words = _final_outcome(work, ending)
    if ending.outcome == "canceled":
        await within(work.services.clock, CLOSING_S, words)
        return CANCELLED
    return await words


async def _final_outcome(work: TurnWork, ending: Ending) -> Outcome:
    journal, telling = work.journal, work.events
    await journal.end(ending)
    usage = journal.usage.shown()
    outcome = _outcome_of(ending, journal, work.limits)
    match outcome.status:
        case "completed":
            await telling.send({"type": "complete", "usage": usage})
        case "cancelled":
            await telling.send({"type": "cancelled", "message": ending.title, "usage": usage})
        case _:
            await telling.send({"type": "error", "message": outcome.error, "usage": usage})
    return outcome


def _outcome_of(ending: Ending, journal: EventJournal, limits: Limits) -> Outcome:
    """What a host is told in the end. A model that was cut off has answered as far as it came."""
    match ending.outcome:
        case "end_turn" | "max_tokens":
            return completed(journal.text())
        case "canceled" | "interrupted":
            return CANCELLED
        case "denied":  # What was asked for was not done, whatever the model had said before.
            return failed(f"{DENIED_PREFIX} {journal.denied}")
        case "budget":  # Rounds are the one limit that is counted here; all others are the host's.
            is_own = over_limit(journal.spent, limits) is not None
            return failed(limit_error("max_rounds" if is_own else "budget", ending.details))
        case "error" | "loop":
            return failed(error_text(ending))
