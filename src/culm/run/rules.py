"""The decisions about runs, as pure functions of values; docs/contract/runs.md has the tables.

Nothing here waits, reads a clock or writes. `runs.py` acts on the decisions.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from culm.errors import AppError, BudgetReached, ModelFailed, StoreBusy
from culm.store.text_tail import ShownOutput
from culm.wire.runs import (
    CANCELED,
    INTERRUPTED,
    CrashPolicy,
    Ending,
    Kind,
    Outcome,
    Settled,
    State,
)
from culm.wire.runs import settled_by as settled_outcome

# The reason to stop a run before its turn is over; the first one counts. `parked`: it waits for a
# person, and continues to wait under the next server. `parent_ended`: the run that wanted its
# result no longer needs it.
Stop = Literal["canceled", "interrupted", "budget", "store", "parked", "parent_ended"]

BEHIND_INTERRUPTED = "the run before it was interrupted"


class RunStanding(Protocol):
    """The properties of a run that the decisions use."""

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
    """Return `queued` if another run of the session is live."""
    return "queued" if any(True for _ in others) else "accepted"


def next_run(line: Sequence[S]) -> S | None:
    """Return the run that gets the next turn, from the live runs of a session in queue order."""
    return next((run for run in line if run.state in ("accepted", "queued", "waiting")), None)


def folds(run: RunStanding, host: RunStanding) -> bool:
    """Return True if a waiting run joins the running turn at its next step.

    A run whose caller gave an id gets its own turn. So does a run behind a summary, and a run for
    another model or with other permissions, as its caller did not choose those of the host.
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
    """Return True if a cancel of the session marks this live run: no earlier cancel did."""
    return not run.cancelled


def leaves_rows(state: State) -> bool:
    """Return True if a cancelled run leaves a user message and an answer; a queued run does not."""
    return state not in ("queued", "held")


def ending_of_stop(stop: Stop, refusal: Outcome | None = None) -> Ending:
    """Return the ending of a stopped run; a refusal ends its turn even if the server ends, too."""
    match stop:
        case "interrupted" if refusal is not None:
            return Ending(refusal)
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
    """Return the ending of a run that failed."""
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
    """Return the result of a cancel for a run that it covers."""
    if not stopped:
        return "not_stopped"
    return settled_outcome(ending.outcome)


# --- after a crash


class CrashedRun(NamedTuple):
    """A run that had not ended when the server did."""

    state: State
    cancelled: bool  # A cancel covers it.
    waits: bool  # It waits for a person only, or shares the turn of such a run.
    refused: Outcome | None  # How a person's refusal ends it.
    # By a run that is gone: its assignment must not start without being asked for.
    is_waited_for: bool
    is_letter: bool  # It delivers a letter, whose sender does not depend on this server.
    behind_interrupted: bool  # An earlier run of its session ends `interrupted`.
    unusable: str  # The reason that its provider or model cannot be used now; empty if it can.
    away_s: float
    away_s_max: float


class EndRun(NamedTuple):
    ending: Ending


class HoldRun(NamedTuple):
    reason: str


class ResumeRun(NamedTuple):
    """The run is accepted as before and gets its turn."""


def fate_after_crash(run: CrashedRun) -> EndRun | HoldRun | ResumeRun | None:
    """Decide the fate of a run; None leaves it unchanged."""
    if run.state == "held":
        return None
    if run.cancelled:
        return EndRun(CANCELED)
    if run.state in ("active", "folded"):
        if run.refused is not None:
            return EndRun(Ending(run.refused))
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
    """Return the result for the model of a call that a crash left without one."""
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


def unanswered_call_text(
    ending: Ending, started: CrashPolicy | None, shown: ShownOutput | None = None
) -> str:
    """Return the result for the model of a call whose run ended before it had one.

    `started` is the policy of a call that had started and may have had its effect. The output that
    clients were shown comes first, unless they cancelled the call.
    """
    text = _reason_without_result(ending, started)
    if shown is None or not shown.text or ending.outcome == "canceled":
        return text
    output = shown.described()
    return output + text if output.endswith("\n") else f"{output}\n{text}"


def _reason_without_result(ending: Ending, started: CrashPolicy | None) -> str:
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
