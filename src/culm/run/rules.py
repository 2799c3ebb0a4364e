"""The decisions about runs, as plain functions over values: docs/contract/runs.md has the tables.

Nothing here waits, reads a clock or writes. Who acts on a decision is `runs.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from culm.errors import AppError, BudgetReached, ModelFailed, StoreBusy
from culm.wire.endings import CANCELED, INTERRUPTED, Ending
from culm.wire.runs import CrashPolicy, Kind, Settled, State
from culm.wire.runs import settled_by as outcome_word

# Why a run is being stopped before its turn is over; the first reason counts.
# `parked`: it waits for a person, and goes on waiting when there is a server again.
# `parent_ended`: the run that wanted its result wants nothing any more.
Stop = Literal["canceled", "interrupted", "budget", "store", "parked", "parent_ended"]

BEHIND_INTERRUPTED = "the run before it was interrupted"


class RunStanding(Protocol):
    """What the decisions look at."""

    @property
    def state(self) -> State: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def given(self) -> bool: ...
    @property
    def stop(self) -> Stop | None: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def asked_of(self) -> tuple[object, ...]: ...
    @property
    def joins(self) -> bool: ...


S = TypeVar("S", bound=RunStanding)


# --- acceptance and order


def state_at_acceptance(others: Iterable[RunStanding]) -> Literal["accepted", "queued"]:
    """Queued means: another run of the session was live at acceptance."""
    return "queued" if any(True for _ in others) else "accepted"


def next_run(line: Sequence[S]) -> S | None:
    """Who has the next turn, of the live runs of a session in the order of its queue."""
    return next((run for run in line if run.state in ("accepted", "queued", "waiting")), None)


def folds(run: RunStanding, host: RunStanding) -> bool:
    """Whether a waiting run joins the running turn at its next step.

    One whose caller gave an id waits for its own turn, and so does everybody behind a summary, and
    who is for another model or brought other permissions: nobody chose the running ones for it.
    """
    return (
        run.state == "queued"
        and run.stop is None
        and run.kind == "prompt"
        and host.kind == "prompt"
        and not run.given
        and (run.joins or run.asked_of == host.asked_of)
    )


# --- cancels


def covers(run: RunStanding) -> bool:
    """Whether a cancel of the session marks this live run: unless an earlier one did."""
    return not run.cancelled


def leaves_rows(state: State) -> bool:
    """A cancelled run leaves a user message and an answer, unless it only waited in a queue."""
    return state not in ("queued", "held")


def ending_of_stop(stop: Stop) -> Ending:
    match stop:
        case "canceled":
            return CANCELED
        case "parent_ended":
            return Ending("canceled", "parent_ended", "The agent that it worked for has ended.")
        case "interrupted" | "parked":
            return INTERRUPTED
        case "budget":
            return Ending("budget", "Time is up", "The run reached its limit of wall time.")
        case "store":
            return Ending(
                "error", "Nothing can be stored", "The store stopped writing, so the run stopped."
            )


def ending_of_error(error: AppError) -> Ending:
    """How a run ends that cannot go on."""
    match error:
        case ModelFailed(title=title, message=message, hint=hint):
            return Ending("error", title, f"{message}\nhint: {hint}" if hint else message)
        case BudgetReached(message=message):
            return Ending("budget", "Limit reached", message)
        case StoreBusy():
            return ending_of_stop("store")
        case _:
            return Ending("error", "The run failed", error.message)


def settled_by(ending: Ending, *, stopped: bool) -> Settled:
    """The word a cancel gets for a run it covers."""
    if not stopped:
        return "not_stopped"
    return outcome_word(ending.outcome)


# --- after a crash


class CrashedRun(NamedTuple):
    """A run that had not ended when the server did."""

    state: State
    cancelled: bool  # A cancel covers it.
    waits: bool  # For a person and for nothing else, or it shares the turn of one that does.
    is_waited_for: bool  # By a run that is gone; what it was given is not begun again unasked.
    is_letter: bool  # It brings one, whose sender does not know of servers.
    behind_interrupted: bool  # In its session a run before it is ending `interrupted`.
    unusable: str  # Why its provider or model cannot be used now; empty if it can.
    away_s: float
    away_s_max: float


class EndRun(NamedTuple):
    ending: Ending


class HoldRun(NamedTuple):
    reason: str


class ResumeRun(NamedTuple):
    """It is accepted as before, and its turn comes."""


def fate_after_crash(run: CrashedRun) -> EndRun | HoldRun | ResumeRun | None:
    """What becomes of it; None if it stays as it is."""
    if run.state == "held":
        return None
    if run.cancelled:
        return EndRun(CANCELED)
    if run.state in ("active", "folded"):
        return ResumeRun() if run.waits else EndRun(INTERRUPTED)
    if run.is_waited_for:
        return EndRun(INTERRUPTED)
    if run.is_letter and not run.unusable:
        return ResumeRun()
    if run.behind_interrupted:
        return HoldRun(BEHIND_INTERRUPTED)
    if run.away_s > run.away_s_max:
        return HoldRun(f"the server was away for {_duration(run.away_s)}")
    if run.unusable:
        return HoldRun(run.unusable)
    return ResumeRun()


def interrupted_call_text(state: Literal["known", "started"], crash: CrashPolicy) -> str:
    """What the model is told of a call that the crash left without a result."""
    if state == "known":
        return "Not run: the server ended before this call was started."
    match crash:
        case "again":
            return "Interrupted: the server ended during this call. It is safe to repeat."
        case "ask":
            return (
                "Interrupted: the server ended during this call, which may have had its effect. "
                "Check before you repeat it."
            )
        case "never":
            return (
                "Interrupted: the server ended during this call, which may have had its effect. "
                "Do not repeat it."
            )


def unanswered_call_text(ending: Ending, started: CrashPolicy | None) -> str:
    """What the model is told of a call whose run ended before there was a result.

    `started` is the policy of a call that had been started, and may have had its effect.
    """
    if ending.outcome == "canceled":
        return "Error: user cancelled assistant tool calling"
    if ending.outcome == "interrupted":
        return interrupted_call_text("started" if started else "known", started or "again")
    if started is not None:
        return "Stopped: the run ended during this call, which may have had its effect."
    match ending.outcome:
        case "max_tokens":
            return "Not run: the answer was cut off at its limit of tokens."
        case "end_turn" | "denied":
            return "Not run: the turn ended before this call."
        case "budget":
            return "Not run: the run reached one of its limits."
        case "error" | "loop":
            return "There was an error while executing the tool"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
