"""The full text of the system prompt."""

from culm.run.project_context import ContextFile, ProjectContext, system_prompt


def test_prompt_contains_all_known_context() -> None:
    context = ProjectContext(
        path="/home/me/{project}",
        date="Friday, 15 January 2027",
        platform="Linux x86_64",
        git="branch main, a merge is under way",
        files=(
            ContextFile("AGENTS.md", "Use {braces}.\nTest it."),
            ContextFile("docs/rules.md", "Be kind", is_cut=True),
        ),
    )
    assert (
        system_prompt(context, "Speak as a provider likes it.")
        == """\
Speak as a provider likes it.

You are culm, an agent that works with a person in the directory /home/me/{project}.
Do what was asked, no more and no less. Use the tools you are given instead of guessing, look
before you change something, and say plainly what you did, what you found and what did not work.
Answer briefly, in the language of the person.

Date: Friday, 15 January 2027
Platform: Linux x86_64
Git: branch main, a merge is under way

These files were written for agents by whoever wrote the project or by the person you work with.
Follow them where they do not go against what the person asks.

<file path="AGENTS.md">
Use {braces}.
Test it.
</file>

<file path="docs/rules.md">
Be kind
[The rest of this file was cut off.]
</file>"""
    )


def test_prompt_omits_unknown_context_without_gaps() -> None:
    text = system_prompt(ProjectContext("/p"))
    assert text.startswith("You are culm, an agent that works with a person in the directory /p.\n")
    assert text.endswith("Answer briefly, in the language of the person.")
    assert "\n\n" not in text
    git = system_prompt(ProjectContext("/p", git="branch main"))
    assert git == f"{text}\n\nGit: branch main"
