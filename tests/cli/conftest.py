"""A harness for `culm`: a project, a user config file, a data directory, and the output.

The commands run in this process, through the entry point of the installed program.
"""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from culm.cli.main import main
from culm.model.catalog import known_providers
from culm.model.local_servers import LOCAL_SERVERS

CLOSED_URL = "http://127.0.0.1:1/v1"  # No server listens there.


class CommandResult(NamedTuple):
    status: int
    out: str
    err: str = ""


class CliHarness:
    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        self.project = folder / "project"
        self.user_file = folder / "config" / "culm" / "culm.json"
        self.data_dir = folder / "data" / "culm"
        self._patch = patch
        self._capture = capture
        self.project.mkdir()
        patch.chdir(self.project)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))

    def set_env(self, **variables: str) -> None:
        for name, value in variables.items():
            self._patch.setenv(name, value)

    def discover(self, **variables: str) -> None:
        """Turn discovery on, with only the keys and local servers given here."""
        self._patch.delenv("CULM_NO_DISCOVERY")
        for known in known_providers().values():
            self._patch.delenv(known.key_env, raising=False)
            self._patch.delenv(known.url_env, raising=False)
        self.set_env(**{server.url_env: CLOSED_URL for server in LOCAL_SERVERS} | variables)

    def write(self, name: str, content: str | Mapping[str, object]) -> Path:
        """Write a file of the project."""
        file = self.project / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    def write_user(self, content: str | Mapping[str, object]) -> Path:
        self.user_file.parent.mkdir(parents=True, exist_ok=True)
        self.user_file.write_text(content if isinstance(content, str) else json.dumps(content))
        return self.user_file

    def culm(self, *args: str) -> CommandResult:
        self._patch.setattr(sys, "argv", ["culm", *args])
        log = logging.getLogger()
        handlers, level = log.handlers[:], log.level
        with pytest.raises(SystemExit) as ended:
            main()
        # A command that logs to this test's stderr would write to a closed file in later tests.
        log.handlers[:] = handlers
        log.setLevel(level)
        out, err = self._capture.readouterr()
        code = ended.value.code
        return CommandResult(code if isinstance(code, int) else 0, out, err)


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CliHarness:
    return CliHarness(tmp_path.resolve(), monkeypatch, capsys)
