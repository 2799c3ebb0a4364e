"""Skills: what was discovered, and what a client may read."""

from typing import Literal

from msgspec import Struct


class SkillState(Struct):
    name: str
    path: str
    state: Literal[0, 1] = 0  # Ok, error.
    error: str = ""


class SkillInfo(Struct):
    id: str
    name: str
    description: str
    label: str
    source: Literal["system", "user", "project"]
    user_invocable: bool


class ReadSkill(Struct):
    skill_id: str = ""


class SkillResult(Struct):
    name: str
    description: str
    source: str
    builtin: bool


class SkillContent(Struct):
    content: bytes
    result: SkillResult
