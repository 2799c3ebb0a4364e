"""Providers without configuration: keys in the environment, and model servers on this machine.

They form the lowest layer of the configuration. Keys are references, so the key itself stays in
the environment. The last provider is `offline`, which is always available.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from culm.clock import Clock
from culm.config.checking import Document
from culm.model.catalog import KnownProvider, known_providers

log = logging.getLogger(__name__)

OFF = "CULM_NO_DISCOVERY"
OFFLINE = "offline"
PROBE_S = 0.3  # For all servers together; a running one answers in a tenth of it.
CONNECT_S = 0.05  # To a port of this machine, where a refusal takes a tenth of a millisecond.
KEPT_S = 60.0  # The lifetime of a cached answer.
ANSWER_BYTES_MAX = 1 << 20
ENVIRONMENTS_MAX = 16  # In the cache.
MODELS_MAX = 200  # Per server.
_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"


class LocalServer(NamedTuple):
    id: str
    name: str
    port: int
    url_env: str


# With their default ports, the most preferred first.
LOCAL_SERVERS = (
    LocalServer("ollama", "Ollama", 11434, "OLLAMA_HOST"),
    LocalServer("lmstudio", "LM Studio", 1234, "LMSTUDIO_BASE_URL"),
    LocalServer("llamacpp", "llama.cpp", 8080, "LLAMACPP_BASE_URL"),
    LocalServer("vllm", "vLLM", 8000, "VLLM_BASE_URL"),
)


class FoundProviders(Struct, frozen=True):
    """Discovered providers, the most preferred first."""

    providers: Document

    @property
    def document(self) -> Document:
        return {"providers": self.providers}


OFFLINE_PROVIDER: Document = {
    "id": OFFLINE,
    "name": "Offline",
    "type": OFFLINE,
    "models": [
        {
            "id": OFFLINE,
            "name": "culm offline (no LLM)",
            "context_window": 200_000,
            "default_max_tokens": 8192,
        }
    ],
}
NOTHING = FoundProviders({OFFLINE: OFFLINE_PROVIDER})


def is_off(env: Mapping[str, str]) -> bool:
    return env.get(OFF, "") not in ("", "0", "false")


# --- keys


def providers_by_key(env: Mapping[str, str]) -> Document:
    """A provider for every key in the environment."""
    return {
        known.id: _known(known, env)
        for known in known_providers().values()
        if env.get(known.key_env, "").strip()
    }


def _known(known: KnownProvider, env: Mapping[str, str]) -> Document:
    has_url = bool(env.get(known.url_env, "").strip())
    return {
        "id": known.id,
        "name": known.name,
        "type": known.type,
        "api_key": f"${known.key_env}",
        "base_url": f"${known.url_env}" if has_url else known.base_url,
        "models": [msgspec.to_builtins(model) for model in known.models],
    }


# --- servers on this machine


class _Listed(Struct):
    id: str = ""


class _Listing(Struct):
    data: list[_Listed] = field(default_factory=list[_Listed])


class ServerCandidate(NamedTuple):
    """A server that may be running at this address."""

    server: LocalServer
    url: str
    explicit: bool  # From the environment; else it is the default address.


class LocalServers:
    """Probes local servers, with a short-lived cache for all workspaces."""

    def __init__(self, clock: Clock, *, within_s: float = PROBE_S) -> None:
        self._clock = clock
        self._within_s = within_s
        self._known: dict[tuple[ServerCandidate, ...], tuple[float, Document]] = {}
        self._probing = asyncio.Lock()

    async def find(self, env: Mapping[str, str]) -> Document:
        """The servers that answer, with their models."""
        candidates = server_candidates(env)
        async with self._probing:
            until_s, found = self._known.get(candidates, (0.0, {}))
            now_s = self._clock.monotonic_s()
            if now_s >= until_s:
                found = await _probe_all(candidates, self._within_s)
                self._known[candidates] = (now_s + KEPT_S, found)
                while len(self._known) > ENVIRONMENTS_MAX:
                    del self._known[next(iter(self._known))]
            return found


def server_candidates(env: Mapping[str, str]) -> tuple[ServerCandidate, ...]:
    return tuple(
        _candidate(server, env.get(server.url_env, "").strip()) for server in LOCAL_SERVERS
    )


def _candidate(server: LocalServer, address: str) -> ServerCandidate:
    if not address:
        return ServerCandidate(server, f"http://127.0.0.1:{server.port}/v1", explicit=False)
    if "://" in address:  # A URL without a port means the default port of its scheme.
        url, usual_port = address, 443 if address.startswith("https:") else 80
    else:
        host = f"[{address}]" if address.count(":") > 1 and "[" not in address else address
        url, usual_port = f"http://{host}", server.port
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or usual_port
    except ValueError:
        return ServerCandidate(server, url, explicit=True)  # It will not answer.
    if host in ("0.0.0.0", "::"):  # A listening address, which cannot be connected to.
        host = "127.0.0.1"
    path = parts.path.rstrip("/") or "/v1"
    name = f"[{host}]" if ":" in host else host
    return ServerCandidate(server, f"{parts.scheme}://{name}:{port}{path}", explicit=True)


async def _probe_all(candidates: Sequence[ServerCandidate], within_s: float) -> Document:
    answers: dict[ServerCandidate, list[str]] = {}
    probed = await asyncio.to_thread(_worth_probing, candidates)
    if probed:
        await asyncio.to_thread(import_module, "aiohttp")  # It takes half of the time limit below.
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
            for one in probed:
                group.create_task(_probe(one, answers), name=f"probe {one.server.id}")
    return {
        one.server.id: {
            "id": one.server.id,
            "name": one.server.name,
            "type": "openai-compat",
            "base_url": one.url,
            "models": [{"id": model, "name": model} for model in answers[one]],
        }
        for one in candidates
        if answers.get(one)
    }


def _worth_probing(candidates: Sequence[ServerCandidate]) -> list[ServerCandidate]:
    """The candidates that may answer and may receive prompts."""
    foreign = foreign_ports(_socket_tables(), {0, os.getuid()})
    return [
        one
        for one in candidates
        if one.explicit or (one.server.port not in foreign and not _is_refused(one.server.port))
    ]


def _is_refused(port: int) -> bool:
    """Return True if nothing listens at a port of this machine."""
    with socket.socket() as trial:
        trial.settimeout(CONNECT_S)
        try:
            trial.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # The probe finds out.
        return False


async def _probe(one: ServerCandidate, answers: dict[ServerCandidate, list[str]]) -> None:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
            http.get(f"{one.url}/models", allow_redirects=False) as response,
        ):
            body = await response.content.read(ANSWER_BYTES_MAX)
            while len(body) < ANSWER_BYTES_MAX and (more := await response.content.readany()):
                body += more
            if response.status == 200:
                answers[one] = _models_in(body)
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        log.debug("no model server at %s: %s", one.url, type(exc).__name__)


def _models_in(body: bytes) -> list[str]:
    """The models of a listing; none if another kind of server listens there."""
    try:
        listing = msgspec.json.decode(body, type=_Listing)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    ids = [one.id for one in listing.data if one.id and "embed" not in one.id.lower()]
    return ids[:MODELS_MAX]


def _socket_tables() -> list[str]:
    """The kernel's socket tables; none on systems without these files."""
    tables: list[str] = []
    for file in _SOCKETS:
        with suppress(OSError):
            tables.append(file.read_text())
    return tables


def foreign_ports(tables: Iterable[str], ours: Collection[int]) -> set[int]:
    """Ports on which users other than `ours` listen. They must not receive prompts."""
    foreign: set[int] = set()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        with suppress(ValueError, IndexError):
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[7]) not in ours:
                foreign.add(int(fields[1].rpartition(":")[2], 16))
    return foreign


# --- all providers


async def find_local_servers(env: Mapping[str, str], servers: LocalServers) -> FoundProviders:
    """All providers that are available in this environment."""
    if is_off(env):
        return NOTHING
    local = await servers.find(env)
    return FoundProviders({**providers_by_key(env), **local, OFFLINE: OFFLINE_PROVIDER})
