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


def read_settings(file: Path | None, given: Mapping[str, float | None]) -> Settings:
    """Settings from a JSON file, overridden by what was `given`; raises `InvalidRequest`."""
    settings = Settings()
    if file is not None:
        try:
            settings = msgspec.json.decode(file.read_bytes(), type=Settings)
        except OSError as exc:
            raise InvalidRequest(f"cannot read {file}: {exc.strerror}") from exc
        except msgspec.ValidationError as exc:
            hint = "docs/settings.md lists the settings"
            raise InvalidRequest(f"{file}: {exc}", hint=hint) from exc
        except msgspec.DecodeError as exc:
            hint = 'a JSON object is wanted, for example {"linger_s": 600}'
            raise InvalidRequest(f"{file} is not JSON: {exc}", hint=hint) from exc
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a number of seconds, not {value}")
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
