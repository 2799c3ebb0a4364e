"""Authorization of requests by listener, and unsafe options that are refused."""

import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.assemble import open_server
from culm.client.http import open_client
from culm.errors import AppError, InvalidRequest, ListenFailed
from culm.ids import Ids
from culm.server.listen import TcpAddress, UnixAddress
from culm.settings import ServeOptions
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import Answer, send
from tests.support import FakeClock, contract, serve_options

pytestmark = pytest.mark.sockets

# Every path is protected, including health and version.
GUARDED = ["/v1/health", "/v1/version", "/v1/workspaces", "/v1/nothing", "/"]


@pytest.fixture
async def tcp(tmp_path: Path) -> AsyncGenerator[FlowServer]:
    async with open_flow(tmp_path, "tcp") as flow:
        yield flow


@pytest.fixture
async def unix(tmp_path: Path) -> AsyncGenerator[FlowServer]:
    async with open_flow(tmp_path, "unix") as flow:
        yield flow


@asynccontextmanager
async def serving(options: ServeOptions) -> AsyncGenerator[FlowServer]:
    clock = FakeClock()
    async with open_server(options, clock, Ids(), lambda: None) as server:
        yield FlowServer(server, clock, options.data_dir.parent)


async def refusal(options: ServeOptions) -> AppError:
    """The error of a server that does not start."""
    with pytest.raises(AppError) as refused:
        async with serving(options):
            pass
    return refused.value


# --- TCP


@contract("EXC-21")
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer x{}",
     "Bearer \xff", "Bearer {} {}"],
)  # fmt: skip
async def test_tcp_request_without_the_token_is_401(
    tcp: FlowServer, authorization: str | None
) -> None:
    assert tcp.server.token is not None
    given = authorization and authorization.replace("{}", tcp.server.token)
    for path in GUARDED:
        answer = await send(tcp, "GET", path, headers={"Authorization": given})
        assert answer.status == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/json"
        assert tcp.server.token.encode() not in answer.body


@contract("EXC-21")
async def test_tcp_request_with_the_token_is_served(tcp: FlowServer) -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {tcp.server.token}"}
        assert (await send(tcp, "GET", "/v1/health", headers=headers)).status == 200


@contract("EXC-21")
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "127.0.0.1.:{port}"],
)
async def test_tcp_request_for_another_host_is_403_even_with_the_token(
    tcp: FlowServer, host: str
) -> None:
    assert (await ask_host(tcp, host)).status == 403


@contract("EXC-21")
@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"]
)
async def test_tcp_request_for_a_loopback_name_is_served(tcp: FlowServer, host: str) -> None:
    assert (await ask_host(tcp, host)).status == 200


async def ask_host(flow: FlowServer, host: str) -> Answer:
    headers = {"Host": host.replace("{port}", str(port_of(flow)))}
    return await send(flow, "GET", "/v1/version", headers=headers)


def port_of(flow: FlowServer) -> int:
    address = flow.server.addresses[0]
    assert isinstance(address, TcpAddress)
    return address.port


@contract("EXC-21")
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://127.0.0.1", "http://127.0.0.1:1", "file://",
     "http://evil@127.0.0.1:{port}", "http://[", "http://127.0.0.1:{port}.evil.example"],
)  # fmt: skip
async def test_tcp_request_from_another_origin_is_403_even_with_the_token(
    tcp: FlowServer, origin: str
) -> None:
    headers = {"Origin": origin.replace("{port}", str(port_of(tcp)))}
    for method, path in (
        ("GET", "/v1/version"),
        ("POST", "/v1/workspaces"),
        ("OPTIONS", "/v1/version"),
    ):
        answer = await send(tcp, method, path, headers=headers)
        assert answer.status == 403, method
        assert not [name for name in answer.headers if name.startswith("access-control")]


@contract("EXC-21")
async def test_tcp_request_from_our_own_origin_is_served_without_cors_headers(
    tcp: FlowServer,
) -> None:
    headers = {"Origin": f"http://127.0.0.1:{port_of(tcp)}"}
    answer = await send(tcp, "GET", "/v1/version", headers=headers)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers


@contract("EXC-21")
async def test_allowed_host_is_served_with_and_without_port(tmp_path: Path) -> None:
    options = replace(serve_options(tmp_path, "tcp://127.0.0.1:0"), allow_hosts=("Agents.Example",))
    async with serving(options) as flow:
        for host, status in [
            ("agents.example", 200),
            ("agents.example:{port}", 200),
            ("agents.example:1", 403),
            ("x.agents.example", 403),
        ]:
            assert (await ask_host(flow, host)).status == status, host
        headers = {"Host": "agents.example", "Origin": "https://agents.example"}
        assert (await send(flow, "GET", "/v1/version", headers=headers)).status == 200


@contract("EXC-21")
async def test_loopback_without_auth_still_refuses_other_hosts_and_origins(
    tmp_path: Path,
) -> None:
    options = replace(serve_options(tmp_path, "tcp://127.0.0.1:0"), auth=False)
    async with serving(options) as flow:
        assert flow.server.token is None
        assert not (tmp_path / "data" / "token").exists()
        assert (await send(flow, "GET", "/v1/version")).status == 200
        assert (await ask_host(flow, "evil.example")).status == 403
        headers = {"Origin": "http://evil.example"}
        assert (await send(flow, "GET", "/v1/version", headers=headers)).status == 403


# --- unix sockets


@contract("EXC-21")
async def test_unix_socket_needs_no_token_and_ignores_host_and_origin(
    unix: FlowServer,
) -> None:
    assert unix.server.token is None
    for headers in (
        {"Host": "api.crush.localhost"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Authorization": "Bearer wrong"},
    ):
        assert (await send(unix, "GET", "/v1/version", headers=headers)).status == 200
    assert not (unix.folder / "data" / "token").exists()


@contract("EXC-21")
async def test_unix_socket_is_accessible_only_to_its_user(tmp_path: Path, unix: FlowServer) -> None:
    address = unix.server.addresses[0]
    assert isinstance(address, UnixAddress)
    found = address.path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600


@contract("EXC-21")
async def test_socket_folder_is_private_and_the_socket_is_removed_at_exit(
    unix: FlowServer,
) -> None:
    address = unix.server.addresses[0]
    assert isinstance(address, UnixAddress)
    path = address.path.parent / "made" / "s"
    async with serving(serve_options(unix.folder, f"unix://{path}")):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


@contract("EXC-21")
async def test_second_server_at_the_same_socket_is_refused(
    unix: FlowServer,
) -> None:
    error = await refusal(serve_options(unix.folder / "other", unix.url))
    assert isinstance(error, ListenFailed)
    async with open_client(unix.url) as client:
        await client.health()


@contract("EXC-21")
async def test_server_with_both_listeners_needs_a_token_only_on_tcp(
    unix: FlowServer, tmp_path: Path
) -> None:
    address = unix.server.addresses[0]
    assert isinstance(address, UnixAddress)
    both = serve_options(tmp_path / "both", f"unix://{address.path}2", "tcp://127.0.0.1:0")
    async with serving(both) as flow:
        bare = {"Authorization": None}
        by_unix, by_tcp = flow.server.addresses
        host = {"Host": str(by_tcp).removeprefix("tcp://")}
        assert (await send(flow, "GET", "/v1/health", headers=bare, address=by_unix)).status == 200
        refused = await send(flow, "GET", "/v1/health", headers=bare | host, address=by_tcp)
        assert refused.status == 401
        assert (await send(flow, "GET", "/v1/health", headers=host, address=by_tcp)).status == 200


# --- the token file


@contract("EXC-21")
async def test_token_file_is_private_and_reused(tmp_path: Path) -> None:
    options = serve_options(tmp_path, "tcp://127.0.0.1:0")
    async with serving(options) as flow:
        first = flow.server.token
    file = tmp_path / "data" / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert first is not None
    assert len(first) >= 43
    assert file.read_text().strip() == first
    async with serving(options) as flow:
        assert flow.server.token == first


@contract("EXC-21")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
async def test_token_file_accessible_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text("secret-token\n")
    file.chmod(mode)
    options = replace(serve_options(tmp_path, "tcp://127.0.0.1:0"), token_file=file)
    error = await refusal(options)
    assert isinstance(error, InvalidRequest)
    assert "chmod 600" in error.hint
    assert "secret-token" not in error.message
    file.chmod(0o600)
    async with serving(options) as flow:
        assert flow.server.token == "secret-token"


@contract("EXC-21")
@pytest.mark.parametrize("content", ["", " \n"])
async def test_empty_token_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    options = replace(serve_options(tmp_path, "tcp://127.0.0.1:0"), token_file=file)
    assert "does not contain a token" in (await refusal(options)).message


# --- beyond loopback


@contract("EXC-21")
@pytest.mark.parametrize("host", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.1:0"])
async def test_listener_beyond_loopback_without_tls_is_refused(tmp_path: Path, host: str) -> None:
    error = await refusal(serve_options(tmp_path, host))
    assert isinstance(error, ListenFailed)
    assert "--insecure-plaintext-network" in error.hint
    assert not (tmp_path / "data").exists()


@contract("EXC-21")
@pytest.mark.parametrize("plaintext", [True, False])
async def test_no_auth_beyond_loopback_is_refused_even_when_forced(
    tmp_path: Path, *, plaintext: bool
) -> None:
    options = replace(
        serve_options(tmp_path, "tcp://127.0.0.1:0", "tcp://0.0.0.0:0"),
        auth=False,
        plaintext_network=plaintext,
    )
    error = await refusal(options)
    assert isinstance(error, ListenFailed)
    assert "--no-auth is for loopback only" in error.message


@contract("EXC-21")
async def test_forced_plaintext_listener_still_requires_the_token(tmp_path: Path) -> None:
    options = replace(serve_options(tmp_path, "tcp://0.0.0.0:0"), plaintext_network=True)
    async with serving(options) as flow:
        local = TcpAddress("127.0.0.1", port_of(flow))
        host = {"Host": f"127.0.0.1:{local.port}"}
        bare = host | {"Authorization": None}
        assert (await send(flow, "GET", "/v1/health", headers=bare, address=local)).status == 401
        assert (await send(flow, "GET", "/v1/health", headers=host, address=local)).status == 200


@contract("EXC-21")
async def test_tls_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    options = replace(serve_options(tmp_path, "tcp://127.0.0.1:0"), tls_cert=tmp_path / "cert")
    assert "go together" in (await refusal(options)).message


@contract("EXC-21")
async def test_token_is_in_no_response(tcp: FlowServer) -> None:
    async with open_client(tcp.url, token=tcp.server.token) as client:
        remote = await client.open_workspace(tcp.directory())
        assert tcp.server.token is not None
        for path in ("/v1/version", "/v1/config", "/v1/workspaces", remote.path("/config")):
            assert tcp.server.token.encode() not in await client.request("GET", path)
