"""`edit` replaces a unique text; everything else stays, byte for byte."""

import pytest

from culm.tools.base import CallRequest, CallResult
from culm.tools.files.change import HISTORY_CHARS_MAX
from culm.tools.files.diffs import CONTENT_CHARS_MAX
from culm.wire.codec import Json, decode, encode
from tests.tools.conftest import ToolHarness, refused, run


async def test_an_edit_returns_the_new_lines_and_both_contents(harness: ToolHarness) -> None:
    before = "one\ntwo\nthree\nfour\nfive\n"
    file = await harness.write_and_view("file", before)
    result = await harness.call("edit", file_path="file", old_string="three", new_string="3\n3.5")
    after = before.replace("three", "3\n3.5")
    about = {"additions": 2, "removals": 1, "old_content": before, "new_content": after}
    assert result == CallResult(
        "Changed file (+2 -1 lines).\n"
        "     1|one\n     2|two\n     3|3\n     4|3.5\n     5|four\n     6|five",
        metadata=encode(about).decode(),
    )
    assert file.read_text() == after
    assert await harness.versions() == [("file", 0, before), ("file", 1, after)]


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\r\nc", "a\nb", "a\nx\nb", b"a\r\nx\r\nb\r\nc"),
        (b"a\nb\r\nc\n", "c", "x", b"a\nb\r\nx\n"),
        (b"\xef\xbb\xbfa b", "a", "x", b"\xef\xbb\xbfx b"),
        ("\ufeffa\r\nb".encode("utf-16-le"), "a\nb", "é", "\ufeffé".encode("utf-16-le")),
        ("\ufeffa b".encode("utf-16-be"), "b", "😀", "\ufeffa 😀".encode("utf-16-be")),
        (b"caf\xe9 \xff\xfe b", "b", "x\xe9", b"caf\xe9 \xff\xfe x\xc3\xa9"),
        (b"no end", "end", "end\n", b"no end\n"),
        (b"a\n\n", "\n\n", "", b"a"),
    ],
)
async def test_text_outside_the_replacement_stays_byte_for_byte(
    harness: ToolHarness, before: bytes, old: str, new: str, after: bytes
) -> None:
    file = await harness.write_and_view("file", before)
    result = await harness.call("edit", file_path="file", old_string=old, new_string=new)
    assert (result.is_error, file.read_bytes()) == (False, after), result.content


async def test_fifty_edits_in_a_row_need_no_second_view(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "".join(f"line {n:02}\n" for n in range(50)))
    for n in range(50):
        tool = ("edit", "multiedit")[n % 2]
        one = {"old_string": f"line {n:02}\n", "new_string": f"row {n:02}\n"}
        given = one if tool == "edit" else {"edits": [one]}
        assert not (await harness.call(tool, file_path="file", **given)).is_error
    assert file.read_text() == "".join(f"row {n:02}\n" for n in range(50))
    assert len(await harness.versions()) == 51


async def test_a_file_changed_outside_must_be_viewed_again(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "a b")
    await harness.call("edit", file_path="file", old_string="a", new_string="x")
    file.write_text("x b c")
    given = {"file_path": "file", "old_string": "b", "new_string": "y"}
    assert await harness.call("edit", **given) == refused(
        "file has changed since it was last read; view it again first. Nothing was written."
    )
    await harness.call("view", file_path="file")
    assert not (await harness.call("edit", **given)).is_error
    assert [version for _, _, version in await harness.versions()] == [
        "a b",
        "x b",
        "x b c",
        "x y c",
    ]


async def test_a_view_in_another_session_does_not_count(harness: ToolHarness) -> None:
    await harness.write_and_view("file", "a")
    given: dict[str, Json] = {"file_path": "file", "old_string": "a", "new_string": "b"}
    call = CallRequest("call-1", "edit", "", given, "session-2")
    assert await harness.tools["edit"].prepare(call) == refused(
        "file was not read in this session yet; view it first. Nothing was written."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"old_string": "zzz", "new_string": ""}, "old_string was not found, nor anything like"),
        ({"old_string": "a", "new_string": "b"}, "old_string was found 2 times, at lines 1, 2."),
        ({"old_string": "a", "new_string": "a"}, "old_string and new_string are the same"),
        ({"old_string": "", "new_string": "x"}, "file already exists. Set old_string to the text"),
        ({"old_string": "a"}, "edit: Object missing required field `new_string`"),
        (
            {"file_path": "new", "old_string": "a", "new_string": "b"},
            "new does not exist. Pass an empty old_string to create it.",
        ),
    ],
)
async def test_an_impossible_edit_is_refused_and_nothing_is_written(
    harness: ToolHarness, arguments: dict[str, str], message: str
) -> None:
    file = await harness.write_and_view("file", "a\n a")
    result = await harness.call("edit", **{"file_path": "file", **arguments})
    assert (result.is_error, result.content[: len(message)]) == (True, message)
    assert (file.read_text(), await harness.versions()) == ("a\n a", [])


async def test_replace_all_replaces_every_occurrence(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "a\r\nb\na a")
    given = {"file_path": "file", "old_string": "a", "new_string": "x\ny", "replace_all": "true"}
    assert not (await harness.call("edit", **given)).is_error
    assert file.read_bytes() == b"x\r\ny\r\nb\nx\ny x\ny"


async def test_an_empty_old_string_creates_a_file_or_fills_an_empty_one(
    harness: ToolHarness,
) -> None:
    await harness.write_and_view("empty", "")
    for name in ("empty", "d/new"):
        result = await harness.call("edit", file_path=name, old_string="", new_string="x\n")
        assert not result.is_error
        assert (harness.path / name).read_text() == "x\n"
    assert await harness.versions() == [
        ("empty", 0, ""), ("empty", 1, "x\n"), ("new", 0, ""), ("new", 1, "x\n"),
    ]  # fmt: skip


async def test_large_file_contents_are_shown_only_around_the_change(
    harness: ToolHarness,
) -> None:
    lines = [f"line {n}\n" for n in range(CONTENT_CHARS_MAX // 8)]
    await harness.write_and_view("file", "".join(lines))
    plan = await harness.plan("edit", file_path="file", old_string="line 700\n", new_string="x\n")
    shown = plan.action.params
    assert len(shown["old_content"]) < 2000
    assert shown["new_content"] == shown["old_content"].replace("line 700\n", "x\n")
    about = decode((await run(plan)).metadata, dict[str, object])
    assert (about["old_content"], about["new_content"], about["additions"]) == (
        shown["old_content"], shown["new_content"], 1,
    )  # fmt: skip
    assert [len(content) for _, _, content in await harness.versions()] == [
        len("".join(lines)), len("".join(lines)) - 7,
    ]  # fmt: skip


async def test_a_huge_file_is_edited_without_recording_versions(harness: ToolHarness) -> None:
    harness.write("file", "x" * HISTORY_CHARS_MAX + "\nend\n")
    await harness.call("view", file_path="file", limit=1)
    for old, new in (("end", "END"), ("END", "end")):
        result = await harness.call("edit", file_path="file", old_string=old, new_string=new)
        assert not result.is_error
    assert await harness.versions() == []
