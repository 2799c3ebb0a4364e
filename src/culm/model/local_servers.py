"""What is there without any configuration: keys in the environment, model servers on this machine.

What is found is a document like any other, the lowest of them all; a key in it is a reference, so
that the key itself stays where it was. Last in it is `offline`, which is always there.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
PROBE_S = 0.3  # For all servers together; one that is there answers in a tenth of it.
KEPT_S = 60.0  # How long an answer counts.
ANSWER_BYTES_MAX = 1 << 20
PLACES_MAX = 16  # Environments whose answers are remembered.
MODELS_MAX = 200  # Of one server.
_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"


class LocalServer(NamedTuple):
    id: str
    name: str
    port: int
    url_env: str


# Where these listen unless told otherwise, the most preferred first.
LOCAL_SERVERS = (
    LocalServer("ollama", "Ollama", 11434, "OLLAMA_HOST"),
    LocalServer("lmstudio", "LM Studio", 1234, "LMSTUDIO_BASE_URL"),
    LocalServer("llamacpp", "llama.cpp", 8080, "LLAMACPP_BASE_URL"),
    LocalServer("vllm", "vLLM", 8000, "VLLM_BASE_URL"),
)


@dataclass(frozen=True, slots=True)
class FoundProviders:
    """Providers that nobody configured, the most preferred first."""

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
    moved = env.get(known.url_env, "").strip()
    return {
        "id": known.id,
        "name": known.name,
        "type": known.type,
        "api_key": f"${known.key_env}",
        "base_url": f"${known.url_env}" if moved else known.base_url,
        "models": [msgspec.to_builtins(model) for model in known.models],
    }


# --- servers on this machine


class _Listed(Struct):
    id: str = ""


class _Listing(Struct):
    data: list[_Listed] = field(default_factory=list[_Listed])


class ServerPlace(NamedTuple):
    """Where a server may be."""

    server: LocalServer
    url: str
    given: bool  # Somebody said so; else it is only where such servers are.


class LocalServers:
    """Asks once for all workspaces, and remembers for a while."""

    def __init__(self, clock: Clock, *, within_s: float = PROBE_S) -> None:
        self._clock = clock
        self._within_s = within_s
        self._known: dict[tuple[ServerPlace, ...], tuple[float, Document]] = {}
        self._asking = asyncio.Lock()

    async def find(self, env: Mapping[str, str]) -> Document:
        """The servers that answer, with the models they have."""
        places = server_places_in(env)
        async with self._asking:
            until_s, found = self._known.get(places, (0.0, {}))
            now_s = self._clock.now_s()
            if now_s >= until_s:
                found = await _ask_all(places, self._within_s)
                self._known[places] = (now_s + KEPT_S, found)
                while len(self._known) > PLACES_MAX:
                    del self._known[next(iter(self._known))]
            return found


def server_places_in(env: Mapping[str, str]) -> tuple[ServerPlace, ...]:
    return tuple(_place(server, env.get(server.url_env, "").strip()) for server in LOCAL_SERVERS)


def _place(server: LocalServer, given: str) -> ServerPlace:
    if not given:
        return ServerPlace(server, f"http://127.0.0.1:{server.port}/v1", given=False)
    if "://" in given:  # Whoever writes a URL means its scheme's port.
        url, usual_port = given, 443 if given.startswith("https:") else 80
    else:
        host = f"[{given}]" if given.count(":") > 1 and "[" not in given else given
        url, usual_port = f"http://{host}", server.port
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or usual_port
    except ValueError:
        return ServerPlace(server, url, given=True)  # It will not answer.
    if host in ("0.0.0.0", "::"):  # Where it listens, which is no address to ask.
        host = "127.0.0.1"
    path = parts.path.rstrip("/") or "/v1"
    shown = f"[{host}]" if ":" in host else host
    return ServerPlace(server, f"{parts.scheme}://{shown}:{port}{path}", given=True)


async def _ask_all(places: Sequence[ServerPlace], within_s: float) -> Document:
    answers: dict[ServerPlace, list[str]] = {}
    await asyncio.to_thread(import_module, "aiohttp")  # Which takes half as long as may be asked.
    foreign = foreign_ports(await asyncio.to_thread(_socket_tables), {0, os.getuid()})
    asked = [place for place in places if place.given or place.server.port not in foreign]
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
            for place in asked:
                group.create_task(_ask(place, answers), name=f"probe {place.server.id}")
    return {
        place.server.id: {
            "id": place.server.id,
            "name": place.server.name,
            "type": "openai-compat",
            "base_url": place.url,
            "models": [{"id": model, "name": model} for model in answers[place]],
        }
        for place in places
        if answers.get(place)
    }


async def _ask(place: ServerPlace, answers: dict[ServerPlace, list[str]]) -> None:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http,
            http.get(f"{place.url}/models", allow_redirects=False) as response,
        ):
            body = await response.content.read(ANSWER_BYTES_MAX)
            while len(body) < ANSWER_BYTES_MAX and (more := await response.content.readany()):
                body += more
            if response.status == 200:
                answers[place] = _models_in(body)
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        log.debug("no model server at %s: %s", place.url, type(exc).__name__)


def _models_in(body: bytes) -> list[str]:
    """The models of a listing; none if it is something else that listens there."""
    try:
        listing = msgspec.json.decode(body, type=_Listing)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    ids = [one.id for one in listing.data if one.id and "embed" not in one.id.lower()]
    return ids[:MODELS_MAX]


def _socket_tables() -> list[str]:
    """The kernel's lists of sockets; none where it has no such files."""
    tables: list[str] = []
    for file in _SOCKETS:
        with suppress(OSError):
            tables.append(file.read_text())
    return tables


def foreign_ports(tables: Iterable[str], ours: Collection[int]) -> set[int]:
    """Ports on which users other than `ours` listen: prompts are not for them."""
    foreign: set[int] = set()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        with suppress(ValueError, IndexError):
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[7]) not in ours:
                foreign.add(int(fields[1].rpartition(":")[2], 16))
    return foreign


# --- all of it


async def find_local_servers(env: Mapping[str, str], servers: LocalServers) -> FoundProviders:
    """What there is for whoever has this environment."""
    if is_off(env):
        return NOTHING
    local = await servers.find(env)
    return FoundProviders({**providers_by_key(env), **local, OFFLINE: OFFLINE_PROVIDER})
