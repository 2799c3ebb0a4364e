"""`write`, and the rules for every tool that changes a file: atomic, and only after a view."""

import asyncio
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.store.sessions import read_stamp
from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.files.change import FILE_BYTES_MAX
from culm.tools.files.read_tool import stamp_of
from culm.tools.write import make_write
from culm.wire.codec import encode
from tests.support import WAIT_S
from tests.tools.conftest import SESSION, ToolHarness, call_of, refused, run

A_DIGEST = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # Of "a".
B_DIGEST = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"  # Of "b".


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def test_a_new_file_is_created_with_its_directories_and_recorded(
    harness: ToolHarness,
) -> None:
    result = await harness.call("write", file_path="a/b/c.txt", content="one\ntwo\n")
    about = {
        "diff": "--- a/a/b/c.txt\n+++ b/a/b/c.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n",
        "additions": 2,
        "removals": 0,
    }
    assert result == CallResult(
        "Made a/b/c.txt (2 lines, 8 bytes).", metadata=encode(about).decode()
    )
    file = harness.path / "a" / "b" / "c.txt"
    assert (file.read_text(), names(file.parent)) == ("one\ntwo\n", ["c.txt"])
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert await harness.versions() == [("c.txt", 0, ""), ("c.txt", 1, "one\ntwo\n")]
    assert await harness.context.store.read(read_stamp(SESSION, str(file))) == stamp_of(file.stat())


async def test_an_approval_request_shows_both_contents_and_their_digests(
    harness: ToolHarness,
) -> None:
    file = await harness.write_and_view("file", "a")
    plan = await harness.plan("write", file_path="./file", content="b")
    assert plan.action == ResolvedAction(
        tool="write",
        name="write",
        description=f"Change {file}",
        path=str(harness.path),
        params={"file_path": str(file), "old_content": "a", "new_content": "b"},
        resolved={"path": str(file), "old": A_DIGEST, "new": B_DIGEST},
        paths=(str(file),),
        coverage=(f"write:{harness.path}",),
    )
    again = await harness.plan("write", file_path=str(file), content="b")
    assert again.action.digest == plan.action.digest
    assert file.read_text() == "a"  # Nothing has happened yet.
    hook = (await harness.plan("write", file_path=".git/hooks/x", content="b")).action
    assert (hook.coverage, hook.params["old_content"]) == ((f"write:{harness.path}/.git",), "")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sub/.git", "sub/.git"),  # A file there names another repository.
        ("sub/.GIT/hooks/x", "sub/.GIT"),
        (".gitignore", ""),
        ("sub/culm.json", "sub/culm.json"),
        (".crush.json", ".crush.json"),
        ("share/trust.json", "share/trust.json"),
        ("share/projects/key/culm.db", "share/projects/key/culm.db"),
    ],
)
async def test_project_write_approval_does_not_cover_git_and_configuration_files(
    harness: ToolHarness, name: str, place: str
) -> None:
    context = replace(
        harness.context, outputs=harness.path / "share" / "projects" / "key" / "outputs"
    )
    plan = await make_write(context).prepare(call_of("write", {"file_path": name, "content": "b"}))
    assert isinstance(plan, CallPlan)
    assert plan.action.coverage == (f"write:{harness.path / place}",)


async def test_a_write_outside_needs_approval_and_creates_no_directories(
    harness: ToolHarness, outside: Path
) -> None:
    (harness.path / "out").symlink_to(outside)
    plan = await harness.plan("write", file_path="out/new.txt", content="x")
    assert plan.action.description == f"Create {outside}/new.txt"
    assert plan.action.why == f"{outside}/new.txt is outside the workspace"
    assert plan.action.coverage == (f"write:{outside}",)
    assert not (await run(plan)).is_error
    assert (outside / "new.txt").read_text() == "x"
    assert await harness.call("write", file_path="out/a/b", content="x") == refused(
        f"There is no {outside}/a. Directories are created only in the workspace."
    )


async def test_a_file_is_overwritten_only_if_it_was_viewed_and_unchanged(
    harness: ToolHarness,
) -> None:
    file = harness.write("file", "old")
    never = refused("file was not read in this session yet; view it first. Nothing was written.")
    assert await harness.call("write", file_path="file", content="new") == never
    await harness.write_and_view("file", "old")
    os.utime(file, ns=(1, 1))
    changed = refused(
        "file has changed since it was last read; view it again first. Nothing was written."
    )
    assert await harness.call("write", file_path="file", content="new") == changed
    await harness.call("view", file_path="file")
    for content in ("new", "newer", "newest"):
        assert not (await harness.call("write", file_path="file", content=content)).is_error
    assert file.read_text() == "newest"
    assert await harness.versions() == [
        ("file", version, content)
        for version, content in enumerate(("old", "new", "newer", "newest"))
    ]
    same = refused("file has exactly this content already; nothing was written.")
    assert await harness.call("write", file_path="file", content="newest") == same


def write_other(file: Path, outside: Path) -> None:
    file.write_text("other")


def swap_directory(file: Path, outside: Path) -> None:
    file.parent.rename(file.parent.with_name("away"))
    file.parent.symlink_to(outside)


def swap_file(file: Path, outside: Path) -> None:
    file.unlink()
    file.symlink_to(outside / "secret.txt")


def swap_pipe(file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def delete(file: Path, outside: Path) -> None:
    file.unlink()


def lock(file: Path, outside: Path) -> None:
    file.chmod(0o444)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*.txt") if file.is_file()}


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (write_other, "d/secret.txt has been changed meanwhile; nothing was written."),
        (swap_directory, "a link is not followed"),
        (swap_file, "d/secret.txt is a link"),
        (swap_pipe, "d/secret.txt is a pipe"),
        (delete, "d/secret.txt cannot be written: No such file"),
        (lock, "d/secret.txt is read-only (mode 444)"),
    ],
)
async def test_a_file_changed_after_the_approval_request_is_not_written(
    harness: ToolHarness, outside: Path, tamper: Callable[[Path, Path], None], message: str
) -> None:
    file = await harness.write_and_view("d/secret.txt", "old")
    plan = await harness.plan("write", file_path="d/secret.txt", content="new")
    tamper(file, outside)
    before = contents(harness.path.parent)
    result = await run(plan)
    assert (result.is_error, message in result.content) == (True, True), result.content
    assert contents(harness.path.parent) == before
    assert list(harness.path.parent.rglob(".culm-*")) == []


async def test_a_file_created_meanwhile_is_not_replaced(harness: ToolHarness) -> None:
    plan = await harness.plan("write", file_path="file", content="ours")
    harness.write("file", "theirs")
    assert await run(plan) == refused(
        "file has been created meanwhile; nothing was written. View it."
    )
    assert (names(harness.path), (harness.path / "file").read_text()) == (["file"], "theirs")


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o4755, 0o664])
async def test_mode_owner_and_attributes_are_kept_and_hard_links_keep_the_old_text(
    harness: ToolHarness, mode: int
) -> None:
    file = await harness.write_and_view("run.sh", "old")
    (harness.path / "other").hardlink_to(file)
    if os.geteuid() == 0:
        os.chown(file, 12345, 54321)
    file.chmod(mode)
    try:
        os.setxattr(file, "user.mark", b"kept")
    except OSError:
        marks: list[str] = []
    else:
        marks = ["user.mark"]
    before = file.stat()
    assert not (await harness.call("write", file_path="run.sh", content="new")).is_error
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid,
    )  # fmt: skip
    assert [mark for mark in os.listxattr(file) if mark.startswith("user.")] == marks
    assert ((harness.path / "other").read_text(), file.read_text()) == ("old", "new")


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        (b"a\r\nb\r\n", "x\ny\n", b"x\r\ny\r\n"),
        (b"a\r\nb\r\n", "x\r\ny\n", b"x\r\ny\n"),
        (b"a\nb\n", "x\ny", b"x\ny"),
        (b"\xef\xbb\xbfa", "x\xe9", b"\xef\xbb\xbfx\xc3\xa9"),
        (b"\xef\xbb\xbfa", "\ufeffx", b"\xef\xbb\xbfx"),
        ("\ufeffa\r\nb\r\n".encode("utf-16-le"), "x\xe9\n", "\ufeffx\xe9\r\n".encode("utf-16-le")),
        ("\ufeffa".encode("utf-16-be"), "x😀", "\ufeffx😀".encode("utf-16-be")),
        (b"caf\xe9", "caf\xe9", b"caf\xc3\xa9"),
    ],
)
async def test_encoding_bom_and_line_endings_are_kept(
    harness: ToolHarness, before: bytes, content: str, after: bytes
) -> None:
    file = await harness.write_and_view("file", before)
    assert not (await harness.call("write", file_path="file", content=content)).is_error
    assert file.read_bytes() == after


async def test_a_write_through_a_symlink_keeps_the_symlink(harness: ToolHarness) -> None:
    file = await harness.write_and_view("real", "old")
    (harness.path / "link").symlink_to("real")
    (harness.path / "dangling").symlink_to("d/new")
    for name in ("link", "dangling"):
        assert not (await harness.call("write", file_path=name, content="new")).is_error
    assert ((harness.path / "link").is_symlink(), file.read_text()) == (True, "new")
    assert (harness.path / "d" / "new").read_text() == "new"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "folder is a directory, not a file."),
        (".", ". is a directory, not a file."),
        ("pipe", "pipe is a pipe; only files and directories are read."),
        ("/dev/null", "/dev/null is a device; only files and directories are read."),
        ("/proc/new", "/proc/new belongs to the kernel; it cannot be written."),
        ("/proc/version", "/proc/version is generated by the kernel; use bash"),
        ("binary", "binary is binary data (3 bytes), not text."),
        ("wide", "wide begins like UTF-16 but is not valid UTF-16; it is not changed."),
        ("huge", "huge has 10.0 MiB; files over 10 MiB are changed with a command."),
        ("locked", "locked is read-only (mode 444); change its mode first, if that is allowed."),
        ("folder/file/x", "folder/file is not a directory."),
        ("no/../../x", "There is no no in the workspace. A path cannot go through it"),
        ("no/" + "x" * 300, "A name in no/xxx"),
        ("x" * 300, f"{'x' * 300} cannot be read: File name too long."),
        ("a\0b", "The path contains a NUL character."),
        ("", "write: Expected `str` of length >= 1 - file_path: The file"),
        ("x/" * 2500, "write: Expected `str` of length <= 4096 - file_path: The file"),
    ],
)
async def test_an_impossible_write_is_refused_with_the_reason(
    harness: ToolHarness, path: str, message: str
) -> None:
    harness.write("folder/file")
    harness.write("binary", b"a\0b")
    harness.write("wide", b"\xff\xfe\x00\xd8a")
    harness.write("locked").chmod(0o444)
    with harness.write("huge").open("wb") as huge:
        huge.truncate(FILE_BYTES_MAX + 1)
    os.mkfifo(harness.path / "pipe")
    result = await harness.call("write", file_path=path, content="x")
    assert (result.is_error, result.content[: len(message)]) == (True, message)


async def test_names_and_texts_that_are_not_utf8_are_refused(harness: ToolHarness) -> None:
    name = os.fsdecode(b"caf\xe9")
    harness.write(name, "old")
    for arguments, message in (
        ({"file_path": name, "content": "x"}, "The name of caf\ufffd is not UTF-8; use a command"),
        ({"file_path": "new", "content": "\ud800"}, "The text contains an unpaired surrogate"),
    ):
        call = call_of("write", {})
        given = type(call)(call.id, call.name, "", dict(arguments), SESSION)
        result = await harness.tools["write"].prepare(given)
        assert isinstance(result, CallResult)
        assert result.content.startswith(message)


async def test_a_full_disk_leaves_the_old_file(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "old")
    plan = await harness.plan("write", file_path="file", content="x" * 100_000)
    new = await harness.plan("write", file_path="new", content="x" * 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        results = [await run(plan), await run(new)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [result.content for result in results] == [
        "file cannot be written: File too large. Nothing was changed.",
        "new cannot be written: File too large. Nothing was changed.",
    ]
    assert (file.read_text(), names(harness.path)) == ("old", ["file"])


async def test_a_canceled_write_is_recorded_if_it_happened(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "old")
    for content in ("new", "newer"):
        plan = await harness.plan("write", file_path="file", content=content)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            task = group.create_task(run_plan(plan))
            await asyncio.sleep(0)
            task.cancel()
        now = file.read_text()
        found = [version for _, _, version in await harness.versions()]
        assert now == (found[-1] if found else "old")
        assert names(harness.path) == ["file"]
        await harness.call("view", file_path="file")


async def run_plan(plan: CallPlan) -> CallResult:
    return await run(plan)


async def test_concurrent_writes_do_not_overwrite_each_other(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "old")
    plans = [await harness.plan("write", file_path="file", content=f"new {n}") for n in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_plan(plan)) for plan in plans]
    written = [n for n, task in enumerate(tasks) if not task.result().is_error]
    assert len(written) == 1
    assert file.read_text() == f"new {written[0]}"
    message = "file has been changed meanwhile; nothing was written. View it again."
    assert sum(task.result() == refused(message) for task in tasks) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
async def test_a_read_only_directory_is_an_error(harness: ToolHarness) -> None:
    await harness.write_and_view("d/file", "old")
    (harness.path / "d").chmod(0o555)
    try:
        results = [
            await harness.call("write", file_path=name, content="x") for name in ("d/file", "d/new")
        ]
    finally:
        (harness.path / "d").chmod(0o755)
    assert all("cannot be written: Permission denied" in result.content for result in results)
