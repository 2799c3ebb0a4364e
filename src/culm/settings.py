"""Settings of a server, read once at start, and the default paths of its files."""

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from culm.errors import InvalidRequest

DETACHED = "CULM_DETACHED"  # Set for a server that a client started: its output is not read.

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times and limits. docs/settings.md is generated from this class."""

    create_grace_s: Annotated[
        Seconds, Meta(description="Time for a client to open its event stream.")
    ] = 30.0  # The Crush server's own value; its client relies on it.
    detach_grace_s: Annotated[
        Seconds, Meta(description="Time for a client to reconnect after its last stream dropped.")
    ] = 10.0
    linger_s: Annotated[
        Seconds, Meta(description="Time the server keeps running after its last workspace closed.")
    ] = 60.0
    abandoned_runs_s: Annotated[
        Seconds, Meta(description="Time after which live runs that no client watches are ended.")
    ] = 3600.0
    teardown_s: Annotated[
        Seconds, Meta(description="Maximum time to close a workspace, all stages together.")
    ] = 20.0
    retention_s: Annotated[
        Seconds, Meta(description="Age after which events are removed from the log.")
    ] = 7 * 86400.0
    retention_events: Annotated[
        Count, Meta(description="Maximum events in the log of a workspace, approximately.")
    ] = 200_000
    clients_max: Annotated[Count, Meta(description="Maximum clients per workspace.")] = 1000
    streams_max: Annotated[Count, Meta(description="Maximum event streams per workspace.")] = 2000
    stream_buffer_bytes: Annotated[
        Count,
        Meta(
            description="Unread bytes after which a client counts as slow: its live feed stops, "
            "and it receives events from the log as it reads."
        ),
    ] = 1 << 20
    runs_max: Annotated[Count, Meta(description="Maximum live runs per workspace.")] = 1000
    queue_max: Annotated[Count, Meta(description="Maximum queued runs per session.")] = 100
    run_wall_s: Annotated[
        Seconds, Meta(description="Time limit of a run, which then ends as `budget`; 0 means none.")
    ] = 6 * 3600.0
    run_steps_max: Annotated[
        int, Meta(ge=0, description="Maximum steps of a run; 0 means no limit.")
    ] = 1000
    run_tokens_max: Annotated[
        int, Meta(ge=0, description="Maximum tokens of a run, approximately; 0 means no limit.")
    ] = 0
    run_cost_max: Annotated[
        float,
        Meta(ge=0, description="Maximum cost of a run in USD, approximately; 0 means no limit."),
    ] = 0.0
    agents_depth_max: Annotated[Count, Meta(description="Maximum nesting depth of sub-agents.")] = (
        4  # The same as in foreign workers.
    )
    agents_children_max: Annotated[
        Count, Meta(description="Maximum active sub-agents per agent.")
    ] = 100
    agents_at_once: Annotated[
        Count, Meta(description="Maximum agents of one tree that work at once; the others wait.")
    ] = 50  # Each takes some 5 MB.
    prepare_workers_s: Annotated[
        Seconds,
        Meta(
            description="Time after a workspace was opened at which the process is started that "
            "makes workers start fast; 0 means that the first agent starts it."
        ),
    ] = 1.0  # The first requests need the processor.
    away_s_max: Annotated[
        Seconds,
        Meta(description="Maximum time without a server after which accepted runs still resume."),
    ] = 600.0
    model_first_byte_s: Annotated[
        Seconds,
        Meta(description="Time to wait for the first byte of a model's answer before a retry."),
    ] = 300.0  # A local server may load the model first.
    model_stall_s: Annotated[
        Seconds,
        Meta(description="Time without data within a model's answer before a retry."),
    ] = 120.0
    workspaces_max: Annotated[Count, Meta(description="Maximum open workspaces per server.")] = 256
    sessions_max: Annotated[Count, Meta(description="Maximum sessions per workspace.")] = 100_000


class ServeOptions(Struct, frozen=True):
    """The options of `culm serve`."""

    data_dir: Path
    hosts: tuple[str, ...] = ()
    token_file: Path | None = None
    auth: bool = True
    allow_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext_network: bool = False
    settings: Settings = field(default_factory=Settings)
    config_file: Path | None = None  # The user's, with providers and models.


def default_data_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "culm"


def default_state_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "culm"


def default_host(env: Mapping[str, str]) -> str:
    """The per-user socket, in the runtime directory or else in a private temporary one."""
    uid = os.getuid()
    if runtime := env.get("XDG_RUNTIME_DIR"):
        return f"unix://{Path(runtime) / f'culm-{uid}.sock'}"
    return f"unix://{Path(tempfile.gettempdir()) / f'culm-{uid}' / 'culm.sock'}"


def default_config_file(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "culm" / "culm.json"


def settings_with(settings: Settings, changes: Mapping[str, float | None]) -> Settings:
    """The settings with these `changes`, except for None; raises `InvalidRequest`."""
    for name, value in changes.items():
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a number of seconds, not {value}")
    return replace(
        settings, **{name: value for name, value in changes.items() if value is not None}
    )
