"""`multiedit` applies edits in order; failed edits are reported, the others are made."""

from culm.tools.base import CallResult
from culm.tools.multiedit import EXPLAINED_MAX
from culm.wire.codec import Json, encode
from tests.tools.conftest import ToolHarness, refused


def edit(old: str, new: str, **more: Json) -> dict[str, Json]:
    return {"old_string": old, "new_string": new, **more}


async def test_edits_apply_in_order_and_make_one_version(
    harness: ToolHarness,
) -> None:
    file = await harness.write_and_view("file", "a\r\nb\r\n")
    edits = [edit("a", "c\nc"), edit("c", "d", replace_all=True), edit("d\nd", "e")]
    result = await harness.call("multiedit", file_path="file", edits=edits)
    about = {
        "additions": 1,
        "removals": 1,
        "old_content": "a\r\nb\r\n",
        "new_content": "e\r\nb\r\n",
        "edits_applied": 3,
    }
    assert result == CallResult(
        "Changed file (+1 -1 lines).\n     1|e\n     2|b\nAll 3 edits were made.",
        metadata=encode(about).decode(),
    )
    assert file.read_bytes() == b"e\r\nb\r\n"
    assert await harness.versions() == [("file", 0, "a\r\nb\r\n"), ("file", 1, "e\r\nb\r\n")]


async def test_failed_edits_are_skipped_and_reported_with_their_reason(
    harness: ToolHarness,
) -> None:
    file = await harness.write_and_view("file", "a\nb\nb\n")
    edits = [edit("zzz", "y"), edit("a", "x"), edit("b", "y"), edit("x", "x")]
    result = await harness.call("multiedit", file_path="file", edits=edits)
    missed = "old_string was not found, nor anything like it. View the file again."
    twice = (
        "old_string was found 2 times, at lines 2, 3. Add lines around it until it is unique, or "
        "set replace_all to replace every one."
    )
    same = "old_string and new_string are the same, so nothing would change."
    about = {
        "additions": 1,
        "removals": 1,
        "old_content": "a\nb\nb\n",
        "new_content": "x\nb\nb\n",
        "edits_applied": 1,
        "edits_failed": [
            {"index": 1, "error": missed, "edit": edits[0]},
            {"index": 3, "error": twice, "edit": edits[2]},
            {"index": 4, "error": same, "edit": edits[3]},
        ],
    }
    assert result == CallResult(
        "Changed file (+1 -1 lines).\n     1|x\n     2|b\n     3|b\n"
        "1 of 4 edits were made; these were not:\n"
        f"Edit 1: {missed}\nEdit 3: {twice}\nEdit 4: {same}",
        metadata=encode(about).decode(),
    )
    assert file.read_text() == "x\nb\nb\n"


async def test_if_every_edit_fails_nothing_is_written(harness: ToolHarness) -> None:
    file = await harness.write_and_view("file", "a\n")
    edits = [edit(f"z{n}", "y") for n in range(EXPLAINED_MAX + 1)]
    result = await harness.call("multiedit", file_path="file", edits=edits)
    assert result.is_error
    assert result.content.startswith(
        f"None of {len(edits)} edits could be made.\nEdit 1: old_string was not found, nor anything"
    )
    assert result.content.endswith(f"Edit {len(edits)}: old_string was not found.")
    assert (file.read_text(), await harness.versions()) == ("a\n", [])


async def test_the_first_edit_can_create_the_file(harness: ToolHarness) -> None:
    edits = [edit("", "a\nb\n"), edit("b", "c")]
    assert not (await harness.call("multiedit", file_path="new", edits=edits)).is_error
    assert (harness.path / "new").read_text() == "a\nc\n"
    assert await harness.call("multiedit", file_path="none", edits=edits[1:]) == refused(
        "none does not exist. Pass an empty old_string to create it."
    )
    bad = await harness.call("multiedit", file_path="new", edits=[])
    assert bad.content.startswith("multiedit: Expected `array` of length >= 1 - edits: A list of")


async def test_the_schema_has_no_references(harness: ToolHarness) -> None:
    assert harness.tools["multiedit"].spec.parameters["properties"]["edits"]["items"] == {
        "type": "object",
        "properties": {
            "old_string": {"type": "string"},
            "new_string": {"type": "string"},
            "replace_all": {"type": "boolean", "default": False},
        },
        "required": ["old_string", "new_string"],
    }
