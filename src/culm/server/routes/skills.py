"""Skills. This version has none, and says so."""

from culm.errors import SkillNotFound
from culm.server.api import Route
from culm.wire.skills import ReadSkill, SkillContent, SkillInfo
from culm.workspace.workspace import LiveWorkspace


async def list_skills(workspace: LiveWorkspace) -> list[SkillInfo]:
    """List the skills a workspace has."""
    return []


async def read_skill(workspace: LiveWorkspace, body: ReadSkill) -> SkillContent:
    """Read one skill."""
    raise SkillNotFound(body.skill_id)


_W = "/v1/workspaces/{workspace_id}/skills"

ROUTES = [
    Route("GET", _W, list_skills),
    Route("POST", f"{_W}/read", read_skill),
]
