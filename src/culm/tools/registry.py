"""The tools of a workspace: those of culm, and those of other packages.

Packages are found by the entry point group `culm.tools`. An entry point loads a callable that takes
the `ToolContext` of a workspace and returns one `Tool` or several (docs/configuration.md has an
example). A package that fails loses only its own tools; the log names it.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import cast

from culm.model.base import ToolSpec
from culm.model.catalog import entry_points_of
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
from culm.tools.process.jobs import BackgroundJobs
from culm.wire.tools import ToolFacts

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


# --- tools of other packages


log = logging.getLogger(__name__)

GROUP = "culm.tools"
TOOLS_MAX = 64  # For all packages; with more tools a model chooses worse.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # Accepted by every provider.

MakeTools = Callable[[ToolContext], Tool | Iterable[Tool]]


@cache
def load_makers() -> dict[str, MakeTools]:
    """Load the factory of each entry point. Imports their packages, which blocks."""
    makers: dict[str, MakeTools] = {}
    for name, point in sorted(entry_points_of(GROUP).items()):
        try:
            make = point.load()
            if not callable(make):
                raise TypeError(f"{point.value} cannot be called")
        except Exception:  # boundary: another package's code
            log.exception("the tools %s (%s) cannot be loaded", name, point.value)
        else:
            makers[name] = cast("MakeTools", make)  # Its return value is checked on each call.
    return makers


def package_tools(context: ToolContext, taken: Collection[str]) -> dict[str, Tool]:
    """Make the tools of other packages for a workspace; names in `taken` are refused."""
    tools: dict[str, Tool] = {}
    for name, make in load_makers().items():
        try:
            made = _listed(make(context))
        except Exception:  # boundary: another package's code
            log.exception("the tools %s cannot be made", name)
            continue
        for tool in made:
            if why := _why_not(tool, taken, tools):
                log.error("a tool of %s is not used: %s", name, why)
            else:
                tools[tool.spec.name] = tool
    return tools


def _listed(made: Tool | Iterable[Tool]) -> list[Tool]:
    """Return one tool or several as a list. The objects are not checked yet."""
    if hasattr(made, "spec"):
        return [cast("Tool", made)]
    return list(cast("Iterable[Tool]", made))


def _why_not(tool: Tool, taken: Collection[str], others: Collection[str]) -> str:
    """Return why a tool of another package cannot be used; empty if it can."""
    if not isinstance(getattr(tool, "spec", None), ToolSpec):
        return f"{tool!r:.200} has no spec"
    name = tool.spec.name
    if not isinstance(cast("object", name), str) or NAME.fullmatch(name) is None:
        return f"{name!r:.200} is not a valid tool name"
    if not isinstance(cast("object", tool.spec.facts), ToolFacts):
        return f"{name} has invalid facts"
    if not callable(getattr(tool, "prepare", None)):
        return f"{name} has no prepare"
    if not isinstance(getattr(tool, "parallel", None), bool):
        return f"{name} does not define parallel"
    if getattr(tool, "crash", None) not in ("again", "ask", "never"):
        return f"{name} does not define crash"
    if name in taken or name in others:
        return f"there is a tool {name} already"
    return f"there are {TOOLS_MAX} already" if len(others) >= TOOLS_MAX else ""
