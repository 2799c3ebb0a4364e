"""The system prompt, assembled in one place: who the agent is, where it works, what it must know.

Pure. Looking around is `surroundings.py`. It says the day and not the hour, so that a provider
can keep it in its cache.
"""

from typing import NamedTuple

SYSTEM = """\
You are culm, an agent that works with a person in the directory {path}.
Do what was asked, no more and no less. Use the tools you are given instead of guessing, look
before you change something, and say plainly what you did, what you found and what did not work.
Answer briefly, in the language of the person."""

CONTEXT = """\
These files were written for agents by whoever wrote the project or by the person you work with.
Follow them where they do not go against what the person asks."""


class ContextFile(NamedTuple):
    """A file that agents should read first."""

    name: str
    text: str
    is_cut: bool = False


class ProjectContext(NamedTuple):
    """What is to be known of the place and the day."""

    path: str
    date: str = ""
    platform: str = ""
    git: str = ""  # How the repository stands; empty if it is none.
    files: tuple[ContextFile, ...] = ()


def system_prompt(around: ProjectContext, prefix: str = "") -> str:
    """What a model is told before anything else; `prefix` is its provider's own."""
    facts = [
        f"Date: {around.date}" if around.date else "",
        f"Platform: {around.platform}" if around.platform else "",
        f"Git: {around.git}" if around.git else "",
    ]
    parts = [
        prefix,
        SYSTEM.format(path=around.path),
        "\n".join(fact for fact in facts if fact),
        _context(around.files),
    ]
    return "\n\n".join(part for part in parts if part)


def _context(files: tuple[ContextFile, ...]) -> str:
    if not files:
        return ""
    return "\n\n".join([CONTEXT, *map(_shown, files)])


def _shown(file: ContextFile) -> str:
    end = "\n[The rest of this file was cut off.]" if file.is_cut else ""
    return f'<file path="{file.name}">\n{file.text}{end}\n</file>'
