"""What a shell is told, and the ids that it offers."""

import socket
from pathlib import Path

import pytest

from culm.cli.completion import ids_for
from tests.cli.conftest import Desk
from tests.cli.test_asks import say
from tests.flow.runs import open_runs


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -o"), ("zsh", "#compdef culm"), ("fish", "--command")]
)
def test_each_shell_gets_its_script(desk: Desk, shell: str, word: str) -> None:
    said = desk.culm("completion", shell)
    assert (said.status, said.err) == (0, "")
    assert word in said.out
    assert f"_CULM_COMPLETE={shell}_complete" in said.out


def test_another_shell_is_wrong_usage(desk: Desk) -> None:
    assert desk.culm("completion", "tcsh").status == 2


async def test_ids_of_sessions_are_offered_by_a_running_server(tmp_path: Path, desk: Desk) -> None:
    async with open_runs(tmp_path) as stage:
        short = stage.session_id[:8]
        desk.set_env(
            _CULM_COMPLETE="bash_complete",
            COMP_WORDS=f"culm sessions show --host {stage.flow.url} {short[:3]}",
            COMP_CWORD="5",
        )
        said = await say(desk)
        assert (said.status, said.out, said.err) == (0, f"plain,{short}\n", "")
        desk.set_env(COMP_WORDS="culm sessions show x", CULM_HOST=stage.flow.url)
        desk.set_env(COMP_CWORD="3")
        assert (await say(desk)).out == "\n"


def test_where_no_server_answers_nothing_is_offered_and_nobody_waits(tmp_path: Path) -> None:
    assert ids_for(tmp_path, f"unix://{tmp_path}/none", None, "") == []
    assert ids_for(tmp_path, "no address", None, "") == []
    with socket.socket() as deaf:  # It accepts, and never says a word.
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        assert ids_for(tmp_path, url, tmp_path / "no-token", "") == []
        assert ids_for(tmp_path, url, None, "") == []
