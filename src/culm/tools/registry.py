"""The tools a workspace has."""

from pathlib import Path

from culm.tools.base import Tool
from culm.tools.glob import make_glob
from culm.tools.grep import make_grep
from culm.tools.inside import Inside
from culm.tools.ls import make_ls
from culm.tools.view import make_view
from culm.tools.work import FileWork


def read_only_tools(workspace: Path, work: FileWork) -> dict[str, Tool]:
    """What reads inside `workspace` and changes nothing; the same objects serve all its runs."""
    inside = Inside(workspace)
    tools: tuple[Tool, ...] = (
        make_glob(inside, work),
        make_grep(inside, work),
        make_ls(inside, work),
        make_view(inside, work),
    )
    return {tool.spec.name: tool for tool in tools}
