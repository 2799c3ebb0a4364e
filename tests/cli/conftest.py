"""A desk of one's own: a project, the user's file and a data directory; and what `culm` says there.

The commands run in this process, by the door that the installed program has.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from culm.cli.main import main
from culm.model.catalog import known_providers
from culm.model.local_servers import LOCAL_SERVERS

NOBODY = "http://127.0.0.1:1/v1"  # Where nobody listens.


class Said(NamedTuple):
    status: int
    out: str
    err: str = ""


class Desk:
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
        """Let keys and local servers count, but only those given here."""
        self._patch.delenv("CULM_NO_DISCOVERY")
        for known in known_providers().values():
            self._patch.delenv(known.key_env, raising=False)
            self._patch.delenv(known.url_env, raising=False)
        self.set_env(**{server.url_env: NOBODY for server in LOCAL_SERVERS} | variables)

    def write(self, name: str, content: str | Mapping[str, object]) -> Path:
        """A file of the project."""
        file = self.project / name
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    def write_user(self, content: str | Mapping[str, object]) -> Path:
        self.user_file.parent.mkdir(parents=True, exist_ok=True)
        self.user_file.write_text(content if isinstance(content, str) else json.dumps(content))
        return self.user_file

    def culm(self, *args: str) -> Said:
        self._patch.setattr(sys, "argv", ["culm", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capture.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, out, err)


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Desk:
    return Desk(tmp_path.resolve(), monkeypatch, capsys)
