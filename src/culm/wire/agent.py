"""The main agent of a workspace: its state, prompts, shell commands and the end of a run."""

from typing import Literal

from msgspec import Struct, field

from culm.ids import SessionId
from culm.wire.codec import Json
from culm.wire.config import Model, SelectedModel
from culm.wire.runs import Limits

RUN_HEADER = "Culm-Run-Id"  # In a 202 response: the run that was accepted.


class AgentInfo(Struct):
    is_busy: bool = False
    is_ready: bool = False
    model: Model = field(default_factory=Model)
    model_cfg: SelectedModel = field(default_factory=SelectedModel)


class InitAgent(Struct):
    interactive: bool = False


class Attachment(Struct):
    file_path: str = ""
    file_name: str = ""
    mime_type: str = ""
    content: bytes = b""


class Prompt(Struct):
    """A prompt. The text may be empty only if a text file is attached.

    `run_id` identifies the run in its completion event. `model` replaces the selected model for
    this run only. A run with a `run_id` is headless unless it is `interactive`. `approve` answers
    permission requests without a person: `ask`, `allow`, `deny`, or a list of rules.
    """

    session_id: str = ""
    prompt: str = ""
    run_id: str = ""
    attachments: list[Attachment] = field(default_factory=list[Attachment])
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None
    interactive: bool = False
    approve: Json = None


class ShellRequest(Struct):
    """A shell command. The session is the one in the path; `session_id` is ignored."""

    command: str = ""
    session_id: str = ""
    term_width: int = 0


class ShellOutput(Struct):
    output: str
    exit_code: int


class AgentEvent(Struct, omit_defaults=True):
    type: Literal["agent_finished", "error", "aws_sso_auth", "aws_sso_auth_result"]
    error: str = ""
    run_id: str = ""
    session_id: str = ""
    session_title: str = ""


class RunComplete(Struct):
    """The end of a run.

    `message_id` and `text` are its last answer. `cancelled` takes precedence over `error`.
    """

    session_id: SessionId
    run_id: str = ""
    message_id: str = ""
    text: str = ""
    error: str = ""
    cancelled: bool = False
    culm_reason: str = ""  # The exact reason, where Crush clients have no name for it.
