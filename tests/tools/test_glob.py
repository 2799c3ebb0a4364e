"""`glob` finds files by name, newest first, without ignored files."""

import os
from pathlib import Path

import pytest

from culm.tools.base import CallResult
from culm.tools.glob import FILES_MAX
from tests.tools.conftest import ToolHarness, run


async def find(harness: ToolHarness, pattern: str, path: str = "") -> list[str]:
    return (await harness.call("glob", pattern=pattern, path=path)).content.split("\n")


async def test_files_are_listed_newest_first(harness: ToolHarness) -> None:
    for age, name in enumerate(("b.py", "src/a.py", "src/deep/c.py", "c.txt")):
        os.utime(harness.write(name), ns=(0, 10**18 - age * 10**9))
    assert await harness.call("glob", pattern="**/*.py") == CallResult(
        "b.py\nsrc/a.py\nsrc/deep/c.py", metadata='{"number_of_files":3,"truncated":false}'
    )
    assert await find(harness, "src/*.py") == ["src/a.py"]
    assert await find(harness, "*.py", path="src") == ["src/a.py"]
    assert await find(harness, f"{harness.path}/src/**/*.py") == ["src/a.py", "src/deep/c.py"]


async def test_the_number_of_files_is_limited(harness: ToolHarness) -> None:
    for number in range(FILES_MAX + 1):
        os.utime(harness.write(f"d/{number:03}"), ns=(0, number))
    result = await harness.call("glob", pattern="**")
    lines = result.content.split("\n")
    assert (lines[0], lines[-2]) == (f"d/{FILES_MAX:03}", "d/001")
    assert lines[-1] == "(only the newest 100 are shown; use a narrower pattern)"
    assert result.metadata == '{"number_of_files":100,"truncated":true}'


async def test_ignored_files_are_found_only_if_the_pattern_names_their_directory(
    harness: ToolHarness,
) -> None:
    harness.write(".gitignore", "*.log\n!keep.log\n/out/\n")
    for name in ("a.log", "keep.log", "out/x.js", "dist/y.js", "node_modules/p/z.js", "s/out/w.js"):
        harness.write(name)
    assert sorted(await find(harness, "**/*.{js,log}")) == ["keep.log", "s/out/w.js"]
    assert await find(harness, "out/*.js") == ["out/x.js"]
    assert await find(harness, "node_modules/**/*.js") == ["node_modules/p/z.js"]
    assert await find(harness, "*", path="dist") == ["dist/y.js"]


async def test_hidden_files_are_found_only_if_the_pattern_names_a_dot(harness: ToolHarness) -> None:
    for name in (".env", ".github/ci.yml", "a/.hidden/x.yml", "b.yml"):
        harness.write(name)
    assert await find(harness, "**/*.yml") == ["b.yml"]
    assert await find(harness, ".github/**/*.yml") == [".github/ci.yml"]
    assert await find(harness, "**/.hidden/*") == ["a/.hidden/x.yml"]
    assert await find(harness, "{.env,none}") == [".env"]


async def test_no_match_is_reported(harness: ToolHarness) -> None:
    assert await harness.call("glob", pattern="*.rs") == CallResult(
        "No file matches *.rs.", metadata='{"number_of_files":0,"truncated":false}'
    )


async def test_symlinks_are_listed_but_never_followed(harness: ToolHarness, outside: Path) -> None:
    (harness.path / "out").symlink_to(outside)
    (harness.path / "round").symlink_to(".")
    assert sorted(await find(harness, "**")) == ["out", "round"]


async def test_a_gitignore_that_is_not_a_regular_file_is_ignored(
    harness: ToolHarness, outside: Path
) -> None:
    harness.write("a")
    os.mkfifo(harness.path / ".gitignore")
    assert await find(harness, "*") == ["a"]
    (harness.path / ".gitignore").unlink()
    (outside / "rules").write_text("*")
    (harness.path / ".gitignore").symlink_to(outside / "rules")
    assert await find(harness, "*") == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_unreadable_directories_are_counted(harness: ToolHarness) -> None:
    harness.write("locked/x")
    (harness.path / "locked").chmod(0)
    try:
        found = await find(harness, "**")
    finally:
        (harness.path / "locked").chmod(0o700)
    assert found == ["No file matches **.", "(directories that could not be read: 1)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pattern": ""},
            "glob: Expected `str` of length >= 1 - pattern: The pattern",
        ),
        ({"pattern": "{a,b}" * 9}, "This pattern cannot be used: its braces expand to more than"),
        ({"pattern": "*/../*"}, "A pattern may not contain `..`; set `path` to search elsewhere."),
        ({"pattern": "*", "path": "file"}, "file is a file; `path` must be a directory."),
        ({"pattern": "nowhere/*"}, "There is no nowhere in the workspace."),
    ],
)
async def test_an_impossible_search_is_refused_with_the_reason(
    harness: ToolHarness, arguments: dict[str, object], message: str
) -> None:
    harness.write("file")
    result = await harness.call("glob", **arguments)
    assert result.is_error
    assert result.content.startswith(message)


@pytest.mark.parametrize("pattern", ["../outside/*", "{outside}/**", "out/*.txt"])
async def test_a_pattern_outside_the_workspace_needs_approval(
    harness: ToolHarness, outside: Path, pattern: str
) -> None:
    (harness.path / "out").symlink_to(outside)
    plan = await harness.plan("glob", pattern=pattern.format(outside=outside))
    assert (plan.action.is_free, plan.action.name, plan.action.paths) == (
        False,
        "read",
        (str(outside),),
    )
    assert plan.action.description == f"Find files in {outside}"
    assert (await run(plan)).content == str(outside / "secret.txt")
