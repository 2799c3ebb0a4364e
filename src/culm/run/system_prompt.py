"""The system prompt: the agent's role, its working directory and its context files.

Pure; `project_context.py` reads the files. The prompt has the date but not the time, so that a
provider can cache it.
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
    """Facts about the project directory and the date."""

    path: str
    date: str = ""
    platform: str = ""
    git: str = ""  # The state of the repository; empty if there is none.
    files: tuple[ContextFile, ...] = ()


def system_prompt(context: ProjectContext, prefix: str = "") -> str:
    """Assemble the system prompt; `prefix` is required by some providers."""
    facts = [
        f"Date: {context.date}" if context.date else "",
        f"Platform: {context.platform}" if context.platform else "",
        f"Git: {context.git}" if context.git else "",
    ]
    parts = [
        prefix,
        SYSTEM.format(path=context.path),
        "\n".join(fact for fact in facts if fact),
        _files_text(context.files),
    ]
    return "\n\n".join(part for part in parts if part)


def _files_text(files: tuple[ContextFile, ...]) -> str:
    if not files:
        return ""
    return "\n\n".join([CONTEXT, *map(_file_text, files)])


def _file_text(file: ContextFile) -> str:
    end = "\n[The rest of this file was cut off.]" if file.is_cut else ""
    return f'<file path="{file.name}">\n{file.text}{end}\n</file>'
