"""Agents and letters as sent to clients: hierarchy, state, outcome and cost.

The main agent of a session has the session's id and no row here. Every other agent was started by
an agent above it, or by a client outside a conversation.
"""

from typing import Annotated, Literal, NewType, get_args

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from culm.ids import AgentId, RunId, SessionId
from culm.wire.codec import Json
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits, Outcome

# `pending`: the assignment is accepted, but no worker has started it.
AgentState = Literal["pending", "running", "ended"]
AgentOutcome = Literal["completed", "error", "canceled", "interrupted", "budget"]
# The reason why an agent is idle; `slot`: the limit of concurrent agents in its tree is reached.
Waiting = Literal["", "slot", "ask", "question", "agents"]
Until = Literal["all", "any", "first_error"]
LetterKind = Literal["task", "ask", "handoff", "reply"]
LETTER_KINDS: tuple[LetterKind, ...] = get_args(LetterKind)

EXTERNAL_PREFIX = "cli-"  # The prefix of mailboxes that external programs own and read themselves.
PERSON = "person"  # The sender of a letter that names none.
LETTERS_SHOWN = 500
EXPIRES_S_MAX = 366 * 86_400.0
PROMPT_CHARS_MAX = 256 << 10
NAME_CHARS_MAX = 100
AGENT_TEXT_MAX = 256  # Characters of an id, a role, a model or a tool.

Name = Annotated[str, Meta(max_length=AGENT_TEXT_MAX)]


class Agent(Struct):
    """A started agent. Cost and tokens are those of the agent and everything below it."""

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
    pid: int = 0  # The process id of its worker, while it has one.
    outcome: AgentOutcome | None = None
    reason: str = ""  # An explanation of the outcome, where it needs one.
    run_id: str = ""  # The run of its latest assignment.
    is_detached: bool = False  # It continues after the end of the run that started it.
    is_read_only: bool = False
    worktree: str = ""
    branch: str = ""
    children: int = 0
    cost: float = 0.0
    tokens: int = 0
    budget: Limits = field(default_factory=Limits)
    created_at: int = 0
    started_at: int = 0  # The start of its latest assignment.
    ended_at: int = 0  # The end of its latest assignment.

    @property
    def selected(self) -> SelectedModel:
        """The model for the agent's assignments."""
        return SelectedModel(model=self.model, provider=self.provider)


RawAgent = NewType("RawAgent", Raw)  # An `Agent` as the JSON that is stored.


class AgentDetails(Struct):
    """An agent with its children, its assignment and its result."""

    agent: Agent
    path: list[str]  # Agent ids, from the session's main agent down to this one.
    children: list[Agent]
    assignment: str = ""
    result: str = ""  # The text of its last answer.


def outcome_of_run(outcome: Outcome | None) -> AgentOutcome:
    """The outcome of an agent, given the outcome of its run."""
    match outcome:
        case "end_turn" | "max_tokens":
            return "completed"
        case "canceled" | "interrupted" | "budget":
            return outcome
        case None | "error" | "denied" | "loop":
            return "error"


# --- request bodies and responses


class StartAgent(Struct):
    """An agent to start outside a conversation."""

    prompt: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)] = ""
    name: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""
    role: Name = ""
    model: Name = ""
    tools: list[Name] | None = None
    read_only: bool = False
    worktree: bool = False
    limits: Limits = field(default_factory=Limits)
    headless: bool = False  # No person is expected to answer permission requests; see `approve`.
    approve: Json = None  # As in a prompt.


class SayToAgent(Struct):
    """Text for an agent: it steers a running agent, or is a new assignment for an ended one."""

    text: Annotated[str, Meta(max_length=PROMPT_CHARS_MAX)] = ""


class ChangeBudget(Struct):
    """Limits for an agent and everything below it. Absent fields stay; 0 removes a limit."""

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
    """A letter to an agent. Without `from` the sender is a person."""

    to: Name = ""
    kind: LetterKind = "task"
    text: str = ""
    from_: Name = field(default="", name="from")  # The mailbox that a reply goes to.
    # After so many seconds an unread letter is dropped; 0 for never.
    expires_s: Annotated[float, Meta(ge=0, le=EXPIRES_S_MAX)] = 0.0


class ReplyToLetter(Struct):
    text: str = ""
    from_: Name = field(default="", name="from")


class Ring(Struct):
    """A notice that letters were delivered to an agent's mailbox, or, without an agent, to any."""

    agent: Name = ""


class RingProject(Struct):
    """Like `Ring`, for a project that may not be open."""

    path: str = ""
    agent: Name = ""


class LetterShown(Struct):
    """The delivery state of a letter."""

    letter_id: str
    from_: str = field(name="from")
    to: str = ""
    kind: LetterKind = "task"
    # `delivered`: it is in the mailbox. `admitted`: it was read, and the model round that contains
    # it is committed.
    state: Literal["delivered", "admitted", "answered", "expired", "dead"] = "delivered"
    correlation_id: str = ""
    answer_id: str = ""  # The reply to it.
    run_id: str = ""
    created_at: int = 0
    changed_at: int = 0
