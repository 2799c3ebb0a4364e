"""Providers found without configuration: keys by name, and servers that list models."""

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import pytest

from culm.config.checking import Document
from culm.model.catalog import KnownProvider, known_providers
from culm.model.local_servers import (
    ANSWER_BYTES_MAX,
    KEPT_S,
    LOCAL_SERVERS,
    MODELS_MAX,
    NOTHING,
    OFFLINE_PROVIDER,
    FoundProviders,
    LocalServers,
    find_local_servers,
    foreign_ports,
    is_off,
    providers_by_key,
    server_candidates,
)
from culm.testing.model_server import open_model_server
from tests.support import WAIT_S, FakeClock

SECRET = "sk-very-secret"
NOWHERE = {
    server.url_env: "http://127.0.0.1:9/v1" for server in LOCAL_SERVERS
}  # Nothing listens there.


# --- keys


@pytest.mark.parametrize("known", known_providers().values(), ids=lambda known: known.id)
def test_a_key_in_the_environment_gives_a_provider_that_refers_to_it(known: KnownProvider) -> None:
    found = providers_by_key({known.key_env: SECRET, "OTHER": SECRET})
    assert list(found) == [known.id]
    assert SECRET not in json.dumps(found)
    provider = found[known.id]
    assert (provider["api_key"], provider["base_url"]) == (f"${known.key_env}", known.base_url)
    assert (provider["type"], provider["name"]) == (known.type, known.name)
    listed = {model["id"] for model in provider["models"]}
    assert {known.large, known.small} <= listed
    moved = providers_by_key({known.key_env: SECRET, known.url_env: f"http://u:{SECRET}@h"})
    assert moved == {known.id: {**provider, "base_url": f"${known.url_env}"}}


def test_keys_are_found_in_catalog_order_and_empty_ones_are_ignored() -> None:
    env = {known.key_env: SECRET for known in reversed(list(known_providers().values()))}
    assert list(providers_by_key(env)) == list(known_providers())
    assert providers_by_key(dict.fromkeys(env, " \n")) == {}
    assert providers_by_key({}) == {}


# --- server addresses


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("  ", "http://127.0.0.1:11434/v1"),
        ("box", "http://box:11434/v1"),
        ("box:80", "http://box:80/v1"),
        (":5", "http://127.0.0.1:5/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0:5", "http://127.0.0.1:5/v1"),
        ("[::]:5", "http://127.0.0.1:5/v1"),
        ("::1", "http://[::1]:11434/v1"),
        ("[::1]:5", "http://[::1]:5/v1"),
        ("http://box", "http://box:80/v1"),
        ("https://box", "https://box:443/v1"),
        ("http://box:5/", "http://box:5/v1"),
        ("http://box:5/api/v1/", "http://box:5/api/v1"),
        (f"http://me:{SECRET}@box:5", "http://box:5/v1"),
    ],
)
def test_a_server_address_is_parsed_like_its_own_software_does(given: str, url: str) -> None:
    candidate = server_candidates({"OLLAMA_HOST": given})[0]
    expected = ("ollama", url, bool(given.strip()))
    assert (candidate.server.id, candidate.url, candidate.explicit) == expected


def test_the_default_addresses_are_on_this_machine() -> None:
    assert [(one.server.id, one.url) for one in server_candidates({})] == [
        ("ollama", "http://127.0.0.1:11434/v1"),
        ("lmstudio", "http://127.0.0.1:1234/v1"),
        ("llamacpp", "http://127.0.0.1:8080/v1"),
        ("vllm", "http://127.0.0.1:8000/v1"),
    ]


SOCKETS = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2CAA 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 1
   1: 00000000:04D2 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:1F90 00000000:0000 01 00000000:00000000 00:00000000 00000000  1001        0 3
   a line that nobody understands
   3: 0100007F:zzzz 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 4
   4: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 5
"""
SOCKETS_6 = """\
  sl  local_address                         remote_address                        st ...
   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A \
00000000:00000000 00:00000000 00000000  1002        0 6
"""


def test_ports_of_other_users_are_found() -> None:
    assert foreign_ports([SOCKETS, SOCKETS_6], {0, 1000}) == {11434, 80}
    assert foreign_ports([SOCKETS], {0, 1000, 1001}) == set()
    assert foreign_ports(["", "\n\n"], {0}) == foreign_ports([], {0}) == set()


# --- servers that answer


class ListingServer:
    """A server that answers every request with the given bytes."""

    def __init__(self, answer: bytes | None) -> None:
        self.host = ""
        self.requests: list[str] = []
        self._answer = answer  # None means that it never answers.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.partition("\r\n")[0])
            if self._answer is None:
                await reader.read()  # Waits until the client leaves.
            else:
                writer.write(self._answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has left.
        finally:
            writer.close()


@asynccontextmanager
async def open_listing(answer: bytes | None) -> AsyncGenerator[ListingServer]:
    listing = ListingServer(answer)
    server = await asyncio.start_server(listing.serve, "127.0.0.1", 0)
    listing.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(WAIT_S):
            yield listing
    finally:
        server.close()


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body)), "Connection": "close", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def listing_of(*ids: str) -> bytes:
    models = [{"id": id_, "object": "model"} for id_ in ids]
    return json.dumps({"object": "list", "data": models}).encode()


def ollama(host: str, *ids: str) -> Document:
    return {
        "ollama": {
            "id": "ollama",
            "name": "Ollama",
            "type": "openai-compat",
            "base_url": f"http://{host}/v1",
            "models": [{"id": id_, "name": id_} for id_ in ids],
        }
    }


def servers_with(clock: FakeClock | None = None, within_s: float = WAIT_S) -> LocalServers:
    return LocalServers(clock or FakeClock(), within_s=within_s)


async def find(env: Mapping[str, str], within_s: float = WAIT_S) -> Document:
    async with asyncio.timeout(2 * WAIT_S):
        return await servers_with(within_s=within_s).find({**NOWHERE, **env})


async def test_a_server_is_found_with_the_models_it_lists() -> None:
    body = listing_of("llama:8b", "nomic-embed-text", "", "qwen")
    async with open_listing(answer(body)) as listing:
        assert await find({"OLLAMA_HOST": listing.host}) == ollama(listing.host, "llama:8b", "qwen")
    assert listing.requests == ["GET /v1/models HTTP/1.1"]


async def test_servers_are_probed_in_parallel_and_listed_in_order() -> None:
    async with open_model_server() as one, open_model_server() as other:
        found = await find({"VLLM_BASE_URL": one.url, "LMSTUDIO_BASE_URL": other.url})
    assert [(name, provider["base_url"]) for name, provider in found.items()] == [
        ("lmstudio", other.url),
        ("vllm", one.url),
    ]
    assert all(provider["models"] for provider in found.values())


async def test_only_the_first_models_of_a_long_list_are_used() -> None:
    ids = [f"m{n}" for n in range(MODELS_MAX + 50)]
    async with open_listing(answer(listing_of(*ids))) as listing:
        found = await find({"OLLAMA_HOST": listing.host})
    assert found == ollama(listing.host, *ids[:MODELS_MAX])


GOOD = listing_of("m")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        answer(GOOD)[:-1],
        answer(b"<html>Hello</html>", Content_Type="text/html"),
        answer(b"[]"),
        answer(b'{"data": {}}'),
        answer(b'{"data": [1]}'),
        answer(b'{"data": [{"id": 1}]}'),
        answer(b'{"data": []}'),
        answer(b'{"models": ["m"]}'),
        answer(b'{"data": [{"id": "a", "x": ' + b"[" * 100_000),
        answer(b'{"data": [{"id": "\\ud800"}]}'),
        answer(GOOD, "401 Unauthorized"),
        answer(GOOD, "500 Oops"),
        answer(b"hello", Content_Encoding="gzip"),
        answer(gzip.compress(b" " * (32 << 20)), Content_Encoding="gzip"),
        answer(b" " * (4 * ANSWER_BYTES_MAX) + GOOD),
    ],
    ids=lambda reply: repr(reply[-20:]),
)
async def test_an_invalid_model_list_is_ignored_and_other_servers_are_found(reply: bytes) -> None:
    async with open_listing(reply) as listing, open_model_server() as good:
        found = await find({"OLLAMA_HOST": listing.host, "VLLM_BASE_URL": good.url})
    assert list(found) == ["vllm"]
    assert set(listing.requests) == {"GET /v1/models HTTP/1.1"}


async def test_a_redirect_is_not_followed() -> None:
    async with open_listing(answer(GOOD)) as other:
        elsewhere = answer(GOOD, "302 Found", Location=f"http://{other.host}/v1/models")
        async with open_listing(elsewhere) as listing:
            assert await find({"OLLAMA_HOST": listing.host}) == {}
    assert (len(listing.requests), other.requests) == (1, [])


async def test_a_server_that_never_answers_does_not_hide_the_others() -> None:
    async with open_listing(None) as silent, open_model_server() as good:
        env = {"OLLAMA_HOST": silent.host, "VLLM_BASE_URL": good.url}
        assert list(await find(env, within_s=1.0)) == ["vllm"]
        assert silent.requests == ["GET /v1/models HTTP/1.1"]


@pytest.mark.parametrize(
    "place", ["http://[::1", "h h:9", "a..b:9", "127.0.0.1:99999", "ftp://127.0.0.1:9", "http://"]
)
async def test_an_invalid_address_is_ignored(place: str) -> None:
    assert await find({"OLLAMA_HOST": place}) == {}


# --- cached answers


async def test_an_answer_is_cached_for_its_address() -> None:
    clock = FakeClock()
    servers = servers_with(clock)
    async with open_listing(answer(GOOD)) as one, open_listing(answer(GOOD)) as other:
        env = {**NOWHERE, "OLLAMA_HOST": one.host}
        for requests, later_s in ((1, 0.0), (1, KEPT_S - 1), (2, 2.0)):
            clock.advance(later_s)
            assert await servers.find(env) == ollama(one.host, "m")
            assert len(one.requests) == requests
        assert await servers.find({**env, "OLLAMA_HOST": other.host}) == ollama(other.host, "m")
        assert len(other.requests) == 1


async def test_concurrent_searches_share_one_request() -> None:
    servers = servers_with()
    async with open_listing(answer(GOOD)) as listing:
        env = {**NOWHERE, "OLLAMA_HOST": listing.host}
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(servers.find(env), name=f"ask {n}") for n in range(10)]
        assert [task.result() for task in asking] == [ollama(listing.host, "m")] * 10
    assert len(listing.requests) == 1


# --- all providers


async def test_providers_are_in_order_of_preference_and_offline_is_last() -> None:
    servers = servers_with()
    async with open_listing(answer(GOOD)) as listing:
        env = {**NOWHERE, "OLLAMA_HOST": listing.host, "GROQ_API_KEY": SECRET}
        found = await find_local_servers(env, servers)
        assert list(found.providers) == ["groq", "ollama", "offline"]
        assert found.document == {"providers": found.providers}
        assert SECRET not in repr(found)
        assert await find_local_servers(NOWHERE, servers) == NOTHING
    assert FoundProviders({"offline": OFFLINE_PROVIDER}) == NOTHING


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", True), ("yes", True), ("true", True), ("", False), ("0", False), ("false", False)],
)
async def test_discovery_can_be_disabled(value: str, *, off: bool) -> None:
    env = {**NOWHERE, "CULM_NO_DISCOVERY": value, "GROQ_API_KEY": SECRET}
    assert (is_off(env), is_off({})) == (off, False)
    async with asyncio.timeout(WAIT_S), open_listing(answer(GOOD)) as listing:
        env["OLLAMA_HOST"] = listing.host
        found = await find_local_servers(env, servers_with())
        assert list(found.providers) == (["offline"] if off else ["groq", "ollama", "offline"])
        assert len(listing.requests) == (0 if off else 1)
