"""A workspace on disk that is only read, so that all tests here can share it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from culm.shell.judge import Judgement, judge

Judge = Callable[[str], Judgement]


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def judged(ground: Path) -> Judge:
    return lambda command: judge(command, ground, [ground])
