"""Commands that print a key: they run for the user, and nothing that lies in a project runs too."""

from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from tests.flow.probes import script
from tests.flow.written import config_of, open_written, provider
from tests.support import contract

# Programs that look where they stand for something to run.
LOOKING = ["python3 -m my_vault", "./my_vault.py", "PATH=.:$PATH my_vault.py"]


@contract("CFG-5")
@pytest.mark.parametrize("command", LOOKING)
async def test_a_command_of_the_user_runs_nothing_of_the_workspace_and_knows_where_that_is(
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
        async with open_written(tmp_path, model, config, env={"HOME": str(home)}) as stage:
            await stage.talk("Hi.")
            headers = stage.seen()[0].headers
            assert headers["Authorization"] == f"Bearer {home},{project}"
