"""How a run ended, as an exit status and in words."""

from culm.cli.exits import EXIT_CANCELED, EXIT_DENIED, EXIT_FAILED, EXIT_SPENT
from culm.wire.runs import Run

_STATUS = {
    "end_turn": 0,
    "denied": EXIT_DENIED,
    "canceled": EXIT_CANCELED,
    "budget": EXIT_SPENT,
}


def status_of(run: Run) -> int:
    return _STATUS.get(run.outcome or "", EXIT_FAILED)


def ending_text(run: Run) -> tuple[str, str]:
    """What became of a run that did not end well, and what to do about it."""
    go_on = f"`culm run --session {run.session_id} 'go on'` goes on from here"
    # The details of a failure may bring their own hint, as a line.
    reason, _, own = ": ".join(filter(None, (run.title, run.details))).partition("\nhint: ")
    if run.state == "held":
        return f"the run is held: {reason}", f"{go_on}; the held prompt can be started or dropped"
    match run.outcome:
        case "canceled":
            return "cancelled", go_on
        case "max_tokens":
            return "the answer was cut off: the model may write no more at once", go_on
        case "denied":
            return "the run ended because a call was denied", go_on
        case _:
            return reason or f"the run ended: {run.outcome}", own or go_on
