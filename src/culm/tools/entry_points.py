"""Tools that other packages bring, by an entry point of the group `culm.tools`.

What it loads is called with a workspace's `Kit` and returns one `Tool` or several
(docs/configuration.md has an example). One that fails costs its own tools and nothing else; the log
says which.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import cast

from culm.model.base import ToolSpec
from culm.model.dialects import entry_points_of
from culm.tools.base import Tool
from culm.tools.tool_context import ToolContext

log = logging.getLogger(__name__)

GROUP = "culm.tools"
TOOLS_MAX = 64  # Of all packages; a model that is offered more chooses worse.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")  # What every provider takes.

MakeTools = Callable[[ToolContext], Tool | Iterable[Tool]]


@cache
def load_makers() -> dict[str, MakeTools]:
    """What makes the tools of each entry point. Imports their packages: blocks as that does."""
    makers: dict[str, MakeTools] = {}
    for name, point in sorted(entry_points_of(GROUP).items()):
        try:
            make = point.load()
            if not callable(make):
                raise TypeError(f"{point.value} cannot be called")
        except Exception:  # boundary: another package's code
            log.exception("the tools %s (%s) cannot be loaded", name, point.value)
        else:
            makers[name] = cast("MakeTools", make)  # What it returns is looked at when it does.
    return makers


def package_tools(context: ToolContext, taken: Collection[str]) -> dict[str, Tool]:
    """The tools of other packages for a workspace; none of them has a name that is `taken`."""
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
    """One tool or several. Whether they are tools is not yet known."""
    if hasattr(made, "spec"):
        return [cast("Tool", made)]
    return list(cast("Iterable[Tool]", made))


def _why_not(tool: Tool, taken: Collection[str], others: Collection[str]) -> str:
    """Why it cannot be used; empty if it can. Somebody else wrote it, so nothing is sure."""
    if not isinstance(getattr(tool, "spec", None), ToolSpec):
        return f"{tool!r:.200} has no spec"
    name = tool.spec.name
    if not isinstance(cast("object", name), str) or NAME.fullmatch(name) is None:
        return f"{name!r:.200} is no name for a tool"
    if not callable(getattr(tool, "prepare", None)):
        return f"{name} has no prepare"
    if not isinstance(getattr(tool, "parallel", None), bool):
        return f"{name} does not say whether it is parallel"
    if getattr(tool, "crash", None) not in ("again", "ask", "never"):
        return f"{name} does not say what is to be done after a crash"
    if name in taken or name in others:
        return f"there is a tool {name} already"
    return f"there are {TOOLS_MAX} already" if len(others) >= TOOLS_MAX else ""
