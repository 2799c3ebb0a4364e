"""The environment of a command; a repository cannot make an unasked `git` run a program."""

import subprocess
from pathlib import Path

import pytest

from culm.tools.base import CallPlan
from culm.tools.process.environment import command_env, unasked_env, user_command_env, why_git_asks
from tests.tools.command_harness import CommandHarness, open_command_harness

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run((*GIT, *arguments), cwd=folder, check=True, capture_output=True)


def make_repository(harness: CommandHarness) -> Path:
    """Make a repository with one change and a program in every hook; each leaves `ran-…`."""
    folder = harness.path
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
async def test_an_unasked_git_runs_no_program_named_by_the_repository(
    tmp_path: Path, key: str, attribute: str
) -> None:
    async with open_command_harness(tmp_path) as harness:
        program = make_repository(harness)
        for command in ("git status", "git diff", "git log -p"):
            plan = await harness.plan("bash", command=command)
            assert isinstance(plan, CallPlan)
            assert plan.action.is_free, plan.action.why
            result = await plan.run(harness.live_output.append)
            assert "a.txt" in result.content
            assert ran(harness.path) == []
        git(harness.path, "config", key, f"{program} {key}")
        if attribute:
            (harness.path / ".gitattributes").write_text(f"* {attribute}\n")
        plan = await harness.plan("bash", command="git diff")
        assert isinstance(plan, CallPlan)
        assert not plan.action.is_free
        assert plan.action.why == (
            f'{harness.path}/.git/config sets "{key.rpartition(".")[2]}", which can make git run a '
            "program or read elsewhere"
        )
        # After an approval, the repository's own settings apply.
        await plan.run(harness.live_output.append)
        assert ran(harness.path) == sorted((f"ran-{key}", "ran-fsmonitor"))


def test_git_settings_that_run_programs_are_found_in_every_config_file(tmp_path: Path) -> None:
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
    # The whole file is the name, including blanks and line endings.
    for name in (" x", "x\ny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config").write_text("[include]")
        (tmp_path / ".git").write_text(f"gitdir: {name}\r\n")
        assert "include" in why_git_asks([str(tmp_path)])


def test_a_command_gets_the_users_environment_without_our_variables(tmp_path: Path) -> None:
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


def test_an_unasked_command_gets_no_variable_that_changes_its_meaning(tmp_path: Path) -> None:
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
