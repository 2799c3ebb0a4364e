"""`view` reads lines, says what follows, and refuses what is no text."""

import base64
import os
from pathlib import Path

import pytest

from culm.store.history import read_files, read_stamp
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.files.read_stamps import stamp_of
from culm.tools.view import (
    CHUNK_BYTES,
    IMAGE_BYTES_MAX,
    LINE_CHARS_MAX,
    LINE_CUT,
    LINES,
    RESULT_BYTES_MAX,
    WHOLE_BYTES_MAX,
)
from culm.wire.codec import encode
from tests.support import carried_out
from tests.tools.conftest import SECRET, SESSION, Desk, refused, run


async def view(desk: Desk, content: str | bytes, **arguments: int) -> str:
    desk.write("file", content)
    return (await desk.call("view", file_path="file", **arguments)).content


async def test_lines_are_numbered_and_the_end_is_said(desk: Desk) -> None:
    file = desk.write("a/file.txt", "\ufeffone\r\ntwo\n\nfour é")
    about = {
        "file_path": str(file),
        "content": "one\ntwo\n\nfour é",
        "truncated": False,
        "number_of_lines": 4,
    }
    assert await desk.call("view", file_path="a/file.txt") == CallResult(
        "     1|one\n     2|two\n     3|\n     4|four é\n(end of file, line 4)",
        metadata=encode(about).decode(),
    )


async def test_a_part_says_with_which_offset_to_go_on(desk: Desk) -> None:
    text = "a\nb\nc\nd\n"
    assert await view(desk, text, offset=1, limit=2) == (
        "     2|b\n     3|c\n(more lines follow; go on with offset 3)"
    )
    assert await view(desk, text, offset=3) == "     4|d\n(end of file, line 4)"
    assert await view(desk, text, limit=4) == (
        "     1|a\n     2|b\n     3|c\n     4|d\n(end of file, line 4)"
    )
    assert await view(desk, text, offset=4) == "file ends with line 4."


async def test_numbers_written_as_text_are_taken_and_null_is_left_out(desk: Desk) -> None:
    desk.write("file", "a\nb\nc")
    result = await desk.call("view", file_path="file", offset="1", limit=None, other=[1])
    assert result.content == "     2|b\n     3|c\n(end of file, line 3)"


async def test_without_a_limit_so_many_lines_are_shown(desk: Desk) -> None:
    shown = await view(desk, "x\n" * (LINES + 1))
    assert shown.endswith(f"\n  {LINES}|x\n(more lines follow; go on with offset {LINES})")


@pytest.mark.parametrize("length", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_huge_line_is_cut_and_the_next_one_is_whole(desk: Desk, length: int) -> None:
    cut = "é" * LINE_CHARS_MAX + LINE_CUT
    shown = await view(desk, "first\n" + "é" * length + "\nlast")
    assert shown == f"     1|first\n     2|{cut}\n     3|last\n(end of file, line 3)"
    assert await view(desk, "a\n" * CHUNK_BYTES + "z", offset=CHUNK_BYTES) == (
        f"{CHUNK_BYTES + 1:>6}|z\n(end of file, line {CHUNK_BYTES + 1})"
    )


async def test_a_result_is_bounded_and_can_be_gone_on_from(desk: Desk) -> None:
    text = "".join(f"{number} {'x' * 1000}\n" for number in range(500))
    shown = await view(desk, text)
    assert len(shown.encode()) <= RESULT_BYTES_MAX + 100
    following = shown.count("\n")
    assert shown.endswith(f"(more lines follow; go on with offset {following})")
    rest = await view(desk, text, offset=following)
    assert rest.startswith(f"   {following + 1}|{following} x")


async def test_a_large_file_wants_to_be_asked_for_lines(desk: Desk) -> None:
    text = b"0123456\n" * (WHOLE_BYTES_MAX // 8 + 1)
    assert await view(desk, text) == "file has 5.0 MiB. Say which lines: give offset and limit."
    assert await view(desk, text, offset=600_000, limit=1) == (
        "600001|0123456\n(more lines follow; go on with offset 600001)"
    )


async def test_an_empty_file_says_so(desk: Desk) -> None:
    assert await view(desk, "") == "(the file is empty)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"BM\0\0", "file is an image (4 bytes), not text."),
        (b"a\0b", "file is binary data (3 bytes), not text."),
        (b"%PDF-1.7", "file is a PDF document (8 bytes), not text."),
        (b"PK\x03\x04" + b"x" * 2044, "file is a ZIP archive (2.0 KiB), not text."),
    ],
)
async def test_what_is_no_text_is_refused_with_size_and_kind(
    desk: Desk, content: bytes, said: str
) -> None:
    desk.write("file", content)
    assert await desk.call("view", file_path="file") == refused(said)


async def test_text_in_another_encoding_is_shown_with_marks(desk: Desk) -> None:
    assert await view(desk, b"BM caf\xe9") == "     1|BM caf\ufffd\n(end of file, line 1)"


async def test_a_missing_file_offers_similar_names(desk: Desk) -> None:
    for name in ("src/Reader.py", "src/readers.py", "src/other.txt"):
        desk.write(name)
    assert await desk.call("view", file_path="src/reader.p") == refused(
        "There is no src/reader.p in the workspace. Similar: src/Reader.py, src/readers.py."
    )
    assert await desk.call("view", file_path="scr/other.txt") == refused(
        "There is no scr in the workspace. Similar: src."
    )
    assert await desk.call("view", file_path="zzz") == refused("There is no zzz in the workspace.")


async def test_a_directory_is_for_ls(desk: Desk) -> None:
    assert await desk.call("view", file_path=".") == refused(". is a directory; use ls to list it.")


async def test_a_file_outside_is_asked_about_by_its_real_path_and_then_read(
    desk: Desk, outside: Path
) -> None:
    secret = str(outside / "secret.txt")
    (desk.path / "link").symlink_to(secret)
    plan = await desk.plan("view", file_path="link", offset=0)
    assert plan.action == ResolvedAction(
        tool="view",
        name="read",
        description=f"Read {secret}",
        path=str(outside),
        params={"file_path": secret, "offset": 0, "limit": 0},
        resolved={"path": secret, "arguments": {"file_path": "link", "offset": 0, "limit": 0}},
        paths=(secret,),
        coverage=(f"read:{outside}",),
        why=f"{secret} is outside the workspace",
    )
    assert (await run(plan)).content == f"     1|{SECRET}\n(end of file, line 1)"
    (outside / "secret.txt").rename(outside / "other")
    (outside / "secret.txt").symlink_to("other")
    assert await run(plan) == refused(
        f"{secret} cannot be read: it was changed into something else meanwhile, and a link is "
        "not followed."
    )


async def test_inside_and_in_our_own_outputs_nobody_is_asked(desk: Desk) -> None:
    desk.write("file")
    desk.write("../outputs/long.txt", "all of it")
    for path in ("file", f"{desk.context.outputs}/long.txt"):
        assert (await desk.plan("view", file_path=path)).action.is_free
    plan = await desk.plan("view", file_path="../outputs/long.txt")
    assert (await run(plan)).content == "     1|all of it\n(end of file, line 1)"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "image/png"),
        (b"\xff\xd8\xff\0", "image/jpeg"),
        (b"GIF89a\0", "image/gif"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
    ],
)
async def test_an_image_is_handed_over(desk: Desk, content: bytes, kind: str) -> None:
    file = desk.write("a.bin", content)
    assert await desk.call("view", file_path="a.bin") == CallResult(
        f"a.bin is an image ({kind}, {len(content)} bytes).",
        metadata=f'{{"file_path":"{file}","content":""}}',
        data=base64.b64encode(content).decode(),
        mime_type=kind,
    )
    desk.write("a.bin", content + bytes(IMAGE_BYTES_MAX))
    assert await desk.call("view", file_path="a.bin") == refused(
        "a.bin is an image of 5.0 MiB; more than 5 MiB are not shown."
    )


async def test_utf_16_is_read(desk: Desk) -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        shown = await view(desk, "\ufeffone é\r\ntwo".encode(encoding))
        assert shown == "     1|one é\n     2|two\n(end of file, line 2)"


async def test_what_is_read_is_noted_with_how_it_looked(desk: Desk, outside: Path) -> None:
    file = await desk.seen("file", "text")
    stamp = await desk.context.store.read(read_stamp(SESSION, str(file)))
    assert stamp == stamp_of(file.stat())
    strange = desk.write(os.fsdecode(b"caf\xe9"), "text")
    await carried_out(desk.tools["view"], _call(str(strange)))
    assert await desk.context.store.read(read_files(SESSION)) == [str(file)]


async def test_the_first_reads_of_very_many_are_forgotten(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("culm.store.history.READ_FILES_MAX", 3)
    for name in "abcad":
        await desk.seen(name, "text")
    names = [Path(path).name for path in await desk.context.store.read(read_files(SESSION))]
    assert names == ["d", "a", "c"]


async def test_a_path_of_5000_characters_is_refused_with_its_field(desk: Desk) -> None:
    result = await desk.call("view", file_path="x/" * 2500)
    assert result == refused(
        "view: Expected `str` of length <= 4096 - file_path: The file; relative paths are in the "
        "workspace."
    )


async def test_a_digest_can_be_made_of_any_path(desk: Desk) -> None:
    digests: set[str] = set()
    for name in (b"caf\xe9", b"caf\xea"):
        desk.write(os.fsdecode(name), "here")
        plan = await desk.tools["view"].prepare(_call(os.fsdecode(name)))
        assert isinstance(plan, CallPlan)
        digests.add(plan.action.digest)
    assert len(digests) == 2


async def test_a_pipe_is_refused_without_waiting(desk: Desk) -> None:
    os.mkfifo(desk.path / "pipe")
    assert await desk.call("view", file_path="pipe") == refused(
        "pipe is a pipe; only files and directories are read."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "view: Object missing required field `file_path`"),
        ({"file_path": 3}, "Expected `str`, got `int` - file_path: The file; relative paths"),
        ({"file_path": "x", "offset": -1}, "Expected `int` >= 0 - offset: How many lines to skip"),
        ({"file_path": "x", "limit": "many"}, "Expected `int`, got `str` - limit: How many lines"),
    ],
)
async def test_a_bad_argument_is_named_with_what_is_right(
    desk: Desk, arguments: dict[str, object], said: str
) -> None:
    result = await desk.call("view", **arguments)
    assert result.is_error
    assert said in result.content


@pytest.mark.parametrize("name", ["new\nline", "👩‍💻", os.fsdecode(b"caf\xe9"), "-rf *", " "])
async def test_strange_names_are_read(desk: Desk, name: str) -> None:
    desk.write(name, "here")
    result = await carried_out(desk.tools["view"], _call(name))
    assert result.content == "     1|here\n(end of file, line 1)"
    result.metadata.encode()


def _call(name: str) -> CallRequest:
    return CallRequest("call-1", "view", "", {"file_path": name})
