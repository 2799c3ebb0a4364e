"""`write`: the whole contents of a file, new or replaced."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import FilePath, make_spec
from culm.tools.base import ToolContext
from culm.tools.files.change import ChangeTool, FileChange, FileToChange, Rewrite, check_encodable
from culm.tools.files.diffs import unified
from culm.tools.files.kinds import size_text
from culm.wire.codec import Json, clean
from culm.wire.tools import ToolFacts

DESCRIPTION = (
    "Write a whole file. Creates it, with its directories, if it does not exist; otherwise "
    "replaces its contents, for which it must have been viewed in this session. Mode, encoding and "
    "line ends are preserved. To change a part of a file use edit. A person may be asked first."
)


class WriteArguments(Struct, frozen=True):
    file_path: FilePath
    content: Annotated[str, Meta(description="The complete contents of the file.")]


SPEC = make_spec(
    "write", DESCRIPTION, WriteArguments, ToolFacts(kind="edit", path_arguments=("file_path",))
)


def make_write(context: ToolContext) -> ChangeTool[WriteArguments]:
    return ChangeTool(
        context,
        SPEC,
        WriteArguments,
        lambda arguments: arguments.file_path,
        _rewrite,
        _answer,
    )


def _rewrite(arguments: WriteArguments, found: FileToChange) -> Rewrite:
    check_encodable(arguments.content)
    content = arguments.content.removeprefix("\ufeff") if found.text.mark else arguments.content
    # Models write line feeds; a file with CRLF keeps CRLF.
    if found.text.line_end == "\r\n" and "\r\n" not in content:
        content = content.replace("\n", "\r\n")
    return Rewrite(content)


def _answer(change: FileChange) -> tuple[str, Mapping[str, Json]]:
    text = change.rewrite.text
    lines = text.count("\n") + (text != "" and not text.endswith("\n"))
    size = f"{lines} line{'' if lines == 1 else 's'}, {size_text(len(change.data))}"
    message = f"{'Wrote' if change.found.exists else 'Made'} {change.found.shown} ({size})."
    counts = {"additions": change.difference.additions, "removals": change.difference.removals}
    return message, {"diff": clean(unified(change.difference, change.found.shown)), **counts}
