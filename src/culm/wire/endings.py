"""The end of a run, and its form in messages and events.

A Crush client knows fewer reasons than culm. Where ours is more specific, the client reads the
nearest reason that it knows, and `culm_reason` holds the exact one.
"""

from typing import get_args

from msgspec import Struct

from culm.ids import SessionId
from culm.wire.agent import AgentEvent, RunComplete
from culm.wire.messages import Finish
from culm.wire.runs import Outcome

_AS_ERROR: tuple[Outcome, ...] = ("error", "budget", "loop", "interrupted")
_OURS: tuple[Outcome, ...] = ("budget", "loop", "interrupted", "denied")


class Ending(Struct, frozen=True):
    outcome: Outcome
    title: str = ""  # A short description of the failure, shown as a banner.
    details: str = ""
    stop: str = ""  # The model's own stop reason, where it is more specific than the outcome.

    @property
    def failed(self) -> bool:
        return self.outcome in _AS_ERROR


CANCELED = Ending("canceled", "User canceled request")
INTERRUPTED = Ending("interrupted", "Interrupted", "The server ended before this was finished.")


def finish_of(ending: Ending, time: int) -> Finish:
    """The `finish` part that closes the last message of a run."""
    if ending.failed:
        reason = "error"
    elif ending.outcome == "denied":
        reason = "end_turn"
    else:
        reason = ending.stop or ending.outcome
    return Finish(reason, time, ending.title, ending.details, _culm_reason(ending))


def ending_of_finish(finish: Finish) -> Ending:
    """The run's end as recorded by the `finish` part of its last message."""
    outcome = next((one for one in get_args(Outcome) if one == finish.culm_reason), None)
    if outcome is None:
        outcome = next((one for one in get_args(Outcome) if one == finish.reason), None)
    stop = "" if outcome is not None else finish.reason
    return Ending(outcome or "end_turn", finish.message, finish.details, stop)


def run_complete_of(
    ending: Ending, session_id: SessionId, run_id: str, message_id: str, text: str
) -> RunComplete:
    return RunComplete(
        session_id=session_id,
        run_id=run_id,
        message_id=message_id,
        text=text,
        error=error_text(ending) if ending.failed else "",
        cancelled=ending.outcome == "canceled",
        culm_reason=_culm_reason(ending),
    )


def agent_event_of(
    ending: Ending, session_id: SessionId, run_id: str, session_title: str
) -> AgentEvent | None:
    """The event for the end of a run, or None for a cancel, which is neither error nor success."""
    if ending.outcome == "canceled":
        return None
    if ending.failed:
        return AgentEvent("error", error=error_text(ending), run_id=run_id, session_id=session_id)
    return AgentEvent(
        "agent_finished", run_id=run_id, session_id=session_id, session_title=session_title
    )


def error_text(ending: Ending) -> str:
    return f"{ending.title}: {ending.details}" if ending.details else ending.title


def _culm_reason(ending: Ending) -> str:
    return ending.outcome if ending.outcome in _OURS else ""
