"""Settings of a server, read once at start; and where its files are."""

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from culm.errors import InvalidRequest

DETACHED = "CULM_DETACHED"  # Set for a server that a client started: nobody reads what it prints.

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things are kept and how much of them. docs/settings.md is made from this."""

    create_grace_s: Annotated[
        Seconds, Meta(description="A client has this long to open its event stream.")
    ] = 30.0  # The Crush server's own value; its client relies on it.
    detach_grace_s: Annotated[
        Seconds, Meta(description="A client whose last stream dropped has this long to come back.")
    ] = 10.0
    linger_s: Annotated[
        Seconds, Meta(description="The server stays this long after its last workspace closed.")
    ] = 60.0
    abandoned_runs_s: Annotated[
        Seconds, Meta(description="Live runs that no client watches end after this.")
    ] = 3600.0
    teardown_s: Annotated[
        Seconds, Meta(description="Closing a workspace takes at most this, all stages together.")
    ] = 20.0
    retention_s: Annotated[
        Seconds, Meta(description="Events older than this are trimmed from the log.")
    ] = 7 * 86400.0
    retention_events: Annotated[
        Count, Meta(description="The log keeps at most about this many events per workspace.")
    ] = 200_000
    clients_max: Annotated[Count, Meta(description="Clients per workspace.")] = 1000
    streams_max: Annotated[Count, Meta(description="Event streams per workspace.")] = 2000
    stream_buffer_bytes: Annotated[
        Count,
        Meta(
            description="A client with more than this unread is slow: its live feed stops and it "
            "is fed from the log as it reads."
        ),
    ] = 1 << 20
    runs_max: Annotated[Count, Meta(description="Live runs per workspace.")] = 1000
    queue_max: Annotated[Count, Meta(description="Runs that wait in one session.")] = 100
    run_wall_s: Annotated[
        Seconds, Meta(description="A run ends after this, `budget`; 0 is never.")
    ] = 6 * 3600.0
    run_steps_max: Annotated[
        int, Meta(ge=0, description="A run has at most this many steps; 0 is any number.")
    ] = 1000
    run_tokens_max: Annotated[
        int, Meta(ge=0, description="A run uses at most about this many tokens; 0 is any number.")
    ] = 0
    run_cost_max: Annotated[
        float, Meta(ge=0, description="A run costs at most about this many USD; 0 is any sum.")
    ] = 0.0
    agents_depth_max: Annotated[
        Count, Meta(description="Agents that agents start nest at most this deep.")
    ] = 4  # As foreign workers have it.
    agents_children_max: Annotated[
        Count, Meta(description="An agent has at most this many others at work for it.")
    ] = 100
    agents_at_once: Annotated[
        Count, Meta(description="So many agents of one tree work at once; the others wait.")
    ] = 50  # Of some 5 MB each.
    away_s_max: Annotated[
        Seconds,
        Meta(description="Accepted runs go on by themselves if no server was away for longer."),
    ] = 600.0
    model_first_byte_s: Annotated[
        Seconds,
        Meta(description="A model that has not begun to answer after this long is asked again."),
    ] = 300.0  # A local server may load the model first.
    model_stall_s: Annotated[
        Seconds,
        Meta(
            description="A model that sends nothing for this long within an answer is asked again."
        ),
    ] = 120.0
    workspaces_max: Annotated[Count, Meta(description="Open workspaces per server.")] = 256
    sessions_max: Annotated[Count, Meta(description="Sessions per workspace.")] = 100_000


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `culm serve` was asked for."""

    data_dir: Path
    hosts: tuple[str, ...] = ()
    token_file: Path | None = None
    auth: bool = True
    allow_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    plaintext_network: bool = False
    settings: Settings = field(default_factory=Settings)
    config_file: Path | None = None  # The user's; providers and models are read in it.


def default_data_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "culm"


def default_state_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "culm"


def default_host(env: Mapping[str, str]) -> str:
    """The per-user socket: in the runtime directory, else in a private one under temp."""
    uid = os.getuid()
    if runtime := env.get("XDG_RUNTIME_DIR"):
        return f"unix://{Path(runtime) / f'culm-{uid}.sock'}"
    return f"unix://{Path(tempfile.gettempdir()) / f'culm-{uid}' / 'culm.sock'}"


def default_config_file(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "culm" / "culm.json"


def settings_with(settings: Settings, given: Mapping[str, float | None]) -> Settings:
    """The settings, overridden by what was `given`; raises `InvalidRequest`."""
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a number of seconds, not {value}")
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
