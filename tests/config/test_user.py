"""The user's own file: the settings of the server in it, and every problem before it starts."""

from pathlib import Path

import pytest

from culm.config.user import read_user_file
from culm.errors import InvalidRequest
from culm.settings import Settings


def test_without_a_file_there_are_the_defaults_and_where_it_would_be(tmp_path: Path) -> None:
    expected = tmp_path / "culm" / "culm.json"
    assert read_user_file(None, {"XDG_CONFIG_HOME": str(tmp_path)}) == (Settings(), expected)


def test_settings_are_read_beside_all_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"LINGER_S": 1, "runs_max": 3, "queue_max": null, // mine\n "providers": {},}')
    assert read_user_file(file, {}) == (Settings(linger_s=1.0, runs_max=3), file)


def test_a_file_is_told_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    assert read_user_file(Path("mine.json"), {}) == (Settings(), tmp_path / "mine.json")


def test_a_file_that_was_named_and_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_user_file(tmp_path / "none.json", {})
    assert caught.value.message == f"cannot read {tmp_path}/none.json: there is no such file"


def test_every_problem_is_told_at_once_and_each_hint_once(tmp_path: Path) -> None:
    file = tmp_path / "culm.json"
    file.write_text('{\n"runs_mx": 1,\n"models": {"larg": {}},\n"fallbacks": {"larg": []}\n}')
    with pytest.raises(InvalidRequest) as caught:
        read_user_file(file, {})
    assert (caught.value.message, caught.value.hint) == (
        f"{file}:2: runs_mx: unknown key\n"
        f"{file}:3: models.larg: unknown key\n"
        f"{file}:4: fallbacks.larg: unknown key",
        "did you mean 'runs_max'?; did you mean 'large'?; docs/configuration.md lists every key",
    )


@pytest.mark.parametrize("content", [b"\xff", b"", b"[]", b'{"linger_s": 1e999}'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "culm.json"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"culm\.json:1: "):
        read_user_file(file, {})


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_user_file(tmp_path, {})
