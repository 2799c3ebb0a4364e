"""`multiedit`: several replacements in one file, one after the other, written at once."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from culm.tools.arguments import FilePath, make_spec
from culm.tools.base import ToolContext
from culm.tools.edit import change_fields, change_summary, check_exists, first_text
from culm.tools.files.change import ChangeTool, FileChange, FileToChange, Rewrite, check_encodable
from culm.tools.files.replace import ReplaceFailed, replaced
from culm.tools.files.safe_open import OpenRefused
from culm.wire.codec import Json, clean, encodable
from culm.wire.tools import ToolFacts

EDITS_MAX = 200
EXPLAINED_MAX = 5  # Explaining takes time; more misses usually have the same reason.
DESCRIPTION = (
    "Make several edits in one file, in order: each finds the text as the ones before left it, "
    "and each works as in edit. Edits that cannot be made are skipped and reported with the "
    "reason; if none can be made, nothing is written. With an empty old_string the first one "
    "creates a new file. A person may be asked first."
)


class OneEdit(Struct, frozen=True, omit_defaults=True):  # The fields of `edit`.
    old_string: str
    new_string: str
    replace_all: bool = False


class MultieditArguments(Struct, frozen=True):
    file_path: FilePath
    edits: Annotated[
        list[OneEdit],
        Meta(
            min_length=1,
            max_length=EDITS_MAX,
            description="A list of {old_string, new_string, replace_all?}.",
        ),
    ]


SPEC = make_spec(
    "multiedit",
    DESCRIPTION,
    MultieditArguments,
    ToolFacts(kind="edit", path_arguments=("file_path",)),
)


def make_multiedit(context: ToolContext) -> ChangeTool[MultieditArguments]:
    return ChangeTool(
        context,
        SPEC,
        MultieditArguments,
        lambda arguments: arguments.file_path,
        _rewrite,
        _answer,
    )


def _rewrite(arguments: MultieditArguments, found: FileToChange) -> Rewrite:
    if arguments.edits[0].old_string:
        check_exists(found)
    text = found.text.text
    failed: list[tuple[int, str]] = []
    for number, edit in enumerate(arguments.edits, 1):
        try:
            check_encodable(edit.new_string)
            if number == 1 and not edit.old_string:
                text = first_text(found, edit.new_string)
            else:
                text = replaced(
                    text,
                    edit.old_string,
                    edit.new_string,
                    everywhere=edit.replace_all,
                    explain=len(failed) < EXPLAINED_MAX,
                )
        except (ReplaceFailed, OpenRefused) as exc:
            failed.append((number, str(exc)))
    applied = len(arguments.edits) - len(failed)
    if not applied:
        raise OpenRefused(
            _result_text(f"None of {len(arguments.edits)} edits could be made.", failed)
        )
    fields: dict[str, Json] = {"edits_applied": applied}
    if failed:
        fields["edits_failed"] = [
            {"index": number, "error": error, "edit": to_builtins(arguments.edits[number - 1])}
            for number, error in failed
        ]
    if not failed:
        return Rewrite(text, fields, f"All {applied} edits were made.")
    note = _result_text(
        f"{applied} of {len(arguments.edits)} edits were made; these were not:", failed
    )
    return Rewrite(text, encodable(fields), note)


def _result_text(head: str, failed: list[tuple[int, str]]) -> str:
    return "\n".join([head, *(f"Edit {number}: {error}" for number, error in failed)])


def _answer(change: FileChange) -> tuple[str, Mapping[str, Json]]:
    text = f"{change_summary(change)}\n{change.rewrite.note}"
    return clean(text), {**change_fields(change), **change.rewrite.fields}
