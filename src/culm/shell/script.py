"""What the walk over a command tells: simple commands, redirections, and where they happen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from culm.shell.words import Word

# The directories a command may find itself in; None if they cannot be told.
Directories = tuple[str, ...] | None
Outcome = tuple[Directories, Directories]  # After success, and after failure.

DIRECTORIES_MAX = 8  # A text with more turns than that is not judged for free.


@dataclass(frozen=True, slots=True)
class VariableAssignment:
    name: str
    value: Word
    raw: str  # All of it, as it is written.


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A simple command as it stands in the text, before wrappers are looked through."""

    words: tuple[Word, ...]  # Empty if it only assigns.
    assignments: tuple[VariableAssignment, ...]
    directories: Directories


class Redirection(Protocol):
    def unclear(self, why: str) -> None:
        """What would run cannot be told from the text."""
        ...

    def define(self, name: str) -> None:
        """A function of that name; its body is told of like everything else."""
        ...

    def simple(self, command: SimpleCommand) -> Outcome: ...

    def test(self, words: Sequence[Word], directories: Directories) -> None:
        """`[ … ]` or `[[ … ]]`, brackets included."""
        ...

    def redirect(self, operator: str, target: Word, directories: Directories) -> None:
        """To or from a file or a descriptor; `<<<` stands for text given on the input."""
        ...


def union(*several: Directories) -> Directories:
    found: dict[str, None] = {}
    for directories in several:
        if directories is None:
            return None
        found.update(dict.fromkeys(directories))
    return tuple(found) if len(found) <= DIRECTORIES_MAX else None
