"""Listen addresses and sockets: parsing, stale sockets, and locks of other servers."""

import socket
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from culm.errors import InvalidRequest, ListenFailed
from culm.server.listen import LEAVE_S, TcpAddress, UnixAddress, listen, parse_address
from tests.support import contract


@pytest.fixture
def folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/x.sock", UnixAddress(Path("/run/x.sock"))),
        ("tcp://127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("tcp://[::1]:80", TcpAddress("::1", 80)),
        ("tcp://name:80/path", TcpAddress("name", 80)),
    ],
)
def test_a_valid_address_is_parsed(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "x", "unix://relative", "tcp://host", "tcp://:1", "tcp://h:65536", "npipe://x:1"]
)
def test_an_invalid_address_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_address(text)
    assert "unix:///" in caught.value.hint


def test_a_socket_is_private_and_removed_on_close(folder: Path) -> None:
    path = folder / "deep" / "s"
    listener = listen(UnixAddress(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listener.close()
    assert not path.exists()


@contract("WIRE-3")
def test_a_stale_socket_is_replaced(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    listen(UnixAddress(path)).close()


def test_a_live_socket_is_not_replaced(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(ListenFailed, match="in use"):
            listen(UnixAddress(path))
        assert path.exists()


def test_a_second_server_at_the_same_socket_is_refused(folder: Path) -> None:
    first = listen(UnixAddress(folder / "s"))
    with pytest.raises(ListenFailed, match="already running there"):
        listen(UnixAddress(folder / "s"))
    first.close()
    listen(UnixAddress(folder / "s")).close()


def test_a_server_without_a_socket_gets_time_to_release_its_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = listen(UnixAddress(folder / "s"))
    (folder / "s").unlink()

    def leave(_: float) -> None:
        first.close()

    monkeypatch.setattr("culm.server.listen.time.sleep", leave)
    second = listen(UnixAddress(folder / "s"))
    assert (folder / "s").exists()
    second.close()


def test_a_server_that_keeps_its_lock_without_a_socket_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("culm.server.listen.time.sleep", pauses.append)
    first = listen(UnixAddress(folder / "s"))
    (folder / "s").unlink()
    with pytest.raises(ListenFailed, match="already running there"):
        listen(UnixAddress(folder / "s"))
    assert sum(pauses) == pytest.approx(LEAVE_S)
    first.close()


def test_a_file_that_is_not_a_socket_is_never_removed(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    with pytest.raises(ListenFailed):
        listen(UnixAddress(path))
    assert path.read_text() == "precious"


def test_a_foreign_socket_at_our_path_is_not_removed_on_close(folder: Path) -> None:
    path = folder / "s"
    listener = listen(UnixAddress(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        listener.close()
        assert path.exists()


def test_the_socket_of_a_successor_is_not_removed_on_close(folder: Path) -> None:
    first = listen(UnixAddress(folder / "s"))
    first.hide()
    second = listen(UnixAddress(folder / "s"))
    first.close()
    assert (folder / "s").exists()
    second.close()


def test_a_path_too_long_for_a_socket_is_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(ListenFailed, match="longer than") as caught:
        listen(UnixAddress(folder / ("x" * 120)))
    assert "--host" in caught.value.hint


def test_port_zero_becomes_a_real_port() -> None:
    listener = listen(TcpAddress("127.0.0.1", 0))
    assert isinstance(listener.address, TcpAddress)
    assert listener.address.port > 0
    with pytest.raises(ListenFailed, match="in use"):
        listen(listener.address)
    listener.close()
