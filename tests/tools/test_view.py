"""`view` reads lines, says how to continue, and refuses binary files."""

import base64
import os
from pathlib import Path

import pytest

from culm.store.sessions import read_files, read_stamp
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.files.read_tool import stamp_of
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
from tests.support import run_call
from tests.tools.conftest import SECRET, SESSION, ToolHarness, refused, run


async def view(harness: ToolHarness, content: str | bytes, **arguments: int) -> str:
    harness.write("file", content)
    return (await harness.call("view", file_path="file", **arguments)).content


async def test_lines_are_numbered_and_the_end_of_the_file_is_marked(harness: ToolHarness) -> None:
    file = harness.write("a/file.txt", "\ufeffone\r\ntwo\n\nfour é")
    about = {
        "file_path": str(file),
        "content": "one\ntwo\n\nfour é",
        "truncated": False,
        "number_of_lines": 4,
    }
    assert await harness.call("view", file_path="a/file.txt") == CallResult(
        "     1|one\n     2|two\n     3|\n     4|four é\n(end of file, line 4)",
        metadata=encode(about).decode(),
    )


async def test_a_partial_view_names_the_next_offset(harness: ToolHarness) -> None:
    text = "a\nb\nc\nd\n"
    assert await view(harness, text, offset=1, limit=2) == (
        "     2|b\n     3|c\n(more lines follow; continue with offset 3)"
    )
    assert await view(harness, text, offset=3) == "     4|d\n(end of file, line 4)"
    assert await view(harness, text, limit=4) == (
        "     1|a\n     2|b\n     3|c\n     4|d\n(end of file, line 4)"
    )
    assert await view(harness, text, offset=4) == "file ends with line 4."


async def test_numbers_as_text_are_accepted_and_null_is_ignored(harness: ToolHarness) -> None:
    harness.write("file", "a\nb\nc")
    result = await harness.call("view", file_path="file", offset="1", limit=None, other=[1])
    assert result.content == "     2|b\n     3|c\n(end of file, line 3)"


async def test_the_default_number_of_lines_is_limited(harness: ToolHarness) -> None:
    shown = await view(harness, "x\n" * (LINES + 1))
    assert shown.endswith(f"\n  {LINES}|x\n(more lines follow; continue with offset {LINES})")


@pytest.mark.parametrize("length", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_huge_line_is_cut_and_the_next_line_is_complete(
    harness: ToolHarness, length: int
) -> None:
    cut = "é" * LINE_CHARS_MAX + LINE_CUT
    shown = await view(harness, "first\n" + "é" * length + "\nlast")
    assert shown == f"     1|first\n     2|{cut}\n     3|last\n(end of file, line 3)"
    assert await view(harness, "a\n" * CHUNK_BYTES + "z", offset=CHUNK_BYTES) == (
        f"{CHUNK_BYTES + 1:>6}|z\n(end of file, line {CHUNK_BYTES + 1})"
    )


async def test_a_result_is_bounded_and_names_the_next_offset(harness: ToolHarness) -> None:
    text = "".join(f"{number} {'x' * 1000}\n" for number in range(500))
    shown = await view(harness, text)
    assert len(shown.encode()) <= RESULT_BYTES_MAX + 100
    following = shown.count("\n")
    assert shown.endswith(f"(more lines follow; continue with offset {following})")
    rest = await view(harness, text, offset=following)
    assert rest.startswith(f"   {following + 1}|{following} x")


async def test_a_large_file_needs_an_offset_and_a_limit(harness: ToolHarness) -> None:
    text = b"0123456\n" * (WHOLE_BYTES_MAX // 8 + 1)
    assert await view(harness, text) == "file has 5.0 MiB. Set offset and limit to read a part."
    assert await view(harness, text, offset=600_000, limit=1) == (
        "600001|0123456\n(more lines follow; continue with offset 600001)"
    )


async def test_an_empty_file_is_reported(harness: ToolHarness) -> None:
    assert await view(harness, "") == "(the file is empty)"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"BM\0\0", "file is an image (4 bytes), not text."),
        (b"a\0b", "file is binary data (3 bytes), not text."),
        (b"%PDF-1.7", "file is a PDF document (8 bytes), not text."),
        (b"PK\x03\x04" + b"x" * 2044, "file is a ZIP archive (2.0 KiB), not text."),
    ],
)
async def test_a_binary_file_is_refused_with_its_kind_and_size(
    harness: ToolHarness, content: bytes, message: str
) -> None:
    harness.write("file", content)
    assert await harness.call("view", file_path="file") == refused(message)


async def test_invalid_utf8_is_shown_with_replacement_characters(harness: ToolHarness) -> None:
    assert await view(harness, b"BM caf\xe9") == "     1|BM caf\ufffd\n(end of file, line 1)"


async def test_a_missing_file_error_suggests_similar_names(harness: ToolHarness) -> None:
    for name in ("src/Reader.py", "src/readers.py", "src/other.txt"):
        harness.write(name)
    assert await harness.call("view", file_path="src/reader.p") == refused(
        "There is no src/reader.p in the workspace. Similar: src/Reader.py, src/readers.py."
    )
    assert await harness.call("view", file_path="scr/other.txt") == refused(
        "There is no scr in the workspace. Similar: src."
    )
    assert await harness.call("view", file_path="zzz") == refused(
        "There is no zzz in the workspace."
    )


async def test_a_directory_is_refused_with_a_hint_to_ls(harness: ToolHarness) -> None:
    assert await harness.call("view", file_path=".") == refused(
        ". is a directory; use ls to list it."
    )


async def test_a_file_outside_the_workspace_needs_approval(
    harness: ToolHarness, outside: Path
) -> None:
    secret = str(outside / "secret.txt")
    (harness.path / "link").symlink_to(secret)
    plan = await harness.plan("view", file_path="link", offset=0)
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
        f"{secret} cannot be read: it has been replaced meanwhile, and a link is not followed."
    )


async def test_files_inside_and_saved_outputs_need_no_approval(harness: ToolHarness) -> None:
    harness.write("file")
    harness.write("../outputs/long.txt", "all of it")
    for path in ("file", f"{harness.context.outputs}/long.txt"):
        assert (await harness.plan("view", file_path=path)).action.is_free
    plan = await harness.plan("view", file_path="../outputs/long.txt")
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
async def test_an_image_is_returned_as_data(
    harness: ToolHarness, content: bytes, kind: str
) -> None:
    file = harness.write("a.bin", content)
    assert await harness.call("view", file_path="a.bin") == CallResult(
        f"a.bin is an image ({kind}, {len(content)} bytes).",
        metadata=f'{{"file_path":"{file}","content":""}}',
        data=base64.b64encode(content).decode(),
        mime_type=kind,
    )
    harness.write("a.bin", content + bytes(IMAGE_BYTES_MAX))
    assert await harness.call("view", file_path="a.bin") == refused(
        "a.bin is an image of 5.0 MiB; the maximum is 5 MiB."
    )


async def test_utf_16_is_decoded(harness: ToolHarness) -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        shown = await view(harness, "\ufeffone é\r\ntwo".encode(encoding))
        assert shown == "     1|one é\n     2|two\n(end of file, line 2)"


async def test_a_view_records_the_stamp_of_the_file(harness: ToolHarness, outside: Path) -> None:
    file = await harness.write_and_view("file", "text")
    stamp = await harness.context.store.read(read_stamp(SESSION, str(file)))
    assert stamp == stamp_of(file.stat())
    strange = harness.write(os.fsdecode(b"caf\xe9"), "text")
    await run_call(harness.tools["view"], _call(str(strange)))
    assert await harness.context.store.read(read_files(SESSION)) == [str(file)]


async def test_the_oldest_read_stamps_are_dropped(
    harness: ToolHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("culm.store.sessions.READ_FILES_MAX", 3)
    for name in "abcad":
        await harness.write_and_view(name, "text")
    names = [Path(path).name for path in await harness.context.store.read(read_files(SESSION))]
    assert names == ["d", "a", "c"]


async def test_a_path_of_5000_characters_is_refused(harness: ToolHarness) -> None:
    result = await harness.call("view", file_path="x/" * 2500)
    assert result == refused(
        "view: Expected `str` of length <= 4096 - file_path: The file; relative paths are in the "
        "workspace."
    )


async def test_a_digest_can_be_made_of_any_path(harness: ToolHarness) -> None:
    digests: set[str] = set()
    for name in (b"caf\xe9", b"caf\xea"):
        harness.write(os.fsdecode(name), "here")
        plan = await harness.tools["view"].prepare(_call(os.fsdecode(name)))
        assert isinstance(plan, CallPlan)
        digests.add(plan.action.digest)
    assert len(digests) == 2


async def test_a_pipe_is_refused_without_waiting(harness: ToolHarness) -> None:
    os.mkfifo(harness.path / "pipe")
    assert await harness.call("view", file_path="pipe") == refused(
        "pipe is a pipe; only files and directories are read."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "view: Object missing required field `file_path`"),
        ({"file_path": 3}, "Expected `str`, got `int` - file_path: The file; relative paths"),
        ({"file_path": "x", "offset": -1}, "Expected `int` >= 0 - offset: How many lines to skip"),
        ({"file_path": "x", "limit": "many"}, "Expected `int`, got `str` - limit: How many lines"),
    ],
)
async def test_an_invalid_argument_is_refused_with_its_description(
    harness: ToolHarness, arguments: dict[str, object], message: str
) -> None:
    result = await harness.call("view", **arguments)
    assert result.is_error
    assert message in result.content


@pytest.mark.parametrize("name", ["new\nline", "👩‍💻", os.fsdecode(b"caf\xe9"), "-rf *", " "])
async def test_unusual_file_names_can_be_read(harness: ToolHarness, name: str) -> None:
    harness.write(name, "here")
    result = await run_call(harness.tools["view"], _call(name))
    assert result.content == "     1|here\n(end of file, line 1)"
    result.metadata.encode()


def _call(name: str) -> CallRequest:
    return CallRequest("call-1", "view", "", {"file_path": name})
