"""`edit`: one text in a file replaced by another."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import FilePath, make_spec
from culm.tools.base import ToolContext
from culm.tools.files.change import ChangeTool, FileChange, FileToChange, Rewrite, check_encodable
from culm.tools.files.diffs import TextDifference
from culm.tools.files.replace import replaced
from culm.tools.files.safe_open import OpenRefused
from culm.wire.codec import Json, clean
from culm.wire.tools import ToolFacts

SHOWN_LINES_MAX = 30
SHOWN_CONTEXT = 2
SHOWN_CHARS_MAX = 300  # Per line.
DESCRIPTION = (
    "Replace one text in a file by another. old_string must be in the file exactly once, blanks "
    "and indentation included, without the line numbers of view; give enough lines around it, or "
    "set replace_all. Pass an empty old_string to create a new file. The file must have been "
    "viewed in this session and not changed since, except by these tools. A person may be asked "
    "first."
)


class EditArguments(Struct, frozen=True):
    file_path: FilePath
    old_string: Annotated[str, Meta(description="The text to replace, exactly as in the file.")]
    new_string: Annotated[str, Meta(description="The text to insert instead.")]
    replace_all: Annotated[
        bool, Meta(description="Whether to replace all matches. Default: false.")
    ] = False


SPEC = make_spec(
    "edit", DESCRIPTION, EditArguments, ToolFacts(kind="edit", path_arguments=("file_path",))
)


def make_edit(context: ToolContext) -> ChangeTool[EditArguments]:
    return ChangeTool(
        context,
        SPEC,
        EditArguments,
        lambda arguments: arguments.file_path,
        _rewrite,
        lambda change: (change_summary(change), change_fields(change)),
    )


def _rewrite(arguments: EditArguments, found: FileToChange) -> Rewrite:
    check_encodable(arguments.new_string)
    if not arguments.old_string:
        return Rewrite(first_text(found, arguments.new_string))
    check_exists(found)
    every = arguments.replace_all
    text = replaced(found.text.text, arguments.old_string, arguments.new_string, everywhere=every)
    return Rewrite(text)


def first_text(found: FileToChange, text: str) -> str:
    """Return the text of a new or empty file; raises `OpenRefused` for another."""
    if found.text.text:
        raise OpenRefused(
            f"{found.shown} already exists. Set old_string to the text to replace, or use write."
        )
    return text


def check_exists(found: FileToChange) -> None:
    if not found.exists:
        raise OpenRefused(f"{found.shown} does not exist. Pass an empty old_string to create it.")


def change_summary(change: FileChange) -> str:
    """Describe the change, with the changed lines."""
    verb = "Changed" if change.found.exists else "Made"
    counts = f"+{change.difference.additions} -{change.difference.removals} lines"
    shown = _changed_lines(change.difference)
    return "\n".join([f"{verb} {change.found.shown} ({counts}).", *shown])


def _changed_lines(found: TextDifference) -> list[str]:
    lines: list[str] = []
    shown = 0  # The number of lines passed.
    for block in found.blocks:
        start = max(block.b0 - SHOWN_CONTEXT, shown)
        if start > shown and lines:
            lines.append("     …")
        shown = min(block.b1 + SHOWN_CONTEXT, len(found.after))
        for number in range(start, shown):
            if len(lines) >= SHOWN_LINES_MAX:
                return [*lines, "(more was changed)"]
            line = clean(found.after[number].rstrip("\r\n"))[:SHOWN_CHARS_MAX]
            lines.append(f"{found.skipped + number + 1:>6}|{line}")
    return lines


def change_fields(change: FileChange) -> Mapping[str, Json]:
    before, after = change.excerpts
    return {
        "additions": change.difference.additions,
        "removals": change.difference.removals,
        "old_content": before,
        "new_content": after,
    }
