"""`glob` finds files by name, newest first, past what is ignored."""

import os
from pathlib import Path

import pytest

from culm.tools.base import CallResult
from culm.tools.glob import FILES_MAX
from tests.tools.conftest import Desk, run


async def find(desk: Desk, pattern: str, path: str = "") -> list[str]:
    return (await desk.call("glob", pattern=pattern, path=path)).content.split("\n")


async def test_the_newest_file_comes_first(desk: Desk) -> None:
    for age, name in enumerate(("b.py", "src/a.py", "src/deep/c.py", "c.txt")):
        os.utime(desk.write(name), ns=(0, 10**18 - age * 10**9))
    assert await desk.call("glob", pattern="**/*.py") == CallResult(
        "b.py\nsrc/a.py\nsrc/deep/c.py", metadata='{"number_of_files":3,"truncated":false}'
    )
    assert await find(desk, "src/*.py") == ["src/a.py"]
    assert await find(desk, "*.py", path="src") == ["src/a.py"]
    assert await find(desk, f"{desk.path}/src/**/*.py") == ["src/a.py", "src/deep/c.py"]


async def test_at_most_so_many_are_shown(desk: Desk) -> None:
    for number in range(FILES_MAX + 1):
        os.utime(desk.write(f"d/{number:03}"), ns=(0, number))
    result = await desk.call("glob", pattern="**")
    lines = result.content.split("\n")
    assert (lines[0], lines[-2]) == (f"d/{FILES_MAX:03}", "d/001")
    assert lines[-1] == "(only the newest 100 are shown; use a narrower pattern)"
    assert result.metadata == '{"number_of_files":100,"truncated":true}'


async def test_ignored_files_are_found_only_where_the_pattern_names_their_directory(
    desk: Desk,
) -> None:
    desk.write(".gitignore", "*.log\n!keep.log\n/out/\n")
    for name in ("a.log", "keep.log", "out/x.js", "dist/y.js", "node_modules/p/z.js", "s/out/w.js"):
        desk.write(name)
    assert sorted(await find(desk, "**/*.{js,log}")) == ["keep.log", "s/out/w.js"]
    assert await find(desk, "out/*.js") == ["out/x.js"]
    assert await find(desk, "node_modules/**/*.js") == ["node_modules/p/z.js"]
    assert await find(desk, "*", path="dist") == ["dist/y.js"]


async def test_hidden_files_are_found_only_if_the_pattern_names_a_dot(desk: Desk) -> None:
    for name in (".env", ".github/ci.yml", "a/.hidden/x.yml", "b.yml"):
        desk.write(name)
    assert await find(desk, "**/*.yml") == ["b.yml"]
    assert await find(desk, ".github/**/*.yml") == [".github/ci.yml"]
    assert await find(desk, "**/.hidden/*") == ["a/.hidden/x.yml"]
    assert await find(desk, "{.env,none}") == [".env"]


async def test_nothing_found_is_said(desk: Desk) -> None:
    assert await desk.call("glob", pattern="*.rs") == CallResult(
        "No file matches *.rs.", metadata='{"number_of_files":0,"truncated":false}'
    )


async def test_links_are_named_but_never_followed(desk: Desk, outside: Path) -> None:
    (desk.path / "out").symlink_to(outside)
    (desk.path / "round").symlink_to(".")
    assert sorted(await find(desk, "**")) == ["out", "round"]


async def test_a_gitignore_that_is_no_file_is_passed_over(desk: Desk, outside: Path) -> None:
    desk.write("a")
    os.mkfifo(desk.path / ".gitignore")
    assert await find(desk, "*") == ["a"]
    (desk.path / ".gitignore").unlink()
    (outside / "rules").write_text("*")
    (desk.path / ".gitignore").symlink_to(outside / "rules")
    assert await find(desk, "*") == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_a_directory_that_cannot_be_read_is_counted(desk: Desk) -> None:
    desk.write("locked/x")
    (desk.path / "locked").chmod(0)
    try:
        found = await find(desk, "**")
    finally:
        (desk.path / "locked").chmod(0o700)
    assert found == ["No file matches **.", "(directories that could not be read: 1)"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"pattern": ""},
            "glob: Expected `str` of length >= 1 - pattern: The pattern",
        ),
        ({"pattern": "{a,b}" * 9}, "This pattern cannot be used: its braces stand for more than"),
        ({"pattern": "*/../*"}, "A pattern goes down only; say with `path` where to look."),
        ({"pattern": "*", "path": "file"}, "file is a file; `path` is a directory."),
        ({"pattern": "nowhere/*"}, "There is no nowhere in the workspace."),
    ],
)
async def test_what_cannot_be_found_is_an_error_in_words(
    desk: Desk, arguments: dict[str, object], said: str
) -> None:
    desk.write("file")
    result = await desk.call("glob", **arguments)
    assert result.is_error
    assert result.content.startswith(said)


@pytest.mark.parametrize("pattern", ["../outside/*", "{outside}/**", "out/*.txt"])
async def test_a_pattern_that_leads_out_is_asked_about_and_then_finds_real_paths(
    desk: Desk, outside: Path, pattern: str
) -> None:
    (desk.path / "out").symlink_to(outside)
    plan = await desk.plan("glob", pattern=pattern.format(outside=outside))
    assert (plan.action.is_free, plan.action.name, plan.action.paths) == (
        False,
        "read",
        (str(outside),),
    )
    assert plan.action.description == f"Find files in {outside}"
    assert (await run(plan)).content == str(outside / "secret.txt")
