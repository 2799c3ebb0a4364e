"""Finding the user's server: who answers, what is started, what a failed start says."""

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
    age_of,
    begin_start,
    find_token,
    is_answered,
    is_understood,
    reason_of,
)
from culm.errors import InvalidRequest, NoServer


@pytest.fixture
def path() -> Generator[Path]:
    """Where a socket may be: a path that is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        yield Path(name) / "s"


def test_a_socket_where_somebody_listens_is_answered_and_none_is_started(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as somebody:
        somebody.bind(str(path))
        somebody.listen()
        assert is_answered(f"unix://{path}")
        assert begin_start(ServerRequest(f"unix://{path}"), {}) is None


def test_a_path_where_nobody_listens_is_not_answered(path: Path) -> None:
    assert not is_answered(f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    assert path.is_socket()
    assert not is_answered(f"unix://{path}")
    assert not is_answered(f"unix://{path}/below/a/socket")
    assert not is_answered(f"unix:///{'long' * 50}")


def test_a_server_elsewhere_is_never_started() -> None:
    assert begin_start(ServerRequest("tcp://127.0.0.1:1"), {}) is None


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "unix://relative", "tcp://127.0.0.1", "ftp://x:1", "tcp://h:99999"),
        *("tcp://[::1:80", "tcp://a..b:1", f"http://{'a' * 64}"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address"):
        ServerRequest(url)


def test_a_server_is_started_with_absolute_paths(path: Path) -> None:
    wanted = ServerRequest(f"unix://{path}", Path("data"), Path("culm.json"))
    here = Path.cwd()
    assert wanted.command() == [
        *(sys.executable, "-m", "culm", "serve", "--host", f"unix://{path}"),
        *("--data-dir", f"{here}/data", "--config", f"{here}/culm.json"),
    ]


@pytest.mark.parametrize(
    ("said", "reason", "hint"),
    [
        (["1 INFO x", "culm: it is taken", "hint: take another"], "it is taken", "take another"),
        (["culm: it is taken"], "it is taken", ""),
        (
            ["Traceback", "  a line", "", "OSError: no"],
            "it said\n  Traceback\n    a line\n  OSError: no",
            "",
        ),
        ([], "it ended without a word", ""),
    ],
)
def test_a_failed_start_is_told_in_the_servers_own_words(
    said: list[str], reason: str, hint: str
) -> None:
    assert reason_of(said) == (reason, hint)


def test_a_token_is_read_for_tcp_alone_from_the_file_that_is_named_or_the_default(
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
def test_versions_are_compared_by_their_numbers(version: str, age: str, understood: bool) -> None:  # noqa: FBT001
    assert (age_of(version), is_understood(version)) == (age, understood)


def test_a_client_needs_no_library_that_is_slow_to_import() -> None:
    program = "import sys, culm.cli.main, culm.cli.run; print({'aiohttp'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "set()\n"


def test_in_a_directory_that_is_not_there_nothing_is_started_or_made(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nowhere/s"
    with pytest.raises(NoServer, match=f"there is no directory {tmp_path}/nowhere"):
        begin_start(ServerRequest(url), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"a\nX: y", b"\xff", "\u2026".encode(), b"a b"])
def test_what_cannot_be_sent_as_a_token_is_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="is no token"):
        find_token(ServerRequest("tcp://there:1"), file, {})


def test_a_token_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert find_token(ServerRequest("tcp://there:1"), file, {}) == "secret"
