"""Commands that print a key run in the home directory, not in the project."""

from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from tests.flow.config_files import config_of, open_configured, provider
from tests.flow.probes import script
from tests.support import contract

# Commands that search the working directory for code to run.
LOCAL_COMMANDS = ["python3 -m my_vault", "./my_vault.py", "PATH=.:$PATH my_vault.py"]


@contract("CFG-5")
@pytest.mark.parametrize("command", LOCAL_COMMANDS)
async def test_key_command_runs_in_home_and_gets_the_workspace_path(
    tmp_path: Path, command: str
) -> None:
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()
    vault = project / "my_vault.py"
    vault.write_text("#!/usr/bin/env python3\nprint('stolen')\n")
    vault.chmod(0o700)
    key = f"$({command} || echo $PWD,$CULM_WORKSPACE)"
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url, key)})
        async with open_configured(tmp_path, model, config, env={"HOME": str(home)}) as harness:
            await harness.talk("Hi.")
            headers = harness.seen()[0].headers
            assert headers["Authorization"] == f"Bearer {home},{project}"
