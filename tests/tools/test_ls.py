"""`ls` draws a tree within bounds, and says what it left out."""

import os
from pathlib import Path

import pytest

from culm.tools.base import CallResult, ResolvedAction
from culm.tools.ls import ENTRIES_MAX
from tests.tools.conftest import Desk, run


def listed(count: int, *lines: str, is_cut: bool = False) -> CallResult:
    metadata = f'{{"number_of_files":{count},"truncated":{str(is_cut).lower()}}}'
    return CallResult("\n".join(lines), metadata=metadata)


async def test_a_tree_is_sorted_and_goes_two_levels_deep(desk: Desk) -> None:
    for name in ("b.txt", "a/c/deep.txt", "a/b", ".git/config", "node_modules/x/y"):
        desk.write(name)
    (desk.path / "link").symlink_to("a")
    assert await desk.call("ls") == listed(
        7,
        f"{desk.path}/",
        "  .git/",
        "  a/",
        "    b",
        "    c/",
        "  b.txt",
        "  link (link)",
        "  node_modules/",
    )


async def test_depth_path_and_ignore_choose_what_is_shown(desk: Desk) -> None:
    for name in ("a/b/c/d.txt", "a/b/c/e.log", "a/tmp/x"):
        desk.write(name)
    assert await desk.call("ls", path="a", depth="3", ignore=["*.log", "a/t*"]) == listed(
        3,
        f"{desk.path}/a/",
        "  b/",
        "    c/",
        "      d.txt",
        "(2 left out by `ignore`)",
    )


async def test_a_directory_that_is_skipped_is_listed_when_it_is_named(desk: Desk) -> None:
    desk.write("node_modules/x/index.js")
    assert await desk.call("ls", path="node_modules") == listed(
        2, f"{desk.path}/node_modules/", "  x/", "    index.js"
    )


async def test_an_empty_directory_says_so(desk: Desk) -> None:
    assert await desk.call("ls") == listed(0, f"{desk.path}/", "(empty)")


async def test_a_huge_directory_is_cut_and_says_how_much_is_missing(desk: Desk) -> None:
    for number in range(ENTRIES_MAX + 4):
        desk.write(f"{number:05}")
    desk.write("0/x")
    shown = [f"  {number:05}" for number in range(ENTRIES_MAX - 1)]
    assert await desk.call("ls") == listed(
        ENTRIES_MAX,
        f"{desk.path}/",
        "  0/",
        "    (not listed)",
        *shown,
        "  (5 more, not shown)",
        "(not everything is shown; list a directory of it, or use glob)",
        is_cut=True,
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_a_directory_that_cannot_be_read_is_marked(desk: Desk) -> None:
    desk.write("locked/x")
    (desk.path / "locked").chmod(0)
    try:
        result = await desk.call("ls")
    finally:
        (desk.path / "locked").chmod(0o700)
    assert result == listed(1, f"{desk.path}/", "  locked/", "    (cannot be read)")


async def test_links_are_not_entered(desk: Desk, outside: Path) -> None:
    (desk.path / "out").symlink_to(outside)
    (desk.path / "round").symlink_to(".")
    assert await desk.call("ls", depth=5) == listed(
        2, f"{desk.path}/", "  out (link)", "  round (link)"
    )


async def test_a_directory_outside_is_asked_about_by_its_real_path_and_then_listed(
    desk: Desk, outside: Path
) -> None:
    (desk.path / "out").symlink_to(outside)
    (outside / "deep").mkdir()
    (outside / "deep" / "file").touch()
    plan = await desk.plan("ls", path="out/.", ignore=["*.log"])
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


async def test_names_stay_on_their_lines(desk: Desk) -> None:
    for name in ("new\nline", os.fsdecode(b"caf\xe9"), "👩‍💻"):
        desk.write(name)
    assert await desk.call("ls") == listed(
        3, f"{desk.path}/", "  caf\ufffd", r"  new\nline", "  👩‍💻"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"path": "file"}, "file is a file; use view to read it."),
        ({"path": "nowhere"}, "There is no nowhere in the workspace."),
        ({"depth": 0}, "ls: Expected `int` >= 1 - depth: How many levels, 1 to 20. Default: 2."),
        ({"ignore": "*.log"}, "ls: Expected `array`, got `str` - ignore: A list of glob patterns"),
        ({"ignore": ["{a,b}" * 9]}, "This pattern cannot be used: its braces stand for more than"),
    ],
)
async def test_what_cannot_be_listed_is_an_error_in_words(
    desk: Desk, arguments: dict[str, object], said: str
) -> None:
    desk.write("file")
    result = await desk.call("ls", **arguments)
    assert result.is_error
    assert result.content.startswith(said)
