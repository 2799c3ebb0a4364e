"""Nested .gitignore files: our walk, ripgrep with our rules, and git show the same files."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.tools.files.safe_open import TreeWalk, read_gitignore
from culm.tools.search.patterns import RULES_MAX, IgnoreRules
from culm.tools.search.ripgrep import ignore_file

RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
# Every directory has these names as files and directories: the patterns meet all of them.
DIRECTORIES = ["", "a", "a/a", "a/b", "a/b/a", "b", "b/a{b}", "b/a{b}/ [c"]
FILES = ["x", "ax", ".x", "a{b}x"]
COMPONENTS = st.sampled_from(["a", "b", "x", "*", "a*", "*x", "?", "[ab]", "**", ".x", "a{b}*"])


@st.composite
def lines(draw: st.DrawFn) -> str:
    bang, head = draw(st.sampled_from(["", "", "!"])), draw(st.sampled_from(["", "", "/"]))
    body = "/".join(draw(st.lists(COMPONENTS, min_size=1, max_size=3)))
    return bang + head + body + draw(st.sampled_from(["", "", "/"]))


GITIGNORES = st.dictionaries(
    st.sampled_from(DIRECTORIES), st.lists(lines(), min_size=1, max_size=4).map("\n".join)
)


def run(command: list[str], directory: Path) -> set[str]:
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": os.devnull}
    done = subprocess.run(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, timeout=30, check=False
    )
    return {os.fsdecode(name.removeprefix(b"./")) for name in done.stdout.split(b"\0") if name}


def seen_by_us(directory: Path) -> set[str]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        walk = TreeWalk(lambda: False, hidden=True, nested_rules=True)
        return {"/".join(e.parts) for e in walk.files(descriptor, (), IgnoreRules())}
    finally:
        os.close(descriptor)


def seen_by_ripgrep(directory: Path, gitignores: dict[str, str]) -> set[str]:
    assert RIPGREP is not None
    parts = {tuple(name.split("/")) if name else (): text for name, text in gitignores.items()}
    with tempfile.NamedTemporaryFile() as rules:
        rules.write(ignore_file([(one, parts[one]) for one in sorted(parts, key=len)]))
        rules.flush()
        options = ["--no-config", "--files", "--null", "--hidden", "--no-ignore"]
        return run([RIPGREP, *options, f"--ignore-file={rules.name}", "--", "./"], directory)


@given(GITIGNORES)
def test_nested_gitignores_mean_the_same_to_us_to_ripgrep_and_to_git(
    gitignores: dict[str, str],
) -> None:
    if RIPGREP is None:
        pytest.skip("ripgrep is not installed")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run(["git", "init", "--quiet"], directory)
        for folder in DIRECTORIES:
            (directory / folder).mkdir(exist_ok=True)
            for file in FILES:
                (directory / folder / file).touch()
        for folder, text in gitignores.items():
            (directory / folder / ".gitignore").write_text(text)
        shown = run(["git", "ls-files", "-z", "--others", "--exclude-standard"], directory)
        assert seen_by_us(directory) == shown
        assert seen_by_ripgrep(directory, gitignores) == shown


def test_rules_of_nested_directories_are_bounded() -> None:
    rules = IgnoreRules()
    for depth in range(10):
        rules = rules.below(depth, "a\n" * RULES_MAX)
    assert len(rules.rules) == RULES_MAX


def test_a_gitignore_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("*")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.gitignore").symlink_to("../rules")
    (tmp_path / "a/x").touch()
    assert seen_by_us(tmp_path) == {"rules", "a/.gitignore", "a/x"}
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    assert read_gitignore(descriptor) == ""
    os.close(descriptor)
