"""The provision document: everything a worker is given, once, on its standard input.

Unknown fields are ignored and missing ones have defaults, so host and worker need not be upgraded
together. Our own extensions are under `culm`.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from culm.files import STEM_CHARS_MAX, is_safe_stem
from culm.redaction import RedactedStruct
from culm.wire.codec import Json, printable

PROVISION_BYTES_MAX: Final = 8 << 20
PROVISION_VERSION: Final = 2
DEPTH_MAX: Final = 4  # For a tree, unless a document sets a lower limit.
SECONDS_MAX: Final = 10 * 365 * 86_400.0  # Timers do not accept arbitrary numbers.
IDLE_S: Final = 300.0
ACCEPT_S: Final = 120.0
ExecutorKind = Literal["echo", "bamboo_runtime", "cli_adapter", "claude_code", "codex"]
KINDS: Final = get_args(ExecutorKind)
ERROR_CHARS_MAX: Final = 500  # For the error text of the JSON decoder.
_REQUESTED: Final = ("default", "bypass", "auto")
_INT_MAX: Final = (1 << 31) - 1  # For a process id or a descriptor.
_EFFECTIVE: Final = ("default", "plan", "accept_edits", "dont_ask", "bypass", "auto")
_NEEDED: Final = frozenset(
    (
        *("HOME", "PATH", "SHELL", "TERM", "LANG", "LANGUAGE", "TMPDIR", "TZ", "USER", "LOGNAME"),
        *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    )
)


class BadProvision(Exception):
    """The document cannot be used. The message gives the reason in one line."""


class Identity(Struct, frozen=True, omit_defaults=True):
    child_id: str
    parent_id: str | None = None
    project_key: str | None = None
    role: str = ""
    depth: int = 0  # 0 is the root; its direct workers are 1.


class EchoKind(Struct, frozen=True, tag_field="kind", tag="echo"):
    pass


class RuntimeKind(Struct, frozen=True, tag_field="kind", tag="bamboo_runtime"):
    pass


class CliKind(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="cli_adapter"):
    command: str
    args: list[str] = []
    # Our extensions; a foreign host leaves them out.
    profile: str = ""  # claude, codex or crush: the command line and output format to use.
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
    process_start_id: int | str | None = None  # Ours are clock ticks since boot.
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


class Secrets(RedactedStruct, frozen=True, omit_defaults=True):
    provider_credentials: list[Credential] = field(default_factory=list[Credential])
    worker_auth_token: str | None = None


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
        # The MCP settings contain a token.
        return f"Capabilities(mode={self.mode!r}, is_read_only={self.is_read_only}, …)"

    @property
    def is_read_only(self) -> bool:
        """True by either its old or its new name."""
        return self.read_only or self.guardian_read_only

    @property
    def depth_max(self) -> int:
        """Maximum depth of the tree: an agent at this depth starts no others."""
        return DEPTH_MAX if self.max_spawn_depth is None else self.max_spawn_depth

    @property
    def mode(self) -> str:
        """The effective permission mode: the named one, else the one the older booleans imply."""
        if self.permission_effective_mode:
            return self.permission_effective_mode
        if self.auto_approve_permissions:
            return "auto"
        return "bypass" if self.bypass else "default"


class ProvisionContext(Struct, frozen=True, omit_defaults=True):
    """Context files that agents read first: those of the project and those of the user."""

    project: list[str] = []
    user: list[str] = []


class CulmExtension(Struct, frozen=True, omit_defaults=True):
    """Settings from our host for our worker; Json values are checked where they are used."""

    # The socket to the launching process; its end means that the owner is gone.
    control_fd: int | None = None
    host_calls: bool = False  # The host understands host calls and receipts of steering messages.
    env: dict[str, str] | None = None  # For the processes that tools start.
    prompt: str = ""  # The text of a role, appended to the system prompt.
    roles: str = ""  # The description of the roles as which its model may start agents.
    # A `model.choice.ChosenModel` with endpoint and prices, used instead of credentials.
    chosen: Json | UnsetType = UNSET
    questions: bool = False  # Questions to people are possible, by a host call.
    ask_s: float | None = None  # Time limit for the answer to an ask.
    approve: Json | UnsetType = UNSET  # An automatic decision, as with a prompt.
    # As in the configuration of the workspace, as far as it is trusted.
    rules: Json | UnsetType = UNSET
    # Deny and ask rules also apply to paths relative to these directories.
    rules_also_from: list[str] = []
    hooks: Json | UnsetType = UNSET
    own_tools: Json | UnsetType = UNSET
    allowed_tools: list[str] = []  # Allowed without an ask.
    context_paths: ProvisionContext | None = None  # None means the default files.
    compacts: bool = True  # Summarize a conversation that becomes too long.

    def __repr__(self) -> str:
        # An environment may contain keys, and a chosen model has one.
        return f"CulmExtension(control_fd={self.control_fd}, host_calls={self.host_calls}, …)"


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
    """Raises `BadProvision`, whose message never repeats secrets of the document."""
    if len(data) > PROVISION_BYTES_MAX:
        raise BadProvision(f"the provision has more than {PROVISION_BYTES_MAX >> 20} MiB")
    if not data.strip():
        raise BadProvision("there is no provision on standard input")
    try:
        provision = _decoder.decode(data)
    except msgspec.ValidationError as exc:
        text = printable(str(exc))[:ERROR_CHARS_MAX]
        if "$.executor.kind" in text:
            text += f"; this worker knows {', '.join(KINDS)}"
        raise BadProvision(f"the provision cannot be used: {text}") from exc
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise BadProvision("the provision is not valid JSON") from exc
    check_provision(provision)
    # A document that encodes to the same bytes has no duplicate key; all of ours do.
    if _encode(provision) != data:
        _refuse_duplicates(data)
    return provision


def encode_provision(provision: Provision) -> bytes:
    """Raises `BadProvision` for a document that no worker would accept."""
    check_provision(provision)
    data = _encode(provision)
    if len(data) > PROVISION_BYTES_MAX:
        raise BadProvision(f"the provision has more than {PROVISION_BYTES_MAX >> 20} MiB")
    return data


def _encode(provision: Provision) -> bytes:
    """Encode whole seconds as integers: workers of another kind accept no other numbers."""
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
            raise BadProvision("the provision contains a key twice")
        return found

    try:
        json.loads(data, object_pairs_hook=check)
    except (ValueError, RecursionError) as exc:
        raise BadProvision("the provision is not valid JSON") from exc


# --- checks


def check_provision(provision: Provision) -> None:
    """Raises `BadProvision`."""
    if provision.version < 1:
        raise BadProvision("version must be at least 1")
    if provision.bus is not None:
        raise BadProvision("a bus is not supported: leave out `bus` and connect directly")
    _check_identity(provision.identity)
    _check_owner(provision.owner)
    _check_paths(provision)
    _check_limits(provision.limits)
    _check_capabilities(provision.capabilities)
    _check_extension(provision.culm)


def _check_identity(identity: Identity) -> None:
    if not is_safe_stem(identity.child_id):
        raise BadProvision(
            "identity.child_id is not a safe id: use letters, digits, _ - . and no .., "
            f"at most {STEM_CHARS_MAX}"
        )
    if identity.depth < 0:
        raise BadProvision("identity.depth is negative")


def _check_owner(owner: OwnerStamp | None) -> None:
    if owner is None:
        return
    if not 1 <= owner.process_id <= _INT_MAX:
        raise BadProvision("owner.process_id is not a process id")
    if isinstance(owner.process_start_id, int) and owner.process_start_id < 0:
        raise BadProvision("owner.process_start_id is negative")


def _check_paths(provision: Provision) -> None:
    paths = {
        "fabric_dir": provision.fabric_dir,
        "storage_dir": provision.storage_dir,
        "workspace": provision.workspace,
    }
    for name, path in paths.items():
        if path is not None and (not path or "\0" in path):
            raise BadProvision(f"{name} is not a path")


def _check_limits(limits: ProvisionLimits) -> None:
    for name, value in (
        ("run_timeout_secs", limits.run_timeout_secs),
        ("idle_timeout_secs", limits.idle_timeout_secs),
        ("max_rounds", limits.max_rounds),
    ):
        # Written as `not value > 0` to exclude NaN, too.
        if value is not None and (not value > 0 or value == math.inf):
            raise BadProvision(f"limits.{name} must be a number above 0")


def _check_extension(given: CulmExtension) -> None:
    if given.control_fd is not None and not 3 <= given.control_fd <= _INT_MAX:
        raise BadProvision("culm.control_fd must be a descriptor above 2")
    if given.ask_s is not None and not 0 < given.ask_s <= SECONDS_MAX:
        raise BadProvision("culm.ask_s must be a number above 0")


def _check_capabilities(given: Capabilities) -> None:
    if given.mcp not in (UNSET, None) and given.mcp_proxy not in (UNSET, None):
        raise BadProvision("capabilities.mcp and mcp_proxy exclude each other")
    if given.max_spawn_depth is not None and given.max_spawn_depth < 0:
        raise BadProvision("capabilities.max_spawn_depth is negative")
    # Each restricts the worker. To ignore one that is unknown here would lift the restriction.
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
    """Require both modes or none, and older booleans that agree with them."""
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
        raise BadProvision("capabilities contain an unknown permission mode")
    # A configured `plan` overrides every request; otherwise a request overrides the configuration.
    may_be = ("default", effective) if effective in ("auto", "bypass") else ("default",)
    if effective != "plan" and requested not in may_be:
        raise BadProvision("the requested and the effective permission mode are inconsistent")
    is_auto = "auto" in (requested, effective)
    if (given.bypass, given.auto_approve_permissions) != (effective == "bypass", is_auto):
        raise BadProvision("the permission modes contradict the older booleans")


# --- limits, storage and environment of a worker


class WorkerLimits(Struct, frozen=True):
    """The limits of a worker's runs. Its host enforces them, too: not every worker does."""

    host_calls: bool = False  # The host is ours and accepts host calls.
    depth: int = 1  # The worker's depth in its tree ...
    depth_max: int = DEPTH_MAX  # ... where an agent at this depth starts no others.
    run_s: float | None = None  # Limit for a run.

    def may_call(self, args: Mapping[str, Json]) -> bool:
        """Return False for a host call that would exceed the depth of the tree."""
        return args.get("op") != "agent" or self.depth < self.depth_max


NO_LIMITS: Final = WorkerLimits()


def limits_of(provision: Provision) -> WorkerLimits:
    run_s = provision.limits.run_timeout_secs
    return WorkerLimits(
        host_calls=provision.culm.host_calls,
        depth=provision.identity.depth,
        depth_max=provision.capabilities.depth_max,
        run_s=None if run_s is None else min(run_s, SECONDS_MAX),
    )


def storage_beside(discovery_dir: Path, child_id: str) -> Path:
    """Default storage of a worker: next to the discovery directory in which it is published."""
    return discovery_dir.absolute().parent / "workers" / child_id


def storage_of(provision: Provision) -> Path:
    if provision.storage_dir is not None:
        return Path(provision.storage_dir)
    return storage_beside(Path(provision.fabric_dir), provision.identity.child_id)


def keyless_env(environ: Mapping[str, str], also: Collection[str] = ()) -> dict[str, str]:
    """Return the environment a program needs on this machine, without keys except those named."""
    return {
        name: value
        for name, value in environ.items()
        if name in _NEEDED or name.startswith(("LC_", "XDG_")) or name in also
    }
