"""Paths inside a workspace: which file they reach, and that none of them leads outside."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from culm.tools.files.paths import LINKS_MAX, MissingPath, PathTarget, WorkspacePaths
from culm.tools.files.safe_open import DEPTH_MAX, OpenRefused, shown

TRIES = 300  # Attempts at a race; each takes about 50 µs.


def read(inside: WorkspacePaths, path: str) -> bytes:
    with inside.open(path) as place:
        return os.read(place.descriptor, 1000)


def refusal(inside: WorkspacePaths, path: str) -> str:
    with pytest.raises(OpenRefused) as caught, inside.open(path):
        pass
    return str(caught.value)


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - a Path would open one of its own


@pytest.mark.parametrize(
    "path",
    [
        "a/file",
        "./a//file",
        "a/../a/file",
        "{root}/a/file",
        "//{root}/a/./file",
        "{root}/a/../a/file",
        "../work/a/file",
        "link",
        "absolute",
        "chain/file",
        "a/up/link",
        "alias/a/file",
    ],
)
def test_every_spelling_of_a_path_inside_reaches_the_same_file(folder: Path, path: str) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "file").write_text("here")
    (folder / "link").symlink_to("a/file")
    (folder / "absolute").symlink_to(folder / "a" / "file")
    (folder / "directory").symlink_to("a")
    (folder / "chain").symlink_to("./directory")
    (folder / "a" / "up").symlink_to("..")
    (folder / "alias").symlink_to("../work")
    before = descriptors()
    with WorkspacePaths(folder).open(path.format(root=folder)) as place:
        assert os.read(place.descriptor, 100) == b"here"
        assert (place.parts, place.is_directory) == (("a", "file"), False)
    assert descriptors() == before


def test_a_workspace_behind_a_symlink_accepts_both_its_paths(folder: Path) -> None:
    (folder / "file").write_text("here")
    alias = folder.parent / "alias"
    alias.symlink_to(folder)
    inside = WorkspacePaths(alias)
    assert read(inside, f"{alias}/file") == read(inside, f"{folder}/file") == b"here"


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret.txt",
        "a/../../outside/secret.txt",
        "{outside}/secret.txt",
        "{root}/../outside/secret.txt",
        "relative",
        "absolute",
        "directory/secret.txt",
        "directory/../outside/secret.txt",
        "chain",
        "a/up/secret.txt",
    ],
)
def test_a_path_that_leads_outside_is_resolved_and_refused(
    folder: Path, outside: Path, path: str
) -> None:
    secret = outside / "secret.txt"
    (folder / "a").mkdir()
    (folder / "relative").symlink_to("../outside/secret.txt")
    (folder / "absolute").symlink_to(secret)
    (folder / "directory").symlink_to(outside)
    (folder / "chain").symlink_to("relative")
    (folder / "a" / "up").symlink_to("../../outside")
    before = descriptors()
    inside, given = WorkspacePaths(folder), path.format(root=folder, outside=outside)
    assert inside.resolve(given) == PathTarget(str(secret), is_directory=False)
    assert not inside.contains(str(secret))
    assert refusal(inside, given).endswith(f"is outside the workspace (really {secret}).")
    with inside.open_real(str(secret)) as place:
        assert (place.path, place.shown, place.is_inside) == (str(secret), str(secret), False)
    assert descriptors() == before


def test_a_tilde_expands_to_the_home_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    (folder / "~x").touch()
    inside = WorkspacePaths(folder)
    assert inside.resolve("~") == PathTarget(str(folder.parent), is_directory=True)
    assert inside.resolve("~/work") == PathTarget(str(folder), is_directory=True)
    assert inside.resolve("~x") == PathTarget(str(folder / "~x"), is_directory=False)


def test_a_symlink_created_after_resolving_is_not_followed(folder: Path, outside: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "secret.txt").write_text("here")
    inside = WorkspacePaths(folder)
    target = inside.resolve("a/secret.txt")
    (folder / "a").rename(folder / "b")
    (folder / "a").symlink_to(outside)
    before = descriptors()
    with pytest.raises(OpenRefused) as caught, inside.open_real(target.path):
        pass
    assert str(caught.value) == (
        f"{folder}/a cannot be read: it has been replaced meanwhile, and a link is not followed."
    )
    (folder / "a").unlink()
    (folder / "a").mkdir()
    (folder / "a" / "secret.txt").symlink_to(outside / "secret.txt")
    with pytest.raises(OpenRefused, match="a link is not followed"), inside.open_real(target.path):
        pass
    assert descriptors() == before


@pytest.mark.skipif(not Path("/proc/self/root").exists(), reason="there is no procfs here")
def test_kernel_files_are_refused_and_their_links_only_resolved(folder: Path) -> None:
    inside = WorkspacePaths(folder)
    for path in ("/proc/self/status", "/proc", "/sys"):
        assert "is generated by the kernel; use bash" in refusal(inside, path)
    assert inside.resolve("/proc/self/root/etc") == PathTarget("/etc", is_directory=True)


def test_a_sibling_directory_with_the_same_prefix_is_outside(folder: Path) -> None:
    neighbour = folder.with_name("work-2")
    neighbour.mkdir()
    assert "outside the workspace" in refusal(WorkspacePaths(folder), str(neighbour))


def test_circular_symlinks_are_refused(folder: Path) -> None:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    assert refusal(WorkspacePaths(folder), "one/x").endswith("leads through too many links.")
    for number in range(LINKS_MAX + 1):
        (folder / f"n{number}").symlink_to(f"n{number + 1}")
    assert refusal(WorkspacePaths(folder), "n0").endswith("leads through too many links.")


def test_a_missing_path_error_names_the_missing_component(folder: Path) -> None:
    (folder / "a").mkdir()
    with pytest.raises(MissingPath) as caught, WorkspacePaths(folder).open("a/b/c"):
        pass
    error = caught.value
    assert (error.within, error.name, error.rest) == (str(folder / "a"), "b", ("c",))
    assert str(error) == "There is no a/b in the workspace."


def test_pipes_sockets_and_devices_are_refused_without_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)  # A socket's path is short.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    inside = WorkspacePaths(folder)
    assert [refusal(inside, name) for name in ("pipe", "socket")] == [
        "pipe is a pipe; only files and directories are read.",
        "socket is a socket; only files and directories are read.",
    ]
    assert refusal(WorkspacePaths(Path("/dev")), "null").startswith("null is a device;")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/x", "file is not a directory."),
        ("a\0b", "The path contains a NUL character."),
        ("\ud800", "\ufffd is not a valid path."),
        ("/\ud800", "\ufffd is not a valid path."),
        ("x" * 300, f"{'x' * 300} cannot be read: File name too long."),
    ],
)
def test_an_invalid_path_is_refused_with_a_message(folder: Path, path: str, message: str) -> None:
    (folder / "file").touch()
    assert refusal(WorkspacePaths(folder), path) == message


def test_a_path_that_is_too_deep_is_refused(folder: Path) -> None:
    deep = folder
    for _ in range(DEPTH_MAX + 1):
        deep = deep / "e"
        deep.mkdir()
    assert "at most 128 directories" in refusal(WorkspacePaths(folder), str(deep))


def test_a_deleted_workspace_is_refused(folder: Path) -> None:
    inside = WorkspacePaths(folder)
    folder.rmdir()
    assert refusal(inside, "file") == f"The workspace is gone: there is no {folder}."


class OpenInterceptor:
    """Runs an action right before a name is opened, using the interpreter's audit events."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[], object]] = {}
        sys.addaudithook(self._on_audit_event)  # Cannot be removed, but runs out of actions.

    def _on_audit_event(self, event: str, details: tuple[object, ...]) -> None:
        if event == "open" and (action := self.actions.pop(str(details[0]), None)):
            action()


interceptor = OpenInterceptor()


def test_a_file_swapped_for_a_symlink_before_open_is_not_followed(
    folder: Path, outside: Path
) -> None:
    def swap() -> None:
        (folder / "swapped").unlink()
        (folder / "swapped").symlink_to(outside / "secret.txt")

    (folder / "swapped").write_text("here")
    interceptor.actions["swapped"] = swap
    assert refusal(WorkspacePaths(folder), "swapped").startswith("swapped cannot be read: ")
    assert interceptor.actions == {}


def test_a_directory_swapped_for_a_symlink_before_open_is_not_followed(
    folder: Path, outside: Path
) -> None:
    def swap() -> None:
        (folder / "swapped").rmdir()
        (folder / "swapped").symlink_to(outside)

    (folder / "swapped").mkdir()
    interceptor.actions["swapped"] = swap
    assert "cannot be read" in refusal(WorkspacePaths(folder), "swapped/secret.txt")
    assert interceptor.actions == {}


def test_a_file_swapped_for_a_pipe_before_open_is_refused(folder: Path) -> None:
    def swap() -> None:
        (folder / "swapped").unlink()
        os.mkfifo(folder / "swapped")

    (folder / "swapped").write_text("here")
    interceptor.actions["swapped"] = swap
    before = descriptors()
    assert refusal(WorkspacePaths(folder), "swapped").startswith("swapped is a pipe;")
    assert descriptors() == before


def test_a_file_swapped_continuously_never_shows_outside_content(
    folder: Path, outside: Path
) -> None:
    good, name, spare = folder / "good", folder / "name", folder / "spare"
    good.write_text("here")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            spare.symlink_to(outside / "secret.txt")
            spare.replace(name)
            spare.hardlink_to(good)
            spare.replace(name)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen: set[bytes] = set()
    try:
        for _ in range(TRIES):
            with suppress(OpenRefused):
                seen.add(read(WorkspacePaths(folder), "name"))
    finally:
        over.set()
        swapping.join()
    assert seen <= {b"here"}


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("plain name.txt", "plain name.txt"),
        ("two\nlines\x1b[31m", r"two\nlines\x1b[31m"),
        ("\u2028", r"\u2028"),
        (os.fsdecode(b"caf\xe9"), "caf\ufffd"),
        ("👩‍💻 é 漢", "👩‍💻 é 漢"),
    ],
)
def test_a_name_is_shown_on_one_line(name: str, seen: str) -> None:
    assert shown(name) == seen
