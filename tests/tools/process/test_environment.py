"""What a command finds in its environment; and that a repository cannot make a free `git` run."""

import subprocess
from pathlib import Path

import pytest

from culm.tools.base import CallPlan
from culm.tools.process.environment import command_env, unasked_env, user_command_env, why_git_asks
from tests.tools.bench import Bench, open_bench

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> None:
    subprocess.run((*GIT, *words), cwd=folder, check=True, capture_output=True)


def make_repository(bench: Bench) -> Path:
    """With one change, and programs of its own at every corner; each leaves a file `ran-…`."""
    folder = bench.path
    git(folder, "init")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    (folder / "a.txt").write_text("two\n")
    program = folder / "evil"
    program.write_text(f"#!/bin/sh\ntouch {folder}/ran-$1\ncat /dev/null\n")
    program.chmod(0o755)
    for hook in ("post-index-change", "pre-commit", "post-checkout"):
        file = folder / ".git" / "hooks" / hook
        file.write_text(f"#!/bin/sh\ntouch {folder}/ran-{hook}\n")
        file.chmod(0o755)
    git(folder, "config", "core.fsmonitor", f"{program} fsmonitor")
    git(folder, "config", "core.pager", f"{program} pager")
    return program


def ran(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("ran-*"))


@pytest.mark.parametrize(
    ("key", "attribute"),
    [
        ("diff.external", ""),
        ("diff.evil.command", "diff=evil"),
        ("diff.evil.textconv", "diff=evil"),
        ("filter.evil.clean", "filter=evil"),
    ],
)
async def test_a_free_git_runs_nothing_that_a_repository_names(
    tmp_path: Path, key: str, attribute: str
) -> None:
    async with open_bench(tmp_path) as bench:
        program = make_repository(bench)
        for command in ("git status", "git diff", "git log -p"):
            plan = await bench.plan("bash", command=command)
            assert isinstance(plan, CallPlan)
            assert plan.action.is_free, plan.action.why
            result = await plan.run(bench.watched.append)
            assert "a.txt" in result.content
            assert ran(bench.path) == []
        git(bench.path, "config", key, f"{program} {key}")
        if attribute:
            (bench.path / ".gitattributes").write_text(f"* {attribute}\n")
        plan = await bench.plan("bash", command="git diff")
        assert isinstance(plan, CallPlan)
        assert not plan.action.is_free
        assert plan.action.why == (
            f'{bench.path}/.git/config sets "{key.rpartition(".")[2]}", which can make git run a '
            "program or read elsewhere"
        )
        # Whoever approves gets the repository as it is.
        await plan.run(bench.watched.append)
        assert ran(bench.path) == sorted((f"ran-{key}", "ran-fsmonitor"))


def test_what_can_make_git_run_something_is_found_wherever_git_would_look(tmp_path: Path) -> None:
    main = tmp_path / "main"
    (main / "deep").mkdir(parents=True)
    git(main, "init")
    git(main, "commit", "--allow-empty", "-m", "first")
    git(main, "worktree", "add", "../tree")
    places = [str(main / "deep"), str(tmp_path / "tree")]
    assert why_git_asks((*places, str(tmp_path))) == ""
    config = main / ".git" / "config"
    text = config.read_text()
    for more in ("[include]\n\tpath = x\n", '[includeIf "gitdir:x"] path=x', "[A]TextConv = y"):
        config.write_text(text + more)
        assert all(why_git_asks([place]) for place in places), more
    config.write_text(text)
    (main / ".gitmodules").write_text('[submodule "x"]\n\tignore = none\n')
    assert ".gitmodules" in why_git_asks([places[0]])
    # All of the file is the name, blanks and line ends in it included.
    for name in (" x", "x\ny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text("[include]")
        (tmp_path / ".git").write_text(f"gitdir: {name}\r\n")
        assert "include" in why_git_asks([str(tmp_path)])


def test_a_command_gets_the_environment_of_the_user_without_ours(tmp_path: Path) -> None:
    base = {"HOME": "/h", "PAGER": "less", "GIT_EDITOR": "vi", "CULM_TOKEN": "x", "OLDPWD": "/o"}
    quiet = {
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "MANPAGER": "cat",
        "SYSTEMD_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "DEBIAN_FRONTEND": "noninteractive",
        "PWD": "/w",
    }
    assert command_env(base, "/w") == {"HOME": "/h", "GIT_EDITOR": "vi", **quiet}
    typed = user_command_env(base, "/w", 80)
    colours = {"COLORTERM": "truecolor", "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1"}
    shown = {"TERM": "xterm-256color", "COLUMNS": "80"}
    assert typed == {"HOME": "/h", "GIT_EDITOR": "vi", **quiet, **colours, **shown}


def test_an_unasked_command_finds_nothing_that_changes_what_its_words_mean(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    twisted = dict.fromkeys(
        ("BASH_ENV", "CDPATH", "BASH_FUNC_ls%%", "SHELLOPTS", "GIT_DIR", "GIT_CONFIG_KEY_9"), "x"
    )
    kept = {"HOME": "/h", "GIT_CONFIG_GLOBAL": "/g", "ENVIRONMENT": "y"}
    path = f"/usr/bin:{tmp_path}/bin:.:relative/bin:/bin"
    env = unasked_env({**twisted, **kept, "PATH": path}, tmp_path.resolve())
    added = {name: value for name, value in env.items() if name.startswith("GIT_")}
    assert env == {**added, **kept, "PATH": "/usr/bin:/bin"}
    count = int(env["GIT_CONFIG_COUNT"])
    config = {env[f"GIT_CONFIG_KEY_{n}"]: env[f"GIT_CONFIG_VALUE_{n}"] for n in range(count)}
    assert config == {
        "core.hooksPath": "/dev/null",
        "core.fsmonitor": "false",
        "core.pager": "cat",
        "diff.ignoreSubmodules": "all",
        "log.showSignature": "false",
        "safe.bareRepository": "explicit",
    }
    assert "GIT_CONFIG_KEY_9" not in env
    assert env["GIT_CEILING_DIRECTORIES"] == str(tmp_path.resolve().parent)
