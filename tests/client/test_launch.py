"""Finding or starting the user's server, and the message of a failed start."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from culm import __version__
from culm.client.launch import (
    ServerRequest,
    begin_start,
    compare_version,
    find_token,
    is_compatible,
    is_listening,
    reason_of,
)
from culm.errors import InvalidRequest, NoServer


@pytest.fixture
def path() -> Generator[Path]:
    """A path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        yield Path(name) / "s"


def test_server_is_not_started_if_the_socket_is_listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert is_listening(f"unix://{path}")
        assert begin_start(ServerRequest(f"unix://{path}"), {}) is None


def test_missing_or_stale_socket_is_not_listening(path: Path) -> None:
    assert not is_listening(f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.is_socket()
    assert not is_listening(f"unix://{path}")
    assert not is_listening(f"unix://{path}/below/a/socket")
    assert not is_listening(f"unix:///{'long' * 50}")


def test_tcp_server_is_never_started() -> None:
    assert begin_start(ServerRequest("tcp://127.0.0.1:1"), {}) is None


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "unix://relative", "tcp://127.0.0.1", "ftp://x:1", "tcp://h:99999"),
        *("tcp://[::1:80", "tcp://a..b:1", f"http://{'a' * 64}"),
    ],
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address"):
        ServerRequest(url)


def test_server_is_started_with_absolute_paths(path: Path) -> None:
    wanted = ServerRequest(f"unix://{path}", Path("data"), Path("culm.json"))
    here = Path.cwd()
    assert wanted.command() == [
        *(sys.executable, "-m", "culm", "serve", "--host", f"unix://{path}"),
        *("--data-dir", f"{here}/data", "--config", f"{here}/culm.json"),
    ]


@pytest.mark.parametrize(
    ("output", "reason", "hint"),
    [
        (["1 INFO x", "culm: it is taken", "hint: take another"], "it is taken", "take another"),
        (["culm: it is taken"], "it is taken", ""),
        (
            ["Traceback", "  a line", "", "OSError: no"],
            "it printed\n  Traceback\n    a line\n  OSError: no",
            "",
        ),
        ([], "it ended without any output", ""),
    ],
)
def test_failed_start_is_explained_by_the_server_output(
    output: list[str], reason: str, hint: str
) -> None:
    assert reason_of(output) == (reason, hint)


def test_token_is_read_only_for_tcp_from_the_given_or_default_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "culm").mkdir()
    (tmp_path / "culm" / "token").write_text("default\n")
    (tmp_path / "other").write_text("other\n")
    env = {"XDG_DATA_HOME": str(tmp_path)}
    tcp = ServerRequest("tcp://127.0.0.1:7777")
    assert find_token(tcp, None, env) == "default"
    assert find_token(tcp, tmp_path / "other", env) == "other"
    assert find_token(ServerRequest(tcp.url, data_dir=tmp_path), None, env) is None
    assert find_token(ServerRequest("unix:///s"), tmp_path / "other", env) is None
    with pytest.raises(InvalidRequest, match="cannot read"):
        find_token(tcp, tmp_path / "nowhere", env)


@pytest.mark.parametrize(
    ("version", "age", "understood"),
    [
        (__version__, "ours", True),
        (f"{__version__}+local", "ours", True),
        ("0.0.9", "older", True),
        ("0.99.0", "newer", True),
        ("99.0.1", "newer", False),
        ("devel", "older", False),
    ],
)
def test_versions_are_compared_numerically(version: str, age: str, understood: bool) -> None:  # noqa: FBT001
    assert (compare_version(version), is_compatible(version)) == (age, understood)


def test_client_does_not_import_aiohttp() -> None:
    program = "import sys, culm.cli.main, culm.cli.follow_run; print({'aiohttp'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "set()\n"


def test_server_in_a_missing_directory_is_not_started(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nowhere/s"
    with pytest.raises(NoServer, match=f"there is no directory {tmp_path}/nowhere"):
        begin_start(ServerRequest(url), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"a\nX: y", b"\xff", "\u2026".encode(), b"a b"])
def test_invalid_token_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="does not contain a token"):
        find_token(ServerRequest("tcp://there:1"), file, {})


def test_token_is_read_without_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert find_token(ServerRequest("tcp://there:1"), file, {}) == "secret"
