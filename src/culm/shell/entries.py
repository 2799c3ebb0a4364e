"""One line of the read-only table: a command and the options with which it only reads."""

from dataclasses import dataclass
from typing import Literal

from culm.shell.words import names

# What the words that are no options are: paths to read; a pattern, then paths; text that is only
# printed; nothing at all; or something a check of its own looks at (`checks.py`).
Operands = Literal["paths", "pattern", "text", "none", "names", "check"]


@dataclass(frozen=True, slots=True)
class ReadOnlyEntry:
    name: str  # The program, with its subcommand if it has them.
    operands: Operands
    flags: frozenset[str]  # Take no value.
    values: frozenset[str]  # Take a value that is not a path.
    paths: frozenset[str]  # Take a path that is read.
    optional: frozenset[str]  # Long ones that stand alone or as `--name=value`.
    patterns: frozenset[str]  # Options in place of the pattern operand.
    numbers: bool  # `-5` is an option, too.
    operands_max: int
    note: str


def entry(
    name: str,
    operands: Operands,
    flags: str = "",
    values: str = "",
    *,
    paths: str = "",
    optional: str = "",
    patterns: str = "",
    numbers: bool = False,
    operands_max: int = 1_000,
    note: str = "",
) -> tuple[str, ReadOnlyEntry]:
    return name, ReadOnlyEntry(
        name,
        operands,
        names(flags),
        names(values) | names(patterns),
        names(paths),
        names(optional),
        names(patterns),
        numbers,
        operands_max,
        note,
    )
