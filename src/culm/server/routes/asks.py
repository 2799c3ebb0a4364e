"""Permissions and questions: what people answer, and whether they are asked at all."""

from culm.errors import InvalidRequest
from culm.server.api import Route
from culm.server.problems import ATTACHMENT_BYTES_MAX
from culm.wire.asks import PermissionGrant, QuestionAnswer, Resolved, Skip
from culm.workspace.workspace import Workspace

_ACTIONS = ("allow", "allow_session", "deny")


async def get_skip(workspace: Workspace) -> Skip:
    """Say whether calls go ahead without being asked for."""
    return Skip(workspace.skip)


async def set_skip(workspace: Workspace, body: Skip) -> None:
    """Let calls go ahead without being asked for, or no longer."""
    workspace.skip = body.skip


async def grant(workspace: Workspace, body: PermissionGrant) -> Resolved:
    """Answer a permission request; the first answer counts. (Nothing is asked yet.)"""
    if body.action not in _ACTIONS:
        raise InvalidRequest("invalid permission action")
    return Resolved(resolved=False)


async def answer_questions(workspace: Workspace, body: QuestionAnswer) -> Resolved:
    """Answer a batch of questions; the first answer counts. (Nothing is asked yet.)"""
    return Resolved(resolved=False)


async def cancel_questions(workspace: Workspace) -> Resolved:
    """Decline to answer the batch that is shown. (Nothing is asked yet.)"""
    return Resolved(resolved=False)


_W = "/v1/workspaces/{workspace_id}"

ROUTES = [
    Route("GET", f"{_W}/permissions/skip", get_skip),
    Route("POST", f"{_W}/permissions/skip", set_skip),
    Route("POST", f"{_W}/permissions/grant", grant, body_bytes_max=ATTACHMENT_BYTES_MAX),
    Route("POST", f"{_W}/questions/answer", answer_questions),
    Route("POST", f"{_W}/questions/cancel", cancel_questions),
]
