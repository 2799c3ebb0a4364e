"""A workspace and the server around it, as every client reads them."""

from msgspec import Struct, field

from culm.ids import WorkspaceId
from culm.wire.config import Config
from culm.wire.skills import SkillState


class Workspace(Struct):
    """`env` is never sent back: it holds the user's secrets.

    `notices` are what a person should know of the configuration, in sentences.
    """

    id: WorkspaceId
    path: str
    config: Config
    data_dir: str = ""
    version: str = ""
    yolo: bool = False
    debug: bool = False
    channels: list[str] = field(default_factory=list[str])
    skills: list[SkillState] = field(default_factory=list[SkillState])
    notices: list[str] = field(default_factory=list[str])


class CreateWorkspace(Struct):
    path: str = ""
    client_id: str = ""
    data_dir: str = ""
    debug: bool = False
    yolo: bool = False
    version: str = ""
    env: list[str] = field(default_factory=list[str])
    channels: list[str] = field(default_factory=list[str])


class CurrentSession(Struct):
    """An empty id: the client looks at none."""

    session_id: str = ""


class NeedsInit(Struct):
    needs_init: bool = False


class InitPrompt(Struct):
    prompt: str


class VersionInfo(Struct):
    """`go_version` is what the client calls the runtime; ours is Python's."""

    version: str
    commit: str
    build_id: str
    go_version: str
    platform: str


class Control(Struct):
    """`server` must be ours by name: a Crush client asks any other server to leave.

    With a `version` only a server of that version leaves, not one that has taken its place.
    """

    command: str = ""
    server: str = ""
    version: str = ""
