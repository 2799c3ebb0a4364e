"""`write`, and what holds for every tool that changes a file: all or nothing, never blindly."""

import asyncio
import os
import resource
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from culm.store.history import read_stamp
from culm.tools.base import CallPlan, CallResult, ResolvedAction
from culm.tools.files.change import FILE_BYTES_MAX
from culm.tools.files.read_stamps import stamp_of
from culm.tools.write import make_write
from culm.wire.codec import encode
from tests.support import WAIT_S
from tests.tools.conftest import SESSION, Desk, call_of, refused, run

A_DIGEST = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # Of "a".
B_DIGEST = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"  # Of "b".


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def test_a_new_file_is_made_with_its_directories_and_recorded(desk: Desk) -> None:
    result = await desk.call("write", file_path="a/b/c.txt", content="one\ntwo\n")
    about = {
        "diff": "--- a/a/b/c.txt\n+++ b/a/b/c.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n",
        "additions": 2,
        "removals": 0,
    }
    assert result == CallResult(
        "Made a/b/c.txt (2 lines, 8 bytes).", metadata=encode(about).decode()
    )
    file = desk.path / "a" / "b" / "c.txt"
    assert (file.read_text(), names(file.parent)) == ("one\ntwo\n", ["c.txt"])
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert await desk.versions() == [("c.txt", 0, ""), ("c.txt", 1, "one\ntwo\n")]
    assert await desk.context.store.read(read_stamp(SESSION, str(file))) == stamp_of(file.stat())


async def test_a_person_sees_both_contents_and_the_digest_is_of_them(desk: Desk) -> None:
    file = await desk.seen("file", "a")
    plan = await desk.plan("write", file_path="./file", content="b")
    assert plan.action == ResolvedAction(
        tool="write",
        name="write",
        description=f"Change {file}",
        path=str(desk.path),
        params={"file_path": str(file), "old_content": "a", "new_content": "b"},
        resolved={"path": str(file), "old": A_DIGEST, "new": B_DIGEST},
        paths=(str(file),),
        coverage=(f"write:{desk.path}",),
    )
    again = await desk.plan("write", file_path=str(file), content="b")
    assert again.action.digest == plan.action.digest
    assert file.read_text() == "a"  # Nothing has happened yet.
    hook = (await desk.plan("write", file_path=".git/hooks/x", content="b")).action
    assert (hook.coverage, hook.params["old_content"]) == ((f"write:{desk.path}/.git",), "")


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
async def test_a_consent_to_edit_the_project_is_none_to_change_what_runs_or_is_allowed(
    desk: Desk, name: str, place: str
) -> None:
    context = replace(desk.context, outputs=desk.path / "share" / "projects" / "key" / "outputs")
    plan = await make_write(context).prepare(call_of("write", {"file_path": name, "content": "b"}))
    assert isinstance(plan, CallPlan)
    assert plan.action.coverage == (f"write:{desk.path / place}",)


async def test_outside_it_is_asked_by_the_real_path_and_makes_no_directories(
    desk: Desk, outside: Path
) -> None:
    (desk.path / "out").symlink_to(outside)
    plan = await desk.plan("write", file_path="out/new.txt", content="x")
    assert plan.action.description == f"Create {outside}/new.txt"
    assert plan.action.why == f"{outside}/new.txt is outside the workspace"
    assert plan.action.coverage == (f"write:{outside}",)
    assert not (await run(plan)).is_error
    assert (outside / "new.txt").read_text() == "x"
    assert await desk.call("write", file_path="out/a/b", content="x") == refused(
        f"There is no {outside}/a. Directories are made only in the workspace."
    )


async def test_a_file_is_overwritten_only_if_it_was_read_and_has_not_changed(desk: Desk) -> None:
    file = desk.write("file", "old")
    never = refused("file was not read in this session yet; view it first. Nothing was written.")
    assert await desk.call("write", file_path="file", content="new") == never
    await desk.seen("file", "old")
    os.utime(file, ns=(1, 1))
    changed = refused(
        "file has changed since it was last read; view it again first. Nothing was written."
    )
    assert await desk.call("write", file_path="file", content="new") == changed
    await desk.call("view", file_path="file")
    for content in ("new", "newer", "newest"):
        assert not (await desk.call("write", file_path="file", content=content)).is_error
    assert file.read_text() == "newest"
    assert await desk.versions() == [
        ("file", version, content)
        for version, content in enumerate(("old", "new", "newer", "newest"))
    ]
    same = refused("file has exactly this content already; nothing was written.")
    assert await desk.call("write", file_path="file", content="newest") == same


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
    ("meddle", "said"),
    [
        (write_other, "d/secret.txt was changed meanwhile; nothing was written."),
        (swap_directory, "a link is not followed"),
        (swap_file, "d/secret.txt is a link"),
        (swap_pipe, "d/secret.txt is a pipe"),
        (delete, "d/secret.txt cannot be written: No such file"),
        (lock, "d/secret.txt is read-only (mode 444)"),
    ],
)
async def test_what_was_changed_after_it_was_shown_is_not_written(
    desk: Desk, outside: Path, meddle: Callable[[Path, Path], None], said: str
) -> None:
    file = await desk.seen("d/secret.txt", "old")
    plan = await desk.plan("write", file_path="d/secret.txt", content="new")
    meddle(file, outside)
    before = contents(desk.path.parent)
    result = await run(plan)
    assert (result.is_error, said in result.content) == (True, True), result.content
    assert contents(desk.path.parent) == before
    assert list(desk.path.parent.rglob(".culm-*")) == []


async def test_a_file_made_by_somebody_meanwhile_is_not_replaced(desk: Desk) -> None:
    plan = await desk.plan("write", file_path="file", content="ours")
    desk.write("file", "theirs")
    assert await run(plan) == refused("file was made meanwhile; nothing was written. View it.")
    assert (names(desk.path), (desk.path / "file").read_text()) == (["file"], "theirs")


@pytest.mark.parametrize("mode", [0o755, 0o600, 0o4755, 0o664])
async def test_mode_owner_and_attributes_stay_and_other_names_keep_the_old(
    desk: Desk, mode: int
) -> None:
    file = await desk.seen("run.sh", "old")
    (desk.path / "other").hardlink_to(file)
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
    assert not (await desk.call("write", file_path="run.sh", content="new")).is_error
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid,
    )  # fmt: skip
    assert [mark for mark in os.listxattr(file) if mark.startswith("user.")] == marks
    assert ((desk.path / "other").read_text(), file.read_text()) == ("old", "new")


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
async def test_encoding_mark_and_line_ends_stay(
    desk: Desk, before: bytes, content: str, after: bytes
) -> None:
    file = await desk.seen("file", before)
    assert not (await desk.call("write", file_path="file", content=content)).is_error
    assert file.read_bytes() == after


async def test_a_link_inside_is_kept_and_what_it_names_is_written(desk: Desk) -> None:
    file = await desk.seen("real", "old")
    (desk.path / "link").symlink_to("real")
    (desk.path / "dangling").symlink_to("d/new")
    for name in ("link", "dangling"):
        assert not (await desk.call("write", file_path=name, content="new")).is_error
    assert ((desk.path / "link").is_symlink(), file.read_text()) == (True, "new")
    assert (desk.path / "d" / "new").read_text() == "new"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("folder", "folder is a directory, not a file."),
        (".", ". is a directory, not a file."),
        ("pipe", "pipe is a pipe; only files and directories are read."),
        ("/dev/null", "/dev/null is a device; only files and directories are read."),
        ("/proc/new", "/proc/new is the kernel's; nothing is written there."),
        ("/proc/version", "/proc/version is made up by the kernel and is no file; use bash"),
        ("binary", "binary is binary data (3 bytes), not text."),
        ("wide", "wide begins like UTF-16 and is none; it is not changed."),
        ("huge", "huge has 10.0 MiB; files over 10 MiB are changed with a command."),
        ("locked", "locked is read-only (mode 444); change its mode first, if you may."),
        ("folder/file/x", "folder/file is no directory."),
        ("no/../../x", "There is no no in the workspace. So nothing above or beside it"),
        ("no/" + "x" * 300, "A name in no/xxx"),
        ("x" * 300, f"{'x' * 300} cannot be read: File name too long."),
        ("a\0b", "A path has no NUL character in it."),
        ("", "write: Expected `str` of length >= 1 - file_path: The file"),
        ("x/" * 2500, "write: Expected `str` of length <= 4096 - file_path: The file"),
    ],
)
async def test_what_cannot_be_written_is_refused_in_words(desk: Desk, path: str, said: str) -> None:
    desk.write("folder/file")
    desk.write("binary", b"a\0b")
    desk.write("wide", b"\xff\xfe\x00\xd8a")
    desk.write("locked").chmod(0o444)
    with desk.write("huge").open("wb") as huge:
        huge.truncate(FILE_BYTES_MAX + 1)
    os.mkfifo(desk.path / "pipe")
    result = await desk.call("write", file_path=path, content="x")
    assert (result.is_error, result.content[: len(said)]) == (True, said)


async def test_names_and_texts_that_are_no_utf8_are_refused(desk: Desk) -> None:
    name = os.fsdecode(b"caf\xe9")
    desk.write(name, "old")
    for arguments, said in (
        ({"file_path": name, "content": "x"}, "The name of caf\ufffd is no UTF-8; such files are"),
        ({"file_path": "new", "content": "\ud800"}, "The text has half a surrogate pair in it"),
    ):
        call = call_of("write", {})
        given = type(call)(call.id, call.name, "", dict(arguments), SESSION)
        result = await desk.tools["write"].prepare(given)
        assert isinstance(result, CallResult)
        assert result.content.startswith(said)


async def test_a_disk_that_is_full_leaves_the_old_file(desk: Desk) -> None:
    file = await desk.seen("file", "old")
    plan = await desk.plan("write", file_path="file", content="x" * 100_000)
    new = await desk.plan("write", file_path="new", content="x" * 100_000)
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
    assert (file.read_text(), names(desk.path)) == ("old", ["file"])


async def test_a_write_that_was_cancelled_is_recorded_if_it_happened(desk: Desk) -> None:
    file = await desk.seen("file", "old")
    for content in ("new", "newer"):
        plan = await desk.plan("write", file_path="file", content=content)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            task = group.create_task(_quietly(plan))
            await asyncio.sleep(0)
            task.cancel()
        now = file.read_text()
        found = [version for _, _, version in await desk.versions()]
        assert now == (found[-1] if found else "old")
        assert names(desk.path) == ["file"]
        await desk.call("view", file_path="file")


async def _quietly(plan: CallPlan) -> CallResult:
    return await run(plan)


async def test_two_sessions_that_write_at_once_do_not_overwrite_each_other(desk: Desk) -> None:
    file = await desk.seen("file", "old")
    plans = [await desk.plan("write", file_path="file", content=f"new {n}") for n in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_quietly(plan)) for plan in plans]
    written = [n for n, task in enumerate(tasks) if not task.result().is_error]
    assert len(written) == 1
    assert file.read_text() == f"new {written[0]}"
    said = "file was changed meanwhile; nothing was written. View it again."
    assert sum(task.result() == refused(said) for task in tasks) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
async def test_a_directory_that_is_read_only_is_said(desk: Desk) -> None:
    await desk.seen("d/file", "old")
    (desk.path / "d").chmod(0o555)
    try:
        results = [
            await desk.call("write", file_path=name, content="x") for name in ("d/file", "d/new")
        ]
    finally:
        (desk.path / "d").chmod(0o755)
    assert all("cannot be written: Permission denied" in result.content for result in results)
