"""Permission requests, questions, their answers, and grants."""

from culm.errors import InvalidRequest
from culm.ids import GrantId, SessionId
from culm.server.api import ATTACHMENT_BYTES_MAX, WORKSPACE, Route
from culm.wire import asks as wire
from culm.wire.queries import AnswerQuery, AsksQuery, SkipQuery
from culm.workspace.workspace import LiveWorkspace

_ACTIONS = ("allow", "allow_session", "allow_workspace", "deny")


async def get_skip(workspace: LiveWorkspace, query: SkipQuery) -> wire.Skip:
    """Show if tool calls run without permission requests."""
    return wire.Skip(workspace.gate.is_skipped(query.session_id))


async def set_skip(workspace: LiveWorkspace, body: wire.SetSkip, query: AnswerQuery) -> None:
    """Turn permission requests off or on again, for one session or for all."""
    if body.session_id:
        await workspace.sessions.get(SessionId(body.session_id))  # Raises for an unknown session.
    await workspace.gate.set_skip(body.session_id, query.by, on=body.skip)


async def grant(
    workspace: LiveWorkspace, body: wire.PermissionGrant, query: AnswerQuery
) -> wire.Resolved:
    """Answer a permission request. The first answer counts.

    The answer applies to the request as the server recorded it. Only the id of the request in the
    body is read.
    """
    if body.action not in _ACTIONS:
        raise InvalidRequest("invalid permission action", hint=f"one of {', '.join(_ACTIONS)}")
    return wire.Resolved(await workspace.gate.answer(body, query.by))


async def list_asks(
    workspace: LiveWorkspace, query: AsksQuery
) -> list[wire.Ask[wire.PermissionRequest]]:
    """List permission requests, by default the open ones, the latest first."""
    return await workspace.toolbox.list_asks(wire.PermissionRequest, query.session, query.state)


async def list_grants(workspace: LiveWorkspace) -> list[wire.Grant]:
    """List the permissions that people granted for more than one call."""
    return workspace.gate.grants.all()


async def revoke_grant(workspace: LiveWorkspace, grant_id: GrantId) -> None:
    """Revoke a grant. It no longer allows any call."""
    await workspace.gate.grants.revoke(grant_id)


async def list_questions(
    workspace: LiveWorkspace, query: AsksQuery
) -> list[wire.Ask[wire.QuestionRequest]]:
    """List batches of questions, by default the open ones, the latest first."""
    return await workspace.toolbox.list_asks(wire.QuestionRequest, query.session, query.state)


async def answer_questions(
    workspace: LiveWorkspace, body: wire.QuestionAnswer, query: AnswerQuery
) -> wire.Resolved:
    """Answer a batch of questions. The first answer counts."""
    return wire.Resolved(await workspace.gate.answer_questions(body, query.by))


async def cancel_questions(
    workspace: LiveWorkspace, body: wire.CancelQuestions | None, query: AnswerQuery
) -> wire.Resolved:
    """Decline to answer a batch of questions; without an id, the batch that Crush displays."""
    batch_id = "" if body is None else body.batch_request_id
    return wire.Resolved(await workspace.gate.cancel_questions(batch_id, query.by))


ROUTES = [
    Route("GET", f"{WORKSPACE}/permissions/skip", get_skip),
    Route("POST", f"{WORKSPACE}/permissions/skip", set_skip),
    Route("POST", f"{WORKSPACE}/permissions/grant", grant, body_bytes_max=ATTACHMENT_BYTES_MAX),
    Route("GET", f"{WORKSPACE}/permissions/asks", list_asks),
    Route("GET", f"{WORKSPACE}/permissions/grants", list_grants),
    Route("DELETE", f"{WORKSPACE}/permissions/grants/{{grant_id}}", revoke_grant),
    Route("GET", f"{WORKSPACE}/questions", list_questions),
    Route("POST", f"{WORKSPACE}/questions/answer", answer_questions),
    Route("POST", f"{WORKSPACE}/questions/cancel", cancel_questions),
]
