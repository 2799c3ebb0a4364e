"""A read-only workspace on disk, shared by all tests in this folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from culm.shell.judge import Judgement, judge

Judge = Callable[[str], Judgement]


@pytest.fixture(scope="session")
def workspace_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ground").resolve()
    (root / "a.txt").write_text("x\n")
    (root / "sub" / "evil").mkdir(parents=True)
    (root / "sub" / "b.py").write_text("y\n")
    (root / "sub" / "evil" / "HEAD").write_text("ref: refs/heads/main\n")  # A bare repository.
    (root / "dash").mkdir()
    (root / "dash" / "-o").write_text("")
    (root / "out").symlink_to("/etc")
    (root / "é").symlink_to("/etc/hostname")
    (root / "linked").mkdir()
    (root / "linked" / "hostname").symlink_to("/etc/hostname")
    (root / ".git").mkdir()
    return root


@pytest.fixture(scope="session")
def judge_command(workspace_root: Path) -> Judge:
    return lambda command: judge(command, workspace_root, [workspace_root])
