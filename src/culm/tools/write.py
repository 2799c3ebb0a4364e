"""`write`: all of a file, new or in place of what it holds."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import FilePath, make_spec
from culm.tools.files.change import ChangeTool, FileChange, FileToChange, Rewrite, check_sound
from culm.tools.files.diffs import unified
from culm.tools.files.kinds import size_text
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, clean

DESCRIPTION = (
    "Write a whole file. Makes it, with its directories, if it does not exist; else what it holds "
    "is replaced, for which it must have been viewed in this session. Mode, encoding and kind of "
    "line ends are kept. To change a part of a file use edit. A person may be asked first."
)


class WriteArguments(Struct, frozen=True):
    file_path: FilePath
    content: Annotated[str, Meta(description="All that the file shall hold.")]


SPEC = make_spec("write", DESCRIPTION, WriteArguments)


def make_write(context: ToolContext) -> ChangeTool[WriteArguments]:
    return ChangeTool(
        context,
        SPEC,
        WriteArguments,
        lambda given: given.file_path,
        _rewrite,
        _answer,
    )


def _rewrite(given: WriteArguments, found: FileToChange) -> Rewrite:
    check_sound(given.content)
    content = given.content.removeprefix("\ufeff") if found.text.mark else given.content
    # Models write line feeds; a file that has pairs keeps having them.
    if found.text.ends_lines_with == "\r\n" and "\r\n" not in content:
        content = content.replace("\n", "\r\n")
    return Rewrite(content)


def _answer(change: FileChange) -> tuple[str, Mapping[str, Json]]:
    text = change.rewrite.text
    lines = text.count("\n") + (text != "" and not text.endswith("\n"))
    size = f"{lines} line{'' if lines == 1 else 's'}, {size_text(len(change.data))}"
    said = f"{'Wrote' if change.found.exists else 'Made'} {change.found.shown} ({size})."
    counts = {"additions": change.difference.additions, "removals": change.difference.removals}
    return said, {"diff": clean(unified(change.difference, change.found.shown)), **counts}
