"""The tools of a workspace."""

from culm.tools.base import Tool, ToolContext
from culm.tools.bash import make_bash
from culm.tools.download import make_download
from culm.tools.edit import make_edit
from culm.tools.entry_points import package_tools
from culm.tools.fetch import make_fetch
from culm.tools.glob import make_glob
from culm.tools.grep import make_grep
from culm.tools.job_kill import make_job_kill
from culm.tools.job_output import make_job_output
from culm.tools.ls import make_ls
from culm.tools.multiedit import make_multiedit
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.question import make_question
from culm.tools.todos import make_todos
from culm.tools.view import make_view
from culm.tools.write import make_write


def make_tools(context: ToolContext, jobs: BackgroundJobs) -> dict[str, Tool]:
    """Make culm's own tools, and those of other installed packages."""
    tools: tuple[Tool, ...] = (
        make_bash(context, jobs),
        make_download(context),
        make_edit(context),
        make_fetch(context),
        make_glob(context),
        make_grep(context),
        make_job_kill(jobs),
        make_job_output(jobs, context.clock),
        make_ls(context),
        make_multiedit(context),
        make_question(),
        make_todos(context),
        make_view(context),
        make_write(context),
    )
    known = {tool.spec.name: tool for tool in tools}
    return known | package_tools(context, known)
