"""The turn of a worker's run: the common loop, with a journal that sends events to the host.

Differences from a run of the server: there is no fallback model, nothing is summarized after the
turn, and a prompt that arrives too late for the last step gets another step.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from culm.clock import pause, within
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
from culm.fleet.worker.executors.runtime_settings import SingleModel
from culm.fleet.worker.executors.runtime_tools import RuntimeTools
from culm.run.limits import jittered, over_limit
from culm.run.loop import TurnInput, UsageMeter, summarize, take_turn
from culm.run.project_context import ContextPaths, ProjectContext, read_project_context
from culm.run.rules import ending_of_error
from culm.store.sessions import find_session, forget_versions
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, Watch
from culm.tools.files.file_executor import FileExecutor
from culm.wire.runs import CANCELED, Ending, Limits, error_text

log = logging.getLogger(__name__)

WRITES = frozenset({"write", "download"})  # The names of actions that change their paths.
CLOSING_S = 1.0  # Time for the last events of a cancelled run, in case the host does not read.


class TurnWork(Struct, frozen=True):
    """The components of a turn."""

    services: WorkerServices
    events: EventSender
    journal: EventJournal
    tools: RuntimeTools
    gate: RuntimeGate
    models: SingleModel
    limits: Limits
    meter: UsageMeter


async def find_project_context(
    work: FileExecutor, path: Path, paths: ContextPaths, now_s: float
) -> ProjectContext:
    """Read the project context; return a minimal one if the disk does not answer in time."""
    try:
        return await work.run(lambda stop: read_project_context(path, paths, now_s, stop.is_set))
    except TimeoutError:
        return ProjectContext(str(path))


async def run_turn(work: TurnWork, cancel: CancelToken) -> Ending:
    """Run the turn until it ends or is cancelled; nothing is left running."""
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(_contain_errors(work), name="turn")
        cancelled = tasks.create_task(cancel.wait(), name="cancel of a turn")
        await asyncio.wait({turn, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        turn.cancel()  # Has no effect if it is done.
        cancelled.cancel()
    return CANCELED if turn.cancelled() else turn.result()


async def _contain_errors(work: TurnWork) -> Ending:
    """Turn every exception except a cancel into an ending."""
    try:
        return await _take_turns(work)
    except AppError as exc:
        return ending_of_error(exc)
    except RunEnded:  # The host is gone.
        return CANCELED
    except Exception:  # boundary: a bug in one run is an error of that run only
        log.exception("a turn failed")
        return Ending("error", "Internal error", "See the worker's log.")


async def _take_turns(work: TurnWork) -> Ending:
    services, journal = work.services, work.journal

    async def wait(delay_s: float, failure: ModelFailed) -> None:
        retry = {"delay_s": delay_s, "title": failure.title, "details": failure.message}
        work.events.send_nowait({"type": "run_retry", **retry})
        await pause(services.clock, jittered(delay_s, services.ids.chance()))

    async def compact(ending: Ending | None) -> None:
        store, session_id = work.tools.context.store, journal.session.id
        store.write(forget_versions(session_id))
        if ending is not None or not journal.is_nearly_full():
            return
        journal.session = await store.read(find_session(session_id)) or journal.session
        await summarize(work.models, journal, wait, work.meter, journal.prompt_text())

    turn = TurnInput(
        models=work.models,
        tools=work.tools.tools,
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
    """Admit a call; refuse a withheld tool with its reason, and report the files a call changes."""
    if isinstance(tool, CallResult) and call.name in work.tools.withheld:
        return CallResult(work.tools.withheld[call.name], is_error=True)
    plan = await work.gate.admit(tool, call)
    if isinstance(plan, CallResult) or plan.action.name not in WRITES:
        return plan
    run, event = plan.run, {"type": "files_changed", "paths": list(plan.action.paths)}

    async def run_and_report(watch: Watch) -> CallResult:
        result = await run(watch)
        if not result.is_error:
            work.events.send_nowait(event)
        return result

    return replace(plan, run=run_and_report)


def _watch(events: EventSender, call: CallRequest) -> Watch:
    return lambda text: events.grow("tool_token", text, call.id)


# --- the end


async def end(work: TurnWork, ending: Ending) -> Outcome:
    """Send the last events and return the outcome of the run."""
    closing = _send_ending(work, ending)
    if ending.outcome == "canceled":
        await within(work.services.clock, CLOSING_S, closing)
        return CANCELLED
    return await closing


async def _send_ending(work: TurnWork, ending: Ending) -> Outcome:
    journal, events = work.journal, work.events
    await journal.end(ending)
    usage = journal.usage.shown()
    outcome = _outcome_of(ending, journal, work.limits)
    match outcome.status:
        case "completed":
            await events.send({"type": "complete", "usage": usage})
        case "cancelled":
            await events.send({"type": "cancelled", "message": ending.title, "usage": usage})
        case _:
            await events.send({"type": "error", "message": outcome.error, "usage": usage})
    return outcome


def _outcome_of(ending: Ending, journal: EventJournal, limits: Limits) -> Outcome:
    """Convert the ending for the host. An answer that was cut off counts as completed."""
    match ending.outcome:
        case "end_turn" | "max_tokens":
            return completed(journal.text())
        case "canceled" | "interrupted":
            return CANCELLED
        case "denied":  # The assignment was not done, whatever the model answered before.
            return failed(f"{DENIED_PREFIX} {journal.denied}")
        case "budget":  # Only rounds are limited by the worker; all other limits are the host's.
            is_own = over_limit(journal.spent, limits) is not None
            return failed(limit_error("max_rounds" if is_own else "budget", ending.details))
        case "error" | "loop":
            return failed(error_text(ending))
