"""Permission requests, questions, their answers, and grants."""

from culm.errors import InvalidRequest
from culm.ids import GrantId, SessionId
from culm.server.api import Route
from culm.server.problems import ATTACHMENT_BYTES_MAX
from culm.wire.asks import (
    Ask,
    CancelQuestions,
    Grant,
    PermissionGrant,
    PermissionRequest,
    QuestionAnswer,
    QuestionRequest,
    Resolved,
    SetSkip,
    Skip,
)
from culm.wire.queries import AnswerQuery, AsksQuery, SkipQuery
from culm.workspace.workspace import LiveWorkspace

_ACTIONS = ("allow", "allow_session", "allow_workspace", "deny")


async def get_skip(workspace: LiveWorkspace, query: SkipQuery) -> Skip:
    """Show if tool calls run without permission requests."""
    return Skip(workspace.gate.is_skipped(query.session_id))


async def set_skip(workspace: LiveWorkspace, body: SetSkip, query: AnswerQuery) -> None:
    """Turn permission requests off or on again, for one session or for all."""
    if body.session_id:
        await workspace.get_session(SessionId(body.session_id))  # Raises for an unknown session.
    await workspace.gate.set_skip(body.session_id, query.by, on=body.skip)


async def grant(workspace: LiveWorkspace, body: PermissionGrant, query: AnswerQuery) -> Resolved:
    """Answer a permission request. The first answer counts.

    The answer applies to the request as the server recorded it. Only the id of the request in the
    body is read.
    """
    if body.action not in _ACTIONS:
        raise InvalidRequest("invalid permission action", hint=f"one of {', '.join(_ACTIONS)}")
    return Resolved(await workspace.gate.answer(body, query.by))


async def list_asks(workspace: LiveWorkspace, query: AsksQuery) -> list[Ask[PermissionRequest]]:
    """List permission requests, by default the open ones, the latest first."""
    return await workspace.toolbox.list_asks(PermissionRequest, query.session, query.state)


async def list_grants(workspace: LiveWorkspace) -> list[Grant]:
    """List the permissions that people granted for more than one call."""
    return workspace.gate.grants.all()


async def revoke_grant(workspace: LiveWorkspace, grant_id: GrantId) -> None:
    """Revoke a grant. It no longer allows any call."""
    await workspace.gate.grants.revoke(grant_id)


async def list_questions(workspace: LiveWorkspace, query: AsksQuery) -> list[Ask[QuestionRequest]]:
    """List batches of questions, by default the open ones, the latest first."""
    return await workspace.toolbox.list_asks(QuestionRequest, query.session, query.state)


async def answer_questions(
    workspace: LiveWorkspace, body: QuestionAnswer, query: AnswerQuery
) -> Resolved:
    """Answer a batch of questions. The first answer counts."""
    return Resolved(await workspace.gate.answer_questions(body, query.by))


async def cancel_questions(
    workspace: LiveWorkspace, body: CancelQuestions | None, query: AnswerQuery
) -> Resolved:
    """Decline to answer a batch of questions; without an id, the batch that Crush displays."""
    batch_id = "" if body is None else body.batch_request_id
    return Resolved(await workspace.gate.cancel_questions(batch_id, query.by))


_W = "/v1/workspaces/{workspace_id}"

ROUTES = [
    Route("GET", f"{_W}/permissions/skip", get_skip),
    Route("POST", f"{_W}/permissions/skip", set_skip),
    Route("POST", f"{_W}/permissions/grant", grant, body_bytes_max=ATTACHMENT_BYTES_MAX),
    Route("GET", f"{_W}/permissions/asks", list_asks),
    Route("GET", f"{_W}/permissions/grants", list_grants),
    Route("DELETE", f"{_W}/permissions/grants/{{grant_id}}", revoke_grant),
    Route("GET", f"{_W}/questions", list_questions),
    Route("POST", f"{_W}/questions/answer", answer_questions),
    Route("POST", f"{_W}/questions/cancel", cancel_questions),
]
