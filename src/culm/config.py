"""Settings of a server, read once at start; and where its files are."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from culm.errors import InvalidRequest


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things are kept and how much of them; every bound has its reason here."""

    create_grace_s: float = 30.0  # The Crush server's own value; its client relies on it.
    detach_grace_s: float = 10.0  # Long enough for a reconnect, short enough to be tidy.
    linger_s: float = 60.0  # A server without workspaces waits this long for the next one.
    abandoned_runs_s: float = 3600.0  # Live runs that no client watches end after this.
    teardown_s: float = 20.0  # All stages of closing one workspace together.
    retention_s: float = 7 * 86400.0  # Events older than this are trimmed ...
    retention_events: int = 200_000  # ... and so are the oldest beyond this count.
    streams_max: int = 2000  # Per workspace.
    # Beyond this a client is slow: its live feed stops and it is fed from the log as it drains.
    stream_buffer_bytes: int = 1 << 20
    workspaces_max: int = 256
    sessions_max: int = 100_000  # Per workspace, children included.


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `culm serve` was asked for."""

    data_dir: Path
    state_dir: Path
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
            raise InvalidRequest(f"{file}: {exc}", hint="docs/settings.md lists them") from exc
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"{file} is not JSON: {exc}") from exc
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
