"""Runs as clients see and steer them: what was accepted, what waits, what was cancelled."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct, field

from culm.ids import RunId, SessionId

HEAD_CHARS = 200  # Of a prompt, in listings and events.

# `ending`: it is over, and the store cannot yet say so. `waiting` is for runs that await a person.
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
# What the model is told of a call that had started when the server died: repeat it freely, look
# first whether it happened, or do not repeat it.
CrashPolicy = Literal["again", "ask", "never"]
CancelTarget = Literal["session", "run", "queue", "agent"]
Settled = Literal["canceled", "finished_first", "not_stopped"]


class Limits(Struct, omit_defaults=True):
    """What a run may use up; 0 leaves it to the server's settings."""

    wall_s: float = 0
    steps: int = 0
    tokens: int = 0
    cost: float = 0  # USD.


# Of one question to a model, far above any: what others say is summed up for ever.
TOKENS_MAX = 1 << 40  # Of one kind; sums must fit 64 bits.
COST_MAX = 1e9  # USD.
Tokens = Annotated[int, Meta(ge=0, le=4 * TOKENS_MAX)]
Money = Annotated[float, Meta(ge=0, le=COST_MAX)]


class Used(NamedTuple):
    """What one question to a model used up."""

    prompt_tokens: int  # Without those that were put into a cache, as the wire has it.
    completion_tokens: int
    cost: float
    estimated: bool
    cached_tokens: int = 0  # Put into a cache.

    @property
    def all_tokens(self) -> int:
        return self.prompt_tokens + self.cached_tokens + self.completion_tokens


class Run(Struct):
    id: RunId
    session_id: SessionId
    kind: Kind = "prompt"
    state: State = "accepted"
    seq: int = 0  # In which order the workspace accepted them.
    run_id_given: bool = False
    prompt: str = ""  # Its beginning.
    provider: str = ""
    model: str = ""
    outcome: Outcome | None = None
    title: str = ""  # Of what went wrong, or why it is held ...
    details: str = ""  # ... and more of it.
    host_run_id: str = ""  # The run it was folded into.
    message_id: str = ""  # Its last answer.
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    estimated: bool = False  # Some of the tokens were not counted by the provider.
    agent_id: str = ""  # The agent that does it, if it is not the session's own ...
    parent_run_id: str = ""  # ... for this run ...
    is_detached: bool = False  # ... which does not wait for it.
    tree_steps: int = 0  # Of it and all that works for it.
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
    reason: str = ""  # Why it is held.
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
    pids: list[int] = field(default_factory=list[int])  # Of processes that did not stop.


class CancelChanged(Struct):
    cancel_id: str
    session_id: SessionId
    target: CancelTarget
    state: Literal["requested", "settled"]
    runs: list[CancelledRun]


class QueuedPrompt(Struct):
    run_id: RunId
    prompt: str  # In events its beginning.


class RunRetry(Struct):
    """A model failed, and is asked again after a pause. Told to whoever watches, and not kept."""

    run_id: RunId
    session_id: SessionId
    delay_s: float  # About; chance may add to it.
    title: str
    details: str = ""


class QueueChanged(Struct):
    session_id: SessionId
    items: list[QueuedPrompt]


# --- bodies and answers


class EditPrompt(Struct):
    prompt: str = ""


class OrderQueue(Struct):
    """All queued runs of the session, in the order they shall have."""

    run_ids: list[RunId] = field(default_factory=list[RunId])


class CancelAnswer(Struct):
    result: Literal["canceled", "finished_first", "not_stopped", "already_ended"]
    run: Run


def settled_by(outcome: Outcome) -> Settled:
    """The word a cancel gets for a run that stopped, or that was faster."""
    return "canceled" if outcome == "canceled" else "finished_first"
