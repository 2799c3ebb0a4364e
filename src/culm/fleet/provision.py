"""The provision document: all that a worker is given, once, on its standard input.

Unknown fields are ignored and missing ones have defaults, so parent and worker need not be
upgraded together. What is ours alone is under `culm`.
"""

import json
import math
from typing import Final, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.wire.codec import Json, printable

PROVISION_BYTES_MAX: Final = 8 << 20
PROVISION_VERSION: Final = 2
DEPTH_MAX: Final = 4  # Of a tree, unless a document says less.
SECONDS_MAX: Final = 10 * 365 * 86_400.0  # No timer takes any number.
IDLE_S: Final = 300.0
ACCEPT_S: Final = 120.0
ExecutorKind = Literal["echo", "bamboo_runtime", "cli_adapter", "claude_code", "codex"]
KINDS: Final = get_args(ExecutorKind)
WORDS_CHARS_MAX: Final = 500  # Of what the reader of JSON has to say.
_REQUESTED: Final = ("default", "bypass", "auto")
_INT_MAX: Final = (1 << 31) - 1  # Of a process or a descriptor.
_EFFECTIVE: Final = ("default", "plan", "accept_edits", "dont_ask", "bypass", "auto")


class BadProvision(Exception):
    """It cannot be worked with. Says why in one line."""


class Identity(Struct, frozen=True, omit_defaults=True):
    child_id: str
    parent_id: str | None = None
    project_key: str | None = None
    role: str = ""
    depth: int = 0  # 0 is the root; a direct worker of it is 1.


class EchoKind(Struct, frozen=True, tag_field="kind", tag="echo"):
    pass


class RuntimeKind(Struct, frozen=True, tag_field="kind", tag="bamboo_runtime"):
    pass


class CliKind(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="cli_adapter"):
    command: str
    args: list[str] = []
    # Ours; a foreign host leaves them out.
    profile: str = ""  # claude, codex, crush: how that program is spoken to.
    input: Literal["stdin", "argument"] = "stdin"
    output: Literal["lines", "json"] = "lines"


class ClaudeKind(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="claude_code"):
    binary: str | None = None
    model: str | None = None
    permission_mode: str | None = None
    inherit_user_config: bool = False
    forward_env: list[str] = []


class CodexKind(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="codex"):
    binary: str | None = None
    model: str | None = None
    mode: str | None = None
    sandbox: str | None = None
    inherit_user_config: bool = False
    auth_mode: str | None = None
    base_url: str | None = None
    wire_api: str | None = None
    provider_key_ref: str | None = None
    forward_env: list[str] = []
    approval_policy: str | None = None
    network_access: bool | None = None
    allow_danger_bypass: bool = False
    permission_profile: str | None = None
    workspace_owned: bool = False


AnyKind = EchoKind | RuntimeKind | CliKind | ClaudeKind | CodexKind


class Bus(Struct, frozen=True):
    endpoint: str
    token: str

    def __repr__(self) -> str:
        return f"Bus({self.endpoint!r}, …)"


class OwnerStamp(Struct, frozen=True, omit_defaults=True):
    """The process that a worker must not outlive."""

    process_id: int
    instance_id: str
    worker_spawned_at: str
    process_start_id: int | str | None = None  # Ours are clock ticks since the machine started.
    session_id: str | None = None


class ModelName(Struct, frozen=True):
    provider: str
    model: str


class ProvisionLimits(Struct, frozen=True, omit_defaults=True):
    run_timeout_secs: float | None = None
    idle_timeout_secs: float | None = None
    max_rounds: int | None = None


class Credential(Struct, frozen=True, omit_defaults=True):
    provider: str
    api_key: str
    base_url: str | None = None
    provider_type: str | None = None
    credential_ref: str | None = None

    def __repr__(self) -> str:
        return f"Credential({self.provider!r}, …)"


class Secrets(Struct, frozen=True, omit_defaults=True):
    provider_credentials: list[Credential] = []
    worker_auth_token: str | None = None

    def __repr__(self) -> str:
        return "Secrets(…)"


class LocalPlacement(Struct, frozen=True, tag_field="kind", tag="local"):
    pass


class RemotePlacement(Struct, frozen=True, tag_field="kind", tag="remote"):
    endpoint: str


class SchedulablePlacement(Struct, frozen=True, tag_field="kind", tag="schedulable"):
    pool: str


Placement = LocalPlacement | RemotePlacement | SchedulablePlacement


class Capabilities(Struct, frozen=True, omit_defaults=True):
    mcp: Json | UnsetType = UNSET
    skills_dir: str | None = None
    mcp_proxy: Json | UnsetType = UNSET
    enforce_permissions: bool = False
    nested_spawn: bool = False
    max_spawn_depth: int | None = None
    bypass: bool = False
    no_human_approver: bool = False
    guardian_read_only: bool = False
    auto_approve_permissions: bool = False
    permission_requested_mode: str = ""
    permission_effective_mode: str = ""
    read_only: bool = False
    initial_input_release_required: bool = False
    child_creation_identity: bool = False
    required_child_context: bool = False
    native_tool_ceiling_required: bool = False
    native_tool_ceiling: Json | UnsetType = UNSET

    def __repr__(self) -> str:
        # The way to MCP is one with a token.
        return f"Capabilities(mode={self.mode!r}, is_read_only={self.is_read_only}, …)"

    @property
    def is_read_only(self) -> bool:
        """By its old name or by its new one."""
        return self.read_only or self.guardian_read_only

    @property
    def depth_max(self) -> int:
        """Of the tree: who is so deep starts no other."""
        return DEPTH_MAX if self.max_spawn_depth is None else self.max_spawn_depth

    @property
    def mode(self) -> str:
        """The permission mode in effect: as it was named, else by the older booleans."""
        if self.permission_effective_mode:
            return self.permission_effective_mode
        if self.auto_approve_permissions:
            return "auto"
        return "bypass" if self.bypass else "default"


class ProvisionContext(Struct, frozen=True, omit_defaults=True):
    """Files that agents read first: of the project, and of the user wherever they are."""

    project: list[str] = []
    user: list[str] = []


class CulmExtension(Struct, frozen=True, omit_defaults=True):
    """What only our parent says to our worker; what is Json is checked by who works with it."""

    control_fd: int | None = None  # The socket to whoever launched it; its end is the owner's.
    host_calls: bool = False  # Host calls, and receipts of steering, are understood above.
    env: dict[str, str] | None = None  # Of the processes that tools start.
    prompt: str = ""  # A role's words, behind the system prompt.
    roles: str = ""  # What its model is told of the roles that it may start agents as.
    # A `model.choice.Chosen`, with how to reach it and what it costs: instead of credentials.
    chosen: Json | UnsetType = UNSET
    questions: bool = False  # People may be asked questions, by a host call.
    ask_s: float | None = None  # So long somebody may think about an ask.
    approve: Json | UnsetType = UNSET  # What decides instead of a person, as with a prompt.
    # As in the configuration of the workspace, as far as it is trusted.
    rules: Json | UnsetType = UNSET
    # Paths in rules that deny or ask are not only from the workspace, but from these, too.
    rules_also_from: list[str] = []
    hooks: Json | UnsetType = UNSET
    own_tools: Json | UnsetType = UNSET
    allowed_tools: list[str] = []  # Need not be asked about.
    context_paths: ProvisionContext | None = None  # None are the usual ones.
    compacts: bool = True  # A conversation that becomes too long is summarized.

    def __repr__(self) -> str:
        # An environment is full of keys, and a chosen model has one.
        return f"Extension(control_fd={self.control_fd}, host_calls={self.host_calls}, …)"


class Provision(Struct, frozen=True, omit_defaults=True):
    version: int
    identity: Identity
    executor: AnyKind
    fabric_dir: str
    bus: Bus | None = None
    owner: OwnerStamp | None = None
    storage_dir: str | None = None
    workspace: str | None = None
    model: ModelName | None = None
    disabled_tools: list[str] | None = None
    limits: ProvisionLimits = ProvisionLimits()
    secrets: Secrets = Secrets()
    reusable: bool = False
    placement: Placement = field(default_factory=LocalPlacement)
    capabilities: Capabilities = Capabilities()
    culm: CulmExtension = CulmExtension()


_decoder = msgspec.json.Decoder(Provision)
_encoder = msgspec.json.Encoder()


def parse_provision(data: bytes) -> Provision:
    """Raises `BadProvision`, which never repeats what the document says of secrets."""
    if len(data) > PROVISION_BYTES_MAX:
        raise BadProvision(f"the provision has more than {PROVISION_BYTES_MAX >> 20} MiB")
    if not data.strip():
        raise BadProvision("there is no provision on standard input")
    try:
        provision = _decoder.decode(data)
    except msgspec.ValidationError as exc:
        words = printable(str(exc))[:WORDS_CHARS_MAX]
        if "$.executor.kind" in words:
            words += f"; this worker knows {', '.join(KINDS)}"
        raise BadProvision(f"the provision cannot be used: {words}") from exc
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise BadProvision("the provision is not valid JSON") from exc
    check_provision(provision)
    # What is written again to the very same bytes has no key twice: so are all of ours.
    if _encode(provision) != data:
        _refuse_duplicates(data)
    return provision


def encode_provision(provision: Provision) -> bytes:
    """Raises `BadProvision` for what no worker would take."""
    check_provision(provision)
    data = _encode(provision)
    if len(data) > PROVISION_BYTES_MAX:
        raise BadProvision(f"the provision has more than {PROVISION_BYTES_MAX >> 20} MiB")
    return data


def _encode(provision: Provision) -> bytes:
    """Whole seconds are written as whole numbers: workers of another kind take no others."""
    limits = provision.limits
    written = replace(
        limits,
        run_timeout_secs=_whole(limits.run_timeout_secs),
        idle_timeout_secs=_whole(limits.idle_timeout_secs),
    )
    return _encoder.encode(replace(provision, limits=written))


def _whole(seconds: float | None) -> float | None:
    return int(seconds) if seconds is not None and seconds % 1 == 0 and seconds < 1e15 else seconds


def _refuse_duplicates(data: bytes) -> None:
    def check(pairs: list[tuple[str, Json]]) -> Json:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BadProvision("the provision has a key twice, and so two readings")
        return found

    try:
        json.loads(data, object_pairs_hook=check)
    except (ValueError, RecursionError) as exc:
        raise BadProvision("the provision is not valid JSON") from exc


# --- what it may not say


def check_provision(provision: Provision) -> None:
    """Raises `BadProvision`."""
    if provision.version < 1:
        raise BadProvision("version is not a version")
    if provision.bus is not None:
        raise BadProvision("a bus is not supported: leave out `bus`, and connect directly")
    _check_identity(provision.identity)
    _check_owner(provision.owner)
    _check_places(provision)
    _check_limits(provision.limits)
    _check_capabilities(provision.capabilities)
    _check_extension(provision.culm)


def _check_identity(identity: Identity) -> None:
    if not is_safe_stem(identity.child_id):
        raise BadProvision(
            "identity.child_id is no safe id: letters, digits, _ - . and no .., "
            f"at most {STEM_CHARS_MAX}"
        )
    if identity.depth < 0:
        raise BadProvision("identity.depth is negative")


def _check_owner(owner: OwnerStamp | None) -> None:
    if owner is None:
        return
    if not 1 <= owner.process_id <= _INT_MAX:
        raise BadProvision("owner.process_id is no process")
    if isinstance(owner.process_start_id, int) and owner.process_start_id < 0:
        raise BadProvision("owner.process_start_id is negative")


def _check_places(provision: Provision) -> None:
    places = {
        "fabric_dir": provision.fabric_dir,
        "storage_dir": provision.storage_dir,
        "workspace": provision.workspace,
    }
    for name, place in places.items():
        if place is not None and (not place or "\0" in place):
            raise BadProvision(f"{name} is no path")


def _check_limits(limits: ProvisionLimits) -> None:
    for name, value in (
        ("run_timeout_secs", limits.run_timeout_secs),
        ("idle_timeout_secs", limits.idle_timeout_secs),
        ("max_rounds", limits.max_rounds),
    ):
        # What is not above 0 is also what is no number.
        if value is not None and (not value > 0 or value == math.inf):
            raise BadProvision(f"limits.{name} must be a number above 0")


def _check_extension(given: CulmExtension) -> None:
    if given.control_fd is not None and not 3 <= given.control_fd <= _INT_MAX:
        raise BadProvision("culm.control_fd is not a descriptor of its own")
    if given.ask_s is not None and not 0 < given.ask_s <= SECONDS_MAX:
        raise BadProvision("culm.ask_s must be a number above 0")


def _check_capabilities(given: Capabilities) -> None:
    if given.mcp not in (UNSET, None) and given.mcp_proxy not in (UNSET, None):
        raise BadProvision("capabilities.mcp and mcp_proxy exclude each other")
    if given.max_spawn_depth is not None and given.max_spawn_depth < 0:
        raise BadProvision("capabilities.max_spawn_depth is negative")
    # Each narrows what a worker may do. To pass over what is not known here would widen it.
    for name, is_given in (
        ("initial_input_release_required", given.initial_input_release_required),
        ("child_creation_identity", given.child_creation_identity),
        ("required_child_context", given.required_child_context),
        ("native_tool_ceiling_required", given.native_tool_ceiling_required),
        ("native_tool_ceiling", given.native_tool_ceiling not in (UNSET, None)),
    ):
        if is_given:
            raise BadProvision(f"capabilities.{name} is not supported")
    _check_modes(given)


def _check_modes(given: Capabilities) -> None:
    """Both modes or none, and the older booleans as the modes have it."""
    requested, effective = given.permission_requested_mode, given.permission_effective_mode
    if given.bypass and given.auto_approve_permissions:
        raise BadProvision("capabilities.bypass and auto_approve_permissions exclude each other")
    if bool(requested) != bool(effective):
        raise BadProvision(
            "capabilities.permission_requested_mode and permission_effective_mode "
            "must be provided together"
        )
    if not requested:
        return
    if requested not in _REQUESTED or effective not in _EFFECTIVE:
        raise BadProvision("capabilities name a permission mode that there is not")
    # A configured `plan` outweighs every request; else a request outweighs what is configured.
    may_be = ("default", effective) if effective in ("auto", "bypass") else ("default",)
    if effective != "plan" and requested not in may_be:
        raise BadProvision("the requested and the effective permission mode do not fit")
    is_auto = "auto" in (requested, effective)
    if (given.bypass, given.auto_approve_permissions) != (effective == "bypass", is_auto):
        raise BadProvision("the permission modes and the booleans beside them disagree")
