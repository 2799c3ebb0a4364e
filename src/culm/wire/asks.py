"""Permissions and questions: rules, requests of agents to people, answers and grants.

`permission/policy.py` matches the rules. Unlike elsewhere on the wire, an unknown field of a rule
is an error: a rule with the typo `comand` must not allow every command.
"""

from typing import Annotated, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, field

from culm.errors import InvalidRequest
from culm.ids import AskId, GrantId, MessageId, RunId, SessionId
from culm.wire.codec import Json, doc

# `withdrawn`: the agent no longer needs an answer. `expired`: nobody answered in time.
AskState = Literal["open", "allowed", "denied", "answered", "canceled", "withdrawn", "expired"]
Scope = Literal["session", "workspace"]


class PermissionRequest(Struct):
    """A permission request. `params` has the shape that Crush's dialog for the tool expects."""

    id: str = ""
    session_id: str = ""
    tool_call_id: str = ""
    tool_name: str = ""
    description: str = ""
    action: str = ""
    params: Json = None
    path: str = ""


class PermissionNotification(Struct):
    """The state of a permission request. Neither granted nor denied: it waits for an answer."""

    tool_call_id: str
    granted: bool = False
    denied: bool = False
    session_id: str = ""  # Not in Crush. Call ids are unique within a session only.


class PermissionRef(Struct):
    """A reference to a permission request. Clients send the whole request; only the id is read."""

    id: str = ""


class PermissionGrant(Struct):
    """An answer to a permission request. It applies to the action that the server has recorded.

    With a `digest`, the answer only counts if the recorded action has that digest.
    """

    permission: PermissionRef = field(default_factory=PermissionRef)
    action: Annotated[str, doc("`allow`, `allow_session`, `allow_workspace` or `deny`.")] = ""
    digest: str = ""


class Resolved(Struct):
    """The effect of an answer. False if another answer came first, or no request is open."""

    resolved: bool


class Skip(Struct):
    skip: bool = False


class SetSkip(Skip):
    """The skip setting of a session, or, without a session id, of the workspace."""

    session_id: str = ""


class Choice(Struct):
    id: str
    label: str
    description: str = ""


QuestionType = Literal["yes_no", "single_choice", "multi_choice", "free_text"]


class Question(Struct):
    id: str
    type: QuestionType
    question: str
    label: str = ""
    description: str = ""
    choices: list[Choice] = field(default_factory=list[Choice])


class QuestionRequest(Struct):
    """A batch of questions, shown as one form."""

    id: str
    session_id: str
    tool_call_id: str
    questions: list[Question]
    confirm_title: str = ""
    confirm_description: str = ""


class QuestionNotification(Struct):
    """A batch of questions was answered or withdrawn. Every client closes its form."""

    batch_id: str


class QuestionResponse(Struct):
    """The answer to one question, whose id is `request_id`. An empty answer skips the question."""

    request_id: str = ""
    selected_ids: list[str] = field(default_factory=list[str])
    fill_in_text: str = ""
    yes: bool | None = None
    notes: dict[str, str] = field(default_factory=dict[str, str])


class QuestionAnswer(Struct):
    batch_request_id: str = ""
    responses: list[QuestionResponse] = field(default_factory=list[QuestionResponse])


class CancelQuestions(Struct):
    """A batch of questions to cancel. Without an id, the batch that Crush clients display."""

    batch_request_id: str = ""


# --- not in Crush: requests as the server stores them


R = TypeVar("R", PermissionRequest, QuestionRequest)


class Ask(Struct, Generic[R]):
    """A permission request or a batch of questions, with its state."""

    request: R
    run_id: RunId
    message_id: MessageId  # The assistant message that contains the call.
    digest: str = ""  # The digest of the resolved action.
    grains: list[str] = field(default_factory=list[str])  # The coverage of a lasting grant.
    why: str = ""  # The reason for the request, where it is not obvious.
    deadline: int = 0  # The time at which it expires, in Unix seconds; 0 for never.
    state: AskState = "open"
    by: str = ""  # The client that answered, if it sent its id.
    created_at: int = 0
    closed_at: int = 0
    # Agent ids from the session's main agent down to the one that asks; empty if the main agent
    # asks.
    agent_path: list[str] = field(default_factory=list[str])


class AskChanged(Struct):
    """A permission request was opened or closed."""

    ask_id: AskId
    session_id: SessionId
    run_id: RunId
    tool_call_id: str
    tool_name: str
    action: str
    description: str
    digest: str
    state: AskState
    deadline: int = 0
    by: str = ""
    agent_path: list[str] = field(default_factory=list[str])


class QuestionChanged(Struct):
    """A batch of questions was opened or closed."""

    batch_id: AskId
    session_id: SessionId
    run_id: RunId
    tool_call_id: str
    state: AskState
    by: str = ""
    agent_path: list[str] = field(default_factory=list[str])


class Grant(Struct):
    """A permission that a person granted for more than one call."""

    id: GrantId
    scope: Scope
    session_id: SessionId
    tool_name: str
    action: str
    grains: list[str]
    ask_id: AskId
    by: str = ""
    created_at: int = 0


class SkipChanged(Struct):
    scope: Scope
    session_id: str
    on: bool
    by: str = ""


# --- rules (allow, ask, deny) as people and API clients write them

RULES_MAX = 500  # In one configuration or one run; people write a dozen.
PATTERN_CHARS_MAX = 1000

Decision = Literal["allow", "ask", "deny"]
Pattern = Annotated[str, Meta(max_length=PATTERN_CHARS_MAX)]


class Rule(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    decision: Annotated[Decision, doc("`allow`, `ask` or `deny`.")]
    tool: Annotated[Pattern, doc("The name of a tool; `*` and `?` are wildcards.")] = "*"
    action: Annotated[Pattern, doc("The action: `execute`, `write`, `read`, `fetch`, …")] = "*"
    path: Annotated[
        Pattern, doc("A glob for files, relative to the workspace or from `/` or `~/`.")
    ] = ""
    command: Annotated[
        Pattern, doc("A command and its arguments; a separate `*` is any number of them.")
    ] = ""


class CallerRule(Rule, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rule of the caller of a run, who need not know the tool.

    `match` is a pattern for the subject of the tool: its command if it has one, else its paths.
    The server replaces it when it accepts the run.
    """

    match: Pattern = ""


AnyRule = TypeVar("AnyRule", bound=Rule)

# Decides instead of a person. It is sent with a prompt and stored with its run.
Approve = Literal["ask", "allow", "deny"] | tuple[Rule, ...]
CallerApprove = Literal["ask", "allow", "deny"] | tuple[CallerRule, ...]  # As it is sent.


def parse_rules(value: Json) -> tuple[Rule, ...]:
    """Parse a list of rules; raises `InvalidRequest` with the number of the invalid rule."""
    return _parse_rules(value, Rule)


def _parse_rules(value: Json, kind: type[AnyRule]) -> tuple[AnyRule, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("rules must be a list")
    items = cast("list[Json]", value)
    if len(items) > RULES_MAX:
        raise InvalidRequest(f"too many rules: at most {RULES_MAX}")
    return tuple(_parse_rule(number, item, kind) for number, item in enumerate(items))


def _parse_rule(number: int, item: Json, kind: type[AnyRule]) -> AnyRule:
    if isinstance(item, dict):  # Null counts as absent, as in all requests.
        fields = cast("dict[str, Json]", item)
        item = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"rule {number + 1} is invalid: {exc}") from exc


def parse_approve(value: Json) -> Approve | None:
    """Parse the stored `approve` of a run; raises `InvalidRequest`."""
    return _parse_approve(value, Rule)


def parse_caller_approve(value: Json) -> CallerApprove | None:
    """Parse the `approve` field of a prompt; raises `InvalidRequest`."""
    return _parse_approve(value, CallerRule)


def _parse_approve(
    value: Json, kind: type[AnyRule]
) -> Literal["ask", "allow", "deny"] | tuple[AnyRule, ...] | None:
    if value is None or value == "":
        return None
    if value in ("ask", "allow", "deny"):
        return value
    if not isinstance(value, list):
        raise InvalidRequest("approve must be ask, allow, deny or a list of rules")
    return _parse_rules(cast("Json", value), kind)
