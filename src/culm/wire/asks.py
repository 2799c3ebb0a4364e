"""What an agent asks a person: permission for a call, and questions. And the answers."""

from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta, Struct, field

from culm.ids import AskId, GrantId, MessageId, RunId, SessionId
from culm.wire.codec import Json

# `withdrawn`: whoever asked does not need it any more. `expired`: nobody answered in time.
AskState = Literal["open", "allowed", "denied", "answered", "canceled", "withdrawn", "expired"]
Scope = Literal["session", "workspace"]


class PermissionRequest(Struct):
    """`params` must fit the tool by name, or a Crush client's dialog shows none."""

    id: str = ""
    session_id: str = ""
    tool_call_id: str = ""
    tool_name: str = ""
    description: str = ""
    action: str = ""
    params: Json = None
    path: str = ""


class PermissionNotification(Struct):
    """Neither granted nor denied: a request for this call is waiting."""

    tool_call_id: str
    granted: bool = False
    denied: bool = False
    session_id: str = ""  # Ours: ids of calls are unique in a session only.


class PermissionRef(Struct):
    """Of a request that a client sends back whole only the id is read."""

    id: str = ""


class PermissionGrant(Struct):
    """What is allowed by it is in the server's own record.

    A client that saw the digest of what it answers may send it, and then answers nothing else.
    """

    permission: PermissionRef = field(default_factory=PermissionRef)
    action: Annotated[
        str,
        Meta(description="`allow`, `allow_session`, `allow_workspace` or `deny`."),
    ] = ""
    digest: str = ""


class Resolved(Struct):
    """False if another answer was faster, or nothing was asked."""

    resolved: bool


class Skip(Struct):
    skip: bool = False


class SetSkip(Skip):
    """In one session if it is named, else in the workspace."""

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
    """A batch, shown as one form."""

    id: str
    session_id: str
    tool_call_id: str
    questions: list[Question]
    confirm_title: str = ""
    confirm_description: str = ""


class QuestionNotification(Struct):
    """The batch is answered or withdrawn: every form closes."""

    batch_id: str


class QuestionResponse(Struct):
    """`request_id` is the question's id. Without an answer the question was skipped."""

    request_id: str = ""
    selected_ids: list[str] = field(default_factory=list[str])
    fill_in_text: str = ""
    yes: bool | None = None
    notes: dict[str, str] = field(default_factory=dict[str, str])


class QuestionAnswer(Struct):
    batch_request_id: str = ""
    responses: list[QuestionResponse] = field(default_factory=list[QuestionResponse])


class CancelQuestions(Struct):
    """Without an id: the batch that a Crush client shows."""

    batch_request_id: str = ""


# --- ours: what is asked, as the server keeps it


R = TypeVar("R", PermissionRequest, QuestionRequest)


class Ask(Struct, Generic[R]):
    """What an agent waits for a person for."""

    request: R
    run_id: RunId
    message_id: MessageId  # The answer whose call it is.
    digest: str = ""  # Of the action as it was resolved.
    grains: list[str] = field(default_factory=list[str])  # What more than one `allow` covers.
    why: str = ""  # Why it is asked, where that is not plain.
    deadline: int = 0  # When it expires, in Unix seconds; 0 if it waits.
    state: AskState = "open"
    by: str = ""  # The client that answered, if it said who it is.
    created_at: int = 0
    closed_at: int = 0
    # Which agents lead to it, from the one people talk to down to who asks; none if it is that.
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
    """What a person allowed for more than one call."""

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
