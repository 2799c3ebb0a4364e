"""Exit statuses, and the last message about a run that did not end well.

Imports nothing when it is loaded: every command needs it at its start.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.wire.runs import Run

EXIT_FAILED = 1
EXIT_USAGE = 2  # The same as click's.
EXIT_DENIED = 3
EXIT_CANCELED = 4
EXIT_SPENT = 5  # A budget or the time limit.
EXIT_NO_SERVER = 6
EXIT_INTERRUPTED = 130  # By Ctrl-C while there was nothing to cancel.
EXIT_CLOSED = 141  # The conventional status after the reader has closed the pipe.

_STATUS = {
    "end_turn": 0,
    "denied": EXIT_DENIED,
    "canceled": EXIT_CANCELED,
    "budget": EXIT_SPENT,
}


def run_status(run: "Run") -> int:
    """The exit status for a run that has ended."""
    return _STATUS.get(run.outcome or "", EXIT_FAILED)


def ending_text(run: "Run") -> tuple[str, str]:
    """The reason why a run did not end well, and a hint."""
    go_on = f"`culm run --session {run.session_id} 'go on'` continues from here"
    # The details of a failure may end with a hint of their own, on its own line.
    reason, _, own = ": ".join(filter(None, (run.title, run.details))).partition("\nhint: ")
    if run.state == "held":
        return f"the run is held: {reason}", f"{go_on}; the held prompt can be started or dropped"
    match run.outcome:
        case "canceled":
            return "canceled", go_on
        case "max_tokens":
            return "the answer was cut off at the output limit of the model", go_on
        case "denied":
            return "the run ended because a call was denied", go_on
        case _:
            return reason or f"the run ended: {run.outcome}", own or go_on
