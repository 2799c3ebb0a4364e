"""Runs as sent to clients: prompts, states, queues, cancels, ends and usage.

A Crush client knows fewer reasons for the end of a run than culm. Where ours is more specific, the
client reads the nearest reason that it knows, and `culm_reason` holds the exact one.
"""

from typing import Annotated, Literal, NamedTuple, get_args

from msgspec import Meta, Struct, field

from culm.ids import RunId, SessionId
from culm.wire.codec import Json
from culm.wire.config import Model, SelectedModel
from culm.wire.messages import Finish

HEAD_CHARS = 200  # The length to which listings and events cut a prompt.

# `ending`: the run is over, but the store cannot write its end yet. `waiting`: it waits for a
# person.
State = Literal["accepted", "queued", "active", "waiting", "ending", "folded", "held", "ended"]
Outcome = Literal[
    "end_turn",
    "max_tokens",
    "canceled",
    "error",
    "denied",
    "budget",
    "loop",
    "interrupted",
]
Kind = Literal["prompt", "summary"]
# The advice to the model about a call that was running when the server died: repeat it freely,
# check first if it took effect, or do not repeat it.
CrashPolicy = Literal["again", "ask", "never"]
CancelTarget = Literal["session", "run", "queue", "agent"]
Settled = Literal["canceled", "finished_first", "not_stopped"]


class Limits(Struct, omit_defaults=True):
    """Limits of a run; 0 means the default from the server's settings."""

    wall_s: float = 0
    steps: int = 0
    tokens: int = 0
    cost: float = 0  # USD.


# Limits of one model request, far above any real one. Providers and workers report these figures,
# and they are added up for the lifetime of the store.
TOKENS_MAX = 1 << 40  # Of one kind; sums must fit 64 bits.
COST_MAX = 1e9  # USD.
Tokens = Annotated[int, Meta(ge=0, le=4 * TOKENS_MAX)]
Money = Annotated[float, Meta(ge=0, le=COST_MAX)]


class Used(NamedTuple):
    """Usage of one model request."""

    prompt_tokens: int  # Without tokens that were written to a cache, as on the wire.
    completion_tokens: int
    cost: float
    estimated: bool
    cached_tokens: int = 0  # Tokens that were written to a cache.

    @property
    def all_tokens(self) -> int:
        return self.prompt_tokens + self.cached_tokens + self.completion_tokens


class Run(Struct):
    id: RunId
    session_id: SessionId
    kind: Kind = "prompt"
    state: State = "accepted"
    seq: int = 0  # The order in which the workspace accepted its runs.
    run_id_given: bool = False
    prompt: str = ""  # The beginning of the prompt.
    provider: str = ""
    model: str = ""
    outcome: Outcome | None = None
    title: str = ""  # A short description of the failure, or the reason why the run is held.
    details: str = ""  # More about `title`.
    host_run_id: str = ""  # The run it was folded into.
    message_id: str = ""  # The message of its last answer.
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    estimated: bool = False  # Some of the tokens were not counted by the provider.
    agent_id: str = ""  # The sub-agent that executes it; empty for the session's main agent.
    parent_run_id: str = ""  # The run that started the sub-agent.
    is_detached: bool = False  # The parent run does not wait for it.
    tree_steps: int = 0  # Of this run and the runs of its sub-agents.
    tree_tokens: int = 0
    tree_cost: float = 0.0
    created_at: int = 0
    started_at: int = 0
    ended_at: int = 0


class RunChanged(Struct):
    run_id: RunId
    session_id: SessionId
    state: State
    seq: int
    run_id_given: bool
    outcome: Outcome | None = None
    reason: str = ""  # The reason why it is held.
    agent_id: str = ""


def changed_of(run: Run) -> RunChanged:
    return RunChanged(
        run_id=run.id,
        session_id=run.session_id,
        state=run.state,
        seq=run.seq,
        run_id_given=run.run_id_given,
        outcome=run.outcome,
        reason=run.title if run.state == "held" else "",
        agent_id=run.agent_id,
    )


class CancelledRun(Struct):
    run_id: RunId
    settled: Settled | None = None
    pids: list[int] = field(default_factory=list[int])  # Processes that did not stop.


class CancelChanged(Struct):
    cancel_id: str
    session_id: SessionId
    target: CancelTarget
    state: Literal["requested", "settled"]
    runs: list[CancelledRun]


class QueuedPrompt(Struct):
    run_id: RunId
    prompt: str  # In events, the beginning of the prompt.


class RunRetry(Struct):
    """A model request failed and will be retried after a delay. This event is not stored."""

    run_id: RunId
    session_id: SessionId
    delay_s: float  # Approximate; random jitter may be added.
    title: str
    details: str = ""


class QueueChanged(Struct):
    session_id: SessionId
    items: list[QueuedPrompt]


# --- request bodies and responses


class EditPrompt(Struct):
    prompt: str = ""


class OrderQueue(Struct):
    """All queued runs of the session, in their new order."""

    run_ids: list[RunId] = field(default_factory=list[RunId])


class CancelAnswer(Struct):
    result: Literal["canceled", "finished_first", "not_stopped", "already_ended"]
    run: Run


def settled_by(outcome: Outcome) -> Settled:
    """The result of a cancel, given the outcome of the run: stopped, or ended before that."""
    return "canceled" if outcome == "canceled" else "finished_first"


# --- usage of many runs; each run is counted once


class Usage(Struct):
    """Usage of a set of runs, without the runs of their sub-agents."""

    runs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # USD.
    estimated_runs: int = 0  # Runs with tokens that were estimated, not counted by the provider.


class ModelUsage(Usage):
    provider: str = ""
    model: str = ""


class DayUsage(Usage):
    day: str = ""  # Such as 2026-01-31, in the requested time zone.


class SessionUsage(Usage):
    """Usage of a session and all of its sub-agents, whose sessions are not listed separately."""

    session_id: str = ""
    title: str = ""


class Stats(Struct):
    """Usage of all runs that have started, in sessions that have not been deleted."""

    since: int  # Unix seconds; 0 for no limit.
    total: Usage
    models: list[ModelUsage]  # The most expensive first, up to the server's limit.
    days: list[DayUsage]  # The latest first; days without a run are left out.
    sessions: list[SessionUsage]  # The most expensive.


# --- the main agent: its state, prompts and shell commands


RUN_HEADER = "Culm-Run-Id"  # In a 202 response: the run that was accepted.


class AgentInfo(Struct):
    is_busy: bool = False
    is_ready: bool = False
    model: Model = field(default_factory=Model)
    model_cfg: SelectedModel = field(default_factory=SelectedModel)


class InitAgent(Struct):
    interactive: bool = False


class Attachment(Struct):
    file_path: str = ""
    file_name: str = ""
    mime_type: str = ""
    content: bytes = b""


class Prompt(Struct):
    """A prompt. The text may be empty only if a text file is attached.

    `run_id` identifies the run in its completion event. `model` replaces the selected model for
    this run only. A run with a `run_id` is headless unless it is `interactive`. `approve` answers
    permission requests without a person: `ask`, `allow`, `deny`, or a list of rules.
    """

    session_id: str = ""
    prompt: str = ""
    run_id: str = ""
    attachments: list[Attachment] = field(default_factory=list[Attachment])
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None
    interactive: bool = False
    approve: Json = None


class ShellRequest(Struct):
    """A shell command. The session is the one in the path; `session_id` is ignored."""

    command: str = ""
    session_id: str = ""
    term_width: int = 0


class ShellOutput(Struct):
    output: str
    exit_code: int


class AgentEvent(Struct, omit_defaults=True):
    type: Literal["agent_finished", "error", "aws_sso_auth", "aws_sso_auth_result"]
    error: str = ""
    run_id: str = ""
    session_id: str = ""
    session_title: str = ""


class RunComplete(Struct):
    """The end of a run.

    `message_id` and `text` are its last answer. `cancelled` takes precedence over `error`.
    """

    session_id: SessionId
    run_id: str = ""
    message_id: str = ""
    text: str = ""
    error: str = ""
    cancelled: bool = False
    culm_reason: str = ""  # The exact reason, where Crush clients have no name for it.


# --- the end of a run, in messages and events


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
