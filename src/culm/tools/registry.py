"""The tools of a workspace."""

from culm.model.base import ToolSpec
from culm.tools import (
    agent_tools,
    bash,
    download,
    edit,
    fetch,
    glob,
    grep,
    job_kill,
    job_output,
    ls,
    multiedit,
    question,
    todos,
    view,
    write,
)
from culm.tools.base import Tool, ToolContext
from culm.tools.entry_points import package_tools
from culm.tools.process.jobs import BackgroundJobs

# The tools of culm itself, for a client that has no server to list them.
SPECS: tuple[ToolSpec, ...] = (
    bash.SPEC,
    download.SPEC,
    edit.SPEC,
    fetch.SPEC,
    glob.SPEC,
    grep.SPEC,
    job_kill.SPEC,
    job_output.SPEC,
    ls.SPEC,
    multiedit.SPEC,
    question.SPEC,
    todos.SPEC,
    view.SPEC,
    write.SPEC,
    *agent_tools.SPECS,
)


def make_tools(context: ToolContext, jobs: BackgroundJobs) -> dict[str, Tool]:
    """Make culm's own tools, and those of other installed packages."""
    tools: tuple[Tool, ...] = (
        bash.make_bash(context, jobs),
        download.make_download(context),
        edit.make_edit(context),
        fetch.make_fetch(context),
        glob.make_glob(context),
        grep.make_grep(context),
        job_kill.make_job_kill(jobs),
        job_output.make_job_output(jobs, context.clock),
        ls.make_ls(context),
        multiedit.make_multiedit(context),
        question.make_question(),
        todos.make_todos(context),
        view.make_view(context),
        write.make_write(context),
    )
    known = {tool.spec.name: tool for tool in tools}
    return known | package_tools(context, known)
