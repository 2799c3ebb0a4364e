"""`edit`: what stands there once is replaced, everything else stays, byte for byte."""

import pytest

from culm.tools.base import CallRequest, CallResult
from culm.tools.files.change import HISTORY_CHARS_MAX
from culm.tools.files.diffs import CONTENT_CHARS_MAX
from culm.wire.codec import Json, decode, encode
from tests.tools.conftest import Desk, refused, run


async def test_an_edit_shows_what_it_made_and_carries_both_contents(desk: Desk) -> None:
    before = "one\ntwo\nthree\nfour\nfive\n"
    file = await desk.seen("file", before)
    result = await desk.call("edit", file_path="file", old_string="three", new_string="3\n3.5")
    after = before.replace("three", "3\n3.5")
    about = {"additions": 2, "removals": 1, "old_content": before, "new_content": after}
    assert result == CallResult(
        "Changed file (+2 -1 lines).\n"
        "     1|one\n     2|two\n     3|3\n     4|3.5\n     5|four\n     6|five",
        metadata=encode(about).decode(),
    )
    assert file.read_text() == after
    assert await desk.versions() == [("file", 0, before), ("file", 1, after)]


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
async def test_what_is_not_replaced_stays_byte_for_byte(
    desk: Desk, before: bytes, old: str, new: str, after: bytes
) -> None:
    file = await desk.seen("file", before)
    result = await desk.call("edit", file_path="file", old_string=old, new_string=new)
    assert (result.is_error, file.read_bytes()) == (False, after), result.content


async def test_fifty_edits_in_a_row_need_no_second_look(desk: Desk) -> None:
    file = await desk.seen("file", "".join(f"line {n:02}\n" for n in range(50)))
    for n in range(50):
        tool = ("edit", "multiedit")[n % 2]
        one = {"old_string": f"line {n:02}\n", "new_string": f"row {n:02}\n"}
        given = one if tool == "edit" else {"edits": [one]}
        assert not (await desk.call(tool, file_path="file", **given)).is_error
    assert file.read_text() == "".join(f"row {n:02}\n" for n in range(50))
    assert len(await desk.versions()) == 51


async def test_a_file_that_a_command_changed_is_looked_at_again_first(desk: Desk) -> None:
    file = await desk.seen("file", "a b")
    await desk.call("edit", file_path="file", old_string="a", new_string="x")
    file.write_text("x b c")
    given = {"file_path": "file", "old_string": "b", "new_string": "y"}
    assert await desk.call("edit", **given) == refused(
        "file has changed since it was last read; view it again first. Nothing was written."
    )
    await desk.call("view", file_path="file")
    assert not (await desk.call("edit", **given)).is_error
    assert [version for _, _, version in await desk.versions()] == ["a b", "x b", "x b c", "x y c"]


async def test_what_another_session_read_does_not_count(desk: Desk) -> None:
    await desk.seen("file", "a")
    given: dict[str, Json] = {"file_path": "file", "old_string": "a", "new_string": "b"}
    call = CallRequest("call-1", "edit", "", given, "session-2")
    assert await desk.tools["edit"].prepare(call) == refused(
        "file was not read in this session yet; view it first. Nothing was written."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"old_string": "zzz", "new_string": ""}, "old_string was not found, nor anything like"),
        ({"old_string": "a", "new_string": "b"}, "old_string was found 2 times, at lines 1, 2."),
        ({"old_string": "a", "new_string": "a"}, "old_string and new_string are the same"),
        ({"old_string": "", "new_string": "x"}, "file exists already. Say with old_string what"),
        ({"old_string": "a"}, "edit: Object missing required field `new_string`"),
        (
            {"file_path": "new", "old_string": "a", "new_string": "b"},
            "There is no new. With an empty old_string it would be made.",
        ),
    ],
)
async def test_what_cannot_be_replaced_is_said_and_nothing_is_written(
    desk: Desk, arguments: dict[str, str], said: str
) -> None:
    file = await desk.seen("file", "a\n a")
    result = await desk.call("edit", **{"file_path": "file", **arguments})
    assert (result.is_error, result.content[: len(said)]) == (True, said)
    assert (file.read_text(), await desk.versions()) == ("a\n a", [])


async def test_replace_all_replaces_every_one(desk: Desk) -> None:
    file = await desk.seen("file", "a\r\nb\na a")
    given = {"file_path": "file", "old_string": "a", "new_string": "x\ny", "replace_all": "true"}
    assert not (await desk.call("edit", **given)).is_error
    assert file.read_bytes() == b"x\r\ny\r\nb\nx\ny x\ny"


async def test_an_empty_old_string_makes_a_file_or_fills_an_empty_one(desk: Desk) -> None:
    await desk.seen("empty", "")
    for name in ("empty", "d/new"):
        result = await desk.call("edit", file_path=name, old_string="", new_string="x\n")
        assert not result.is_error
        assert (desk.path / name).read_text() == "x\n"
    assert await desk.versions() == [
        ("empty", 0, ""), ("empty", 1, "x\n"), ("new", 0, ""), ("new", 1, "x\n"),
    ]  # fmt: skip


async def test_what_people_and_clients_are_shown_of_a_large_file_is_what_changes(
    desk: Desk,
) -> None:
    lines = [f"line {n}\n" for n in range(CONTENT_CHARS_MAX // 8)]
    await desk.seen("file", "".join(lines))
    plan = await desk.plan("edit", file_path="file", old_string="line 700\n", new_string="x\n")
    shown = plan.action.params
    assert len(shown["old_content"]) < 2000
    assert shown["new_content"] == shown["old_content"].replace("line 700\n", "x\n")
    about = decode((await run(plan)).metadata, dict[str, object])
    assert (about["old_content"], about["new_content"], about["additions"]) == (
        shown["old_content"], shown["new_content"], 1,
    )  # fmt: skip
    assert [len(content) for _, _, content in await desk.versions()] == [
        len("".join(lines)), len("".join(lines)) - 7,
    ]  # fmt: skip


async def test_of_a_very_large_file_no_versions_are_kept_but_it_is_known(desk: Desk) -> None:
    desk.write("file", "x" * HISTORY_CHARS_MAX + "\nend\n")
    await desk.call("view", file_path="file", limit=1)
    for old, new in (("end", "END"), ("END", "end")):
        result = await desk.call("edit", file_path="file", old_string=old, new_string=new)
        assert not result.is_error
    assert await desk.versions() == []
