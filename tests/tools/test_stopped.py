"""A stopped tool returns its partial result and says that it is incomplete."""

from pathlib import Path

import pytest

from culm.tools.base import CallResult
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.paths import PathTarget, WorkspacePaths
from culm.tools.files.safe_open import (
    DEPTH_MAX,
    NAMES_MAX,
    OpenRefused,
    TreeWalk,
    list_directory,
)
from culm.tools.glob import GlobArguments, make_glob
from culm.tools.ls import LsArguments, make_ls
from culm.tools.search.patterns import IgnoreRules
from culm.tools.view import ViewArguments, make_view
from tests.tools.conftest import ToolHarness


async def test_a_stopped_tool_says_that_its_result_is_incomplete(harness: ToolHarness) -> None:
    harness.write("a", "one\n")
    stop = StopFlag()
    stop.set()
    here = PathTarget(str(harness.path), is_directory=True)
    listing = make_ls(harness.context).effect(LsArguments(), here, stop)
    files = make_glob(harness.context).effect(GlobArguments("*"), here, stop)
    file = PathTarget(str(harness.path / "a"), is_directory=False)
    with pytest.raises(OpenRefused, match=r"Line 1 of a was not reached in time\."):
        make_view(harness.context).effect(ViewArguments("a"), file, stop)
    for result in (listing, files):
        assert isinstance(result, CallResult)
        assert "out of time; the result is incomplete" in result.content
        assert result.metadata == '{"number_of_files":0,"truncated":true}'


def test_a_walk_stops_between_two_files(folder: Path) -> None:
    for name in "abc":
        (folder / name).touch()
    stop, seen = StopFlag(), list[str]()
    walked = TreeWalk(stop.is_set, hidden=True, nested_rules=True)
    with WorkspacePaths(folder).open(".") as place:
        for entry in walked.files(place.descriptor, (), IgnoreRules()):
            seen.append(entry.name)
            stop.set()
    assert (seen, walked.is_stopped) == (["a"], True)


def test_a_directory_with_too_many_names_is_cut(folder: Path) -> None:
    for number in range(NAMES_MAX + 1):
        (folder / str(number)).touch()
    with WorkspacePaths(folder).open(".") as place:
        entries, is_whole = list_directory(place.descriptor, (), StopFlag().is_set)
    assert (len(entries), is_whole) == (NAMES_MAX, False)


def test_directories_that_are_too_deep_are_counted(folder: Path) -> None:
    deep = folder
    for _ in range(DEPTH_MAX + 2):
        deep = deep / "d"
        deep.mkdir()
        (deep / "f").touch()
    walked = TreeWalk(StopFlag().is_set, hidden=True, nested_rules=True)
    with WorkspacePaths(folder).open(".") as place:
        entries = walked.files(place.descriptor, (), IgnoreRules())
        assert sum(1 for _ in entries) == DEPTH_MAX
    assert walked.unread == 1
