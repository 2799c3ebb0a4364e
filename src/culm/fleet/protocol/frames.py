"""The frames between a host and its worker: one JSON object each, distinguished by `kind`.

The shapes are those of an existing system, so that its workers and ours are interchangeable; fields
of its newer versions are read and kept, too. The meaning of a frame is defined in `host.py` and
`worker.py`. Unknown fields are ignored. A payload that we only forward stays as it was written.
"""

import json
import re
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from culm.clock import parse_time
from culm.redaction import RedactedStruct
from culm.wire.codec import Json

MESSAGE_BYTES_MAX: Final = 64 << 20  # For one frame: a `run` carries a whole conversation.
REQUEST_BYTES_MAX: Final = 4 << 20  # For requests to a host, and for all but a few kinds.
SLOW_BYTES_MAX: Final = 64 << 10  # For frames parsed in Python, which takes some 10 ms.
BATCH_EVENTS_MAX: Final = 64
OPEN_MAX: Final = 64  # Open asks of a run, and open host calls, each.
_PROJECT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Status = Literal["completed", "error", "cancelled", "suspended"]
Qos = Literal["durable", "snapshot", "ephemeral"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
RequestId = Annotated[str, msgspec.Meta(max_length=256)]  # A host keeps them and sends them back.
T = TypeVar("T", bound=Struct)


class BadFrame(Exception):
    """The frame cannot be read. The message gives the reason but never repeats the content."""


# --- payloads


class Creation(Struct, frozen=True, forbid_unknown_fields=True):
    """The creation of a session. The time is compared as it was written, to its last digit."""

    created_at: str
    spawn_depth: int

    def __post_init__(self) -> None:
        if self.spawn_depth < 0 or parse_time(self.created_at) is None:
            raise ValueError("creation has a negative depth or a time without an offset")


class LogicalSession(Struct, frozen=True, omit_defaults=True):
    session_id: str
    root_session_id: str
    parent_session_id: str | None = None
    creation: Creation | None = None


class PermissionPolicy(Struct, frozen=True, omit_defaults=True):
    """A host's permission settings at the time it sent the run."""

    revision: int
    bypass_permissions: bool
    session_id: str
    policy: Json
    requested_mode: str = ""
    effective_mode: str = ""
    auto_approve_permissions: bool = False
    workspace_path: str | None = None
    environment_lease: Json | UnsetType = UNSET
    inherit_session_grants: bool | UnsetType = UNSET


class RunSecrets(RedactedStruct, frozen=True, omit_defaults=True):
    """Secrets of one run, kept in memory only."""

    codex_provider_token: str | None = None


class Batch(Struct, frozen=True, omit_defaults=True):
    """Numbered events: `first_seq` to `last_seq`, one each."""

    first_seq: int
    last_seq: int
    qos: Qos
    events: list[Raw]
    logical_session: LogicalSession | None = None
    activation_id: str | None = None
    execution_epoch: int = 0
    source_node_id: str | None = None
    source_actor_id: str | None = None


class Watermark(Struct, frozen=True):
    """A claim that no event of a run is missing. Its nulls are encoded."""

    version: int
    execution_epoch: int
    final_seq: int
    logical_session: LogicalSession | None = None
    activation_id: str | None = None


# --- host to worker


class RunSpec(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="run"):
    """`run`: start a run. The frame is the specification, flattened."""

    assignment: str
    reasoning_effort: str | None = None
    messages: list[Raw] = []  # The whole conversation, oldest first.
    permission_policy: PermissionPolicy | None = None
    secrets: RunSecrets = RunSecrets()
    project_id: str | None = None
    logical_session: LogicalSession | None = None
    activation_run_id: str | None = None
    initial_session_messages: list[Raw] = []
    # The number of the attempt; 0 means a sender that does not count, which gets one event per
    # frame.
    execution_epoch: int = 0

    def __post_init__(self) -> None:
        if self.project_id is not None and not _PROJECT_ID.fullmatch(self.project_id):
            raise ValueError("project_id is not a safe id")
        if not 0 <= self.execution_epoch < 1 << 64:
            raise ValueError("execution_epoch does not fit 64 bits")


class Cancel(Struct, frozen=True, tag_field="kind", tag="cancel"):
    pass


class SteerFrame(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="message"):
    """Steering of the active run. `id` is our extension: the admission refers to it."""

    text: str
    id: str = ""


class ApprovalReply(Struct, frozen=True, tag_field="kind", tag="approval_reply"):
    id: str
    approved: bool = False  # A missing value is not an approval.
    # Our extension: why it was not approved, if nobody decided that.
    reason: str | UnsetType = UNSET


class SessionMessage(Struct, frozen=True, tag_field="kind", tag="session_message"):
    delivery: Json


class InitialInputRelease(Struct, frozen=True, tag_field="kind", tag="initial_input_release"):
    release: Json


class OwnedTreeReply(
    Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="owned_tree_reply"
):
    id: str
    page: Json | UnsetType = UNSET


class SubAgentReply(Struct, frozen=True, tag_field="kind", tag="sub_agent_reply"):
    """The answer to a host call: `{"result": …}` or `{"error": "…"}`."""

    id: str
    result: Json


ParentFrame = (
    RunSpec
    | Cancel
    | SteerFrame
    | ApprovalReply
    | SessionMessage
    | InitialInputRelease
    | OwnedTreeReply
    | SubAgentReply
)


# --- worker to host


class EventFrame(Struct, frozen=True, tag_field="kind", tag="event"):
    event: Raw


class EventBatch(Struct, frozen=True, tag_field="kind", tag="event_batch"):
    batch: Batch


class ApprovalRequest(Struct, frozen=True, tag_field="kind", tag="approval_request"):
    id: RequestId
    body: Raw  # An object; any other value counts as empty.


class SessionMessageAdmitted(Struct, frozen=True, tag_field="kind", tag="session_message_admitted"):
    confirmation: Json


class OwnedTreeRequest(
    Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="owned_tree_request"
):
    id: RequestId
    cursor: str | None = None


class SubAgentRequest(Struct, frozen=True, tag_field="kind", tag="sub_agent_request"):
    """A host call: the run needs something that only its host can do."""

    id: RequestId
    tool_call_id: RequestId
    args: Raw  # An object, like `body` above.


class TerminalFrame(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="terminal"):
    """The end of a run: exactly one, while the link lasts."""

    status: Status
    result: str | None = None
    error: str | None = None
    transcript: list[Raw] = []
    final_event_watermark: Watermark | None = None


ChildFrame = (
    EventFrame
    | EventBatch
    | ApprovalRequest
    | SessionMessageAdmitted
    | OwnedTreeRequest
    | SubAgentRequest
    | TerminalFrame
)

# --- in and out

encode_frame = msgspec.json.Encoder().encode
_parent_decoder = msgspec.json.Decoder(ParentFrame)
_child_decoder = msgspec.json.Decoder(ChildFrame)
# Conversations, events and results, and the answers of a host that we trust.
_LARGE: Final = frozenset(("run", "sub_agent_reply", "event", "event_batch", "terminal"))


def parse_parent_frame(data: bytes | str) -> ParentFrame:
    """Raises `BadFrame`."""
    return _parse(data, _parent_decoder)


def parse_child_frame(data: bytes | str) -> ChildFrame:
    """Raises `BadFrame`."""
    return _parse(data, _child_decoder)


def _parse(data: bytes | str, decoder: msgspec.json.Decoder[T]) -> T:
    data = data.encode() if isinstance(data, str) else data
    try:
        if len(data) > REQUEST_BYTES_MAX:
            # Duplicate keys are not checked here: that would block the event loop.
            _check_large(data)
            return decoder.decode(data)
        frame = decoder.decode(data)
        # A frame that encodes to the same bytes has no duplicate key. Most frames do, and the check
        # is quick.
        if encode_frame(frame) != data:
            _refuse_duplicates(data, frame)
    except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError) as exc:
        raise BadFrame(_reason(exc)) from exc
    return frame


class _Kind(Struct):
    kind: str


_kind_decoder = msgspec.json.Decoder(_Kind)


def _check_large(data: bytes) -> None:
    """Only payloads that we keep undecoded may be large: decoding the rest would cost too much."""
    if _kind_decoder.decode(data).kind not in _LARGE:
        raise ValueError(f"a frame of this kind has at most {REQUEST_BYTES_MAX} bytes")


def _reason(exc: Exception) -> str:
    """Describe an error: msgspec names fields and types; of others only the type is given."""
    return str(exc) if isinstance(exc, msgspec.DecodeError | ValueError) else type(exc).__name__


class _Pairs(tuple[tuple[str, object], ...]):
    """An object as it was written: its keys in order, possibly repeated."""

    __slots__ = ()


def _refuse_duplicates(data: bytes, frame: Struct) -> None:
    """Refuse a duplicate key among the known fields, and anywhere in a closed payload."""
    if not isinstance(frame, InitialInputRelease) and _has_each_key_once(data):
        return
    if len(data) > SLOW_BYTES_MAX:
        raise ValueError("a key occurs twice or is escaped unusually")
    top: _Pairs = json.loads(data, object_pairs_hook=_Pairs)
    known = {"kind", *frame.__struct_fields__}
    _check_keys([name for name, _ in top if name in known])
    for name, value in top:
        if name == "release":
            _check_deeply(value)


_top_decoder = msgspec.json.Decoder(dict[str, Raw])


def _has_each_key_once(data: bytes) -> bool:
    """Check the top-level keys: without blanks, decoding and encoding must not lose anything.

    Quick, regardless of the content. A key written with escapes may count as a duplicate.
    """
    compact = msgspec.json.format(data, indent=-1)
    return len(encode_frame(_top_decoder.decode(compact))) == len(compact)


def _check_keys(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a key occurs twice")


def _check_deeply(value: object) -> None:
    if isinstance(value, _Pairs):
        _check_keys([name for name, _ in value])
        for _, inner in value:
            _check_deeply(inner)
