"""Agents as clients see them: who works for whom, how far it is, and what it has cost.

The agent of a session that people began is that session's: its id is the session's, and it is no
row here. Every other one was started by an agent above it, or by a client, outside a conversation.
"""

from typing import Annotated, Literal, NewType, get_args

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from culm.ids import AgentId, RunId, SessionId
from culm.wire.codec import Json
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits, Outcome

# `pending`: its assignment is accepted, and no worker has begun it.
AgentState = Literal["pending", "running", "ended"]
AgentOutcome = Literal["completed", "error", "canceled", "interrupted", "budget"]
# What an agent that does nothing now waits for; `slot`: others of its tree are at work.
Waiting = Literal["", "slot", "ask", "question", "agents"]
Until = Literal["all", "any", "first_error"]
LetterKind = Literal["task", "ask", "handoff", "reply"]
LETTER_KINDS: tuple[LetterKind, ...] = get_args(LetterKind)

OUTSIDE = "cli-"  # So begin mailboxes of programs outside, which read them themselves.
PERSON = "person"  # Who writes a letter and says nothing of who it is.
LETTERS_SHOWN = 500
EXPIRES_S_MAX = 366 * 86_400.0
PROMPT_CHARS_MAX = 256 << 10
NAME_CHARS_MAX = 100
AGENT_TEXT_MAX = 256  # Of an id, a role, a model or a tool.

Name = Annotated[str, Meta(max_length=AGENT_TEXT_MAX)]


class Agent(Struct):
    """One that was started, and what became of it. Cost and tokens are those of its whole tree."""

    agent_id: AgentId
    parent_id: str  # The agent that started it; empty if a client did.
    session_id: SessionId
    parent_session_id: str = ""
    depth: int = 1
    name: str = ""
    role: str = ""
    provider: str = ""
    model: str = ""
    state: AgentState = "pending"
    waiting_for: Waiting = ""
    pid: int = 0  # Of its worker, while it has one.
    outcome: AgentOutcome | None = None
    reason: str = ""  # Why it ended so, where that is not plain.
    run_id: str = ""  # Its latest assignment.
    is_detached: bool = False  # It outlives the run that started it.
    is_read_only: bool = False
    worktree: str = ""
    branch: str = ""
    children: int = 0
    cost: float = 0.0
    tokens: int = 0
    budget: Limits = field(default_factory=Limits)
    created_at: int = 0
    started_at: int = 0  # Its latest assignment was begun ...
    ended_at: int = 0  # ... and ended.

    @property
    def selected(self) -> SelectedModel:
        """The model that does its assignments."""
        return SelectedModel(model=self.model, provider=self.provider)


RawAgent = NewType("RawAgent", Raw)  # An `Agent` in the JSON it was stored as.


class AgentDetails(Struct):
    """One agent with its children and what it was told."""

    agent: Agent
    path: list[str]  # Of agents, from the one people talk to down to it.
    children: list[Agent]
    assignment: str = ""
    result: str = ""  # What it said last.


def outcome_of_run(outcome: Outcome | None) -> AgentOutcome:
    """The word for an agent whose run ended so."""
    match outcome:
        case "end_turn" | "max_tokens":
            return "completed"
        case "canceled" | "interrupted" | "budget":
            return outcome
        case None | "error" | "denied" | "loop":
            return "error"


# --- what clients send


class StartAgent(Struct):
    """Start an agent outside a conversation."""

    prompt: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)] = ""
    name: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""
    role: Name = ""
    model: Name = ""
    tools: list[Name] | None = None
    read_only: bool = False
    worktree: bool = False
    limits: Limits = field(default_factory=Limits)
    headless: bool = False  # Nobody need be there to be asked for permission; `approve` answers.
    approve: Json = None  # As of a prompt.


class SayToAgent(Struct):
    """Steer one that works, or give one that has ended more to do."""

    text: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)] = ""


class ChangeBudget(Struct):
    """What an agent and all below it may use up. What is not named stays; 0 removes a limit."""

    wall_s: float | UnsetType = UNSET
    steps: int | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    cost: float | UnsetType = UNSET  # USD.

    def over(self, present: Limits) -> Limits:
        return Limits(
            wall_s=present.wall_s if self.wall_s is UNSET else self.wall_s,
            steps=present.steps if self.steps is UNSET else self.steps,
            tokens=present.tokens if self.tokens is UNSET else self.tokens,
            cost=present.cost if self.cost is UNSET else self.cost,
        )


class SaidToAgent(Struct):
    run_id: RunId


class SendLetter(Struct):
    """Write to an agent. Without `from` it is a person's."""

    to: Name = ""
    kind: LetterKind = "task"
    text: str = ""
    from_: Name = field(default="", name="from")  # The mailbox that an answer goes to.
    # Nobody wants it read later; 0 is never.
    expires_s: Annotated[float, Meta(ge=0, le=EXPIRES_S_MAX)] = 0.0


class ReplyToLetter(Struct):
    text: str = ""
    from_: Name = field(default="", name="from")


class Ring(Struct):
    """Somebody has delivered letters: look now. Without an agent, into every mailbox."""

    agent: Name = ""


class RingProject(Struct):
    """As `Ring`, for a project that may not be open."""

    path: str = ""
    agent: Name = ""


class LetterShown(Struct):
    """A letter's way, as its sender may ask for it."""

    letter_id: str
    from_: str = field(name="from")
    to: str = ""
    kind: LetterKind = "task"
    # `delivered`: it lies in the mailbox. `admitted`: it was read, the model round that contained
    # it was committed.
    state: Literal["delivered", "admitted", "answered", "expired", "dead"] = "delivered"
    correlation_id: str = ""
    answer_id: str = ""  # The reply to it.
    run_id: str = ""
    created_at: int = 0
    changed_at: int = 0
