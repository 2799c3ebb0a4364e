"""Shell completion: scripts, and ids of the running server."""

import socket
from pathlib import Path

import pytest

from culm.cli.commands.completion import ids_for
from tests.cli.commands.test_asks import run_culm
from tests.cli.conftest import CliHarness
from tests.flow.runs import open_runs


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o"), ("zsh", "#compdef culm"), ("fish", "--command")]
)
def test_each_shell_gets_its_completion_script(cli: CliHarness, shell: str, word: str) -> None:
    result = cli.culm("completion", shell)
    assert (result.status, result.err) == (0, "")
    assert word in result.out
    assert f"_CULM_COMPLETE={shell}_complete" in result.out


def test_unsupported_shell_is_a_usage_error(cli: CliHarness) -> None:
    assert cli.culm("completion", "tcsh").status == 2


async def test_completion_offers_session_ids_of_a_running_server(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with open_runs(tmp_path) as harness:
        short = harness.session_id[:8]
        cli.set_env(
            _CULM_COMPLETE="bash_complete",
            COMP_WORDS=f"culm sessions show --host {harness.flow.url} {short[:3]}",
            COMP_CWORD="5",
        )
        result = await run_culm(cli)
        assert (result.status, result.out, result.err) == (0, f"plain,{short}\n", "")
        cli.set_env(COMP_WORDS="culm sessions show x", CULM_HOST=harness.flow.url)
        cli.set_env(COMP_CWORD="3")
        assert (await run_culm(cli)).out == "\n"


def test_completion_offers_nothing_if_no_server_answers(tmp_path: Path) -> None:
    assert ids_for(tmp_path, f"unix://{tmp_path}/none", None, "") == []
    assert ids_for(tmp_path, "no address", None, "") == []
    with socket.socket() as silent:  # It accepts connections and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert ids_for(tmp_path, url, tmp_path / "no-token", "") == []
        assert ids_for(tmp_path, url, None, "") == []
