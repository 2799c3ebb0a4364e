"""A workspace and its server as sent to clients: configuration, snapshot, processes, errors."""

from typing import Generic, Literal, TypeVar

from msgspec import Struct, field

from culm.ids import WorkspaceId
from culm.wire.agents import Agent
from culm.wire.config import Config
from culm.wire.extensions import SkillState
from culm.wire.messages import Message, RawMessage, Session
from culm.wire.runs import Run

M = TypeVar("M", Message, RawMessage)  # Clients decode messages; the server forwards stored JSON.


class Workspace(Struct):
    """An open workspace. Its environment variables are never sent, because they hold secrets.

    `notices` are messages about the configuration, for people to read.
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
    """The session that a client displays; an empty id for none."""

    session_id: str = ""


class NeedsInit(Struct):
    needs_init: bool = False


class InitPrompt(Struct):
    prompt: str


class VersionInfo(Struct):
    """The version of the server. `go_version` is Crush's name for the runtime, here Python."""

    version: str
    commit: str
    build_id: str
    go_version: str
    platform: str


class Control(Struct):
    """A command to the server.

    `server` must be `culm`. Crush clients do not send that, so they cannot shut down a culm server
    because of its version. With a `version`, only a server of that version shuts down, not one
    that has replaced it.
    """

    command: str = ""
    server: str = ""
    version: str = ""


class Present(Struct):
    """A client with a live event stream, and the session that it displays."""

    client_id: str
    session_id: str
    attached: bool = True


class StoreHealth(Struct):
    state: Literal["ok", "failing", "replaced"]
    reason: str = ""


class Snapshot(Struct, Generic[M]):
    """The stored state at `cursor`. Later events bring it up to date."""

    cursor: str
    sessions: list[Session]
    messages: list[M]
    runs: list[Run]  # Runs that have not ended, by session and then in queue order.
    agents: list[Agent]  # Agents that have not ended.
    presence: list[Present]
    store: StoreHealth


class Process(Struct):
    """A process that was started for a workspace, with its descendants."""

    pid: int
    command: str
    # Its purpose: call, job, hook, tool, shell, agent (setup of its worktree), or worker (the
    # worker process with everything it started).
    kind: str
    session_id: str
    run_id: str
    tool_call_id: str
    age_s: float
    rss_bytes: int
    pids: list[int] = field(default_factory=list[int])
    stopping: bool = False  # It was asked to stop and is still running.


class Problem(Struct):
    """An error response."""

    message: str
    code: str = ""
    hint: str = ""
