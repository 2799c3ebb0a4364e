"""What an agent asks a person: permission for a call, and questions. And the answers."""

from typing import Literal

from msgspec import Struct, field

from culm.wire.codec import Json


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


class PermissionRef(Struct):
    """Of a request that a client sends back whole only the id is read."""

    id: str = ""


class PermissionGrant(Struct):
    """What is allowed by it is in the server's own record."""

    permission: PermissionRef = field(default_factory=PermissionRef)
    action: str = ""


class Resolved(Struct):
    """False if another answer was faster, or nothing was asked."""

    resolved: bool


class Skip(Struct):
    skip: bool = False


class Choice(Struct):
    id: str
    label: str
    description: str = ""


class Question(Struct):
    id: str
    type: Literal["yes_no", "single_choice", "multi_choice", "free_text"]
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
