"""The agent of a workspace: its state, what it is told to do, and how a run ended."""

from typing import Literal

from msgspec import Struct, field

from culm.ids import SessionId
from culm.wire.codec import Json
from culm.wire.config import Model, SelectedModel
from culm.wire.runs import Limits

RUN_HEADER = "Culm-Run-Id"  # On the head of a 202: the run that was accepted.


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
    """`run_id` comes back with the run's end; a prompt may be empty only beside a text file.

    `model` is asked for this run only, instead of the selected one. A run whose caller gave an id
    is headless unless it is `interactive`. `approve` answers what people would be asked:
    `ask`, `allow`, `deny`, or a list of rules.
    """

    session_id: str = ""
    prompt: str = ""
    run_id: str = ""
    attachments: list[Attachment] = field(default_factory=list[Attachment])
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None
    interactive: bool = False
    approve: Json = None


class ShellCommand(Struct):
    """The session is the path's; a client leaves its field empty."""

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
    """`message_id` and `text` are the run's last answer; `cancelled` outweighs `error`."""

    session_id: SessionId
    run_id: str = ""
    message_id: str = ""
    text: str = ""
    error: str = ""
    cancelled: bool = False
    culm_reason: str = ""  # Where ours is finer than what a Crush client knows.
