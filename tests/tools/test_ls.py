"""`ls` draws a bounded tree and says what it left out."""

import os
from pathlib import Path

import pytest

from culm.tools.base import CallResult, ResolvedAction
from culm.tools.ls import ENTRIES_MAX
from tests.tools.conftest import ToolHarness, run


def listed(count: int, *lines: str, is_cut: bool = False) -> CallResult:
    metadata = f'{{"number_of_files":{count},"truncated":{str(is_cut).lower()}}}'
    return CallResult("\n".join(lines), metadata=metadata)


async def test_a_tree_is_sorted_and_two_levels_deep(harness: ToolHarness) -> None:
    for name in ("b.txt", "a/c/deep.txt", "a/b", ".git/config", "node_modules/x/y"):
        harness.write(name)
    (harness.path / "link").symlink_to("a")
    assert await harness.call("ls") == listed(
        7,
        f"{harness.path}/",
        "  .git/",
        "  a/",
        "    b",
        "    c/",
        "  b.txt",
        "  link (link)",
        "  node_modules/",
    )


async def test_depth_path_and_ignore_select_the_entries(harness: ToolHarness) -> None:
    for name in ("a/b/c/d.txt", "a/b/c/e.log", "a/tmp/x"):
        harness.write(name)
    assert await harness.call("ls", path="a", depth="3", ignore=["*.log", "a/t*"]) == listed(
        3,
        f"{harness.path}/a/",
        "  b/",
        "    c/",
        "      d.txt",
        "(2 left out by `ignore`)",
    )


async def test_a_skipped_directory_is_listed_if_it_is_named(harness: ToolHarness) -> None:
    harness.write("node_modules/x/index.js")
    assert await harness.call("ls", path="node_modules") == listed(
        2, f"{harness.path}/node_modules/", "  x/", "    index.js"
    )


async def test_an_empty_directory_is_reported(harness: ToolHarness) -> None:
    assert await harness.call("ls") == listed(0, f"{harness.path}/", "(empty)")


async def test_a_huge_directory_is_cut_with_the_number_of_hidden_entries(
    harness: ToolHarness,
) -> None:
    for number in range(ENTRIES_MAX + 4):
        harness.write(f"{number:05}")
    harness.write("0/x")
    shown = [f"  {number:05}" for number in range(ENTRIES_MAX - 1)]
    assert await harness.call("ls") == listed(
        ENTRIES_MAX,
        f"{harness.path}/",
        "  0/",
        "    (not listed)",
        *shown,
        "  (5 more, not shown)",
        "(not everything is shown; list one of its directories, or use glob)",
        is_cut=True,
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_an_unreadable_directory_is_marked(harness: ToolHarness) -> None:
    harness.write("locked/x")
    (harness.path / "locked").chmod(0)
    try:
        result = await harness.call("ls")
    finally:
        (harness.path / "locked").chmod(0o700)
    assert result == listed(1, f"{harness.path}/", "  locked/", "    (cannot be read)")


async def test_symlinks_are_not_entered(harness: ToolHarness, outside: Path) -> None:
    (harness.path / "out").symlink_to(outside)
    (harness.path / "round").symlink_to(".")
    assert await harness.call("ls", depth=5) == listed(
        2, f"{harness.path}/", "  out (link)", "  round (link)"
    )


async def test_a_directory_outside_the_workspace_needs_approval(
    harness: ToolHarness, outside: Path
) -> None:
    (harness.path / "out").symlink_to(outside)
    (outside / "deep").mkdir()
    (outside / "deep" / "file").touch()
    plan = await harness.plan("ls", path="out/.", ignore=["*.log"])
    assert plan.action == ResolvedAction(
        tool="ls",
        name="list",
        description=f"List {outside}",
        path=str(outside),
        params={"path": str(outside), "ignore": ["*.log"], "depth": 2},
        resolved={
            "path": str(outside),
            "arguments": {"path": "out/.", "ignore": ["*.log"], "depth": 2},
        },
        paths=(str(outside),),
        coverage=(f"list:{outside}",),
        why=f"{outside} is outside the workspace",
    )
    assert await run(plan) == listed(3, f"{outside}/", "  deep/", "    file", "  secret.txt")


async def test_unusual_names_stay_on_one_line(harness: ToolHarness) -> None:
    for name in ("new\nline", os.fsdecode(b"caf\xe9"), "👩‍💻"):
        harness.write(name)
    assert await harness.call("ls") == listed(
        3, f"{harness.path}/", "  caf\ufffd", r"  new\nline", "  👩‍💻"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "file"}, "file is a file; use view to read it."),
        ({"path": "nowhere"}, "There is no nowhere in the workspace."),
        ({"depth": 0}, "ls: Expected `int` >= 1 - depth: How many levels, 1 to 20. Default: 2."),
        ({"ignore": "*.log"}, "ls: Expected `array`, got `str` - ignore: A list of glob patterns"),
        ({"ignore": ["{a,b}" * 9]}, "This pattern cannot be used: its braces expand to more than"),
    ],
)
async def test_an_impossible_listing_is_refused_with_the_reason(
    harness: ToolHarness, arguments: dict[str, object], message: str
) -> None:
    harness.write("file")
    result = await harness.call("ls", **arguments)
    assert result.is_error
    assert result.content.startswith(message)
