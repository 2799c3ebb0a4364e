"""A data directory of every earlier version opens with the recorded content."""

from pathlib import Path

import pytest

from tests.flow.drive import send
from tests.frozen.comparing import as_text, check_text
from tests.frozen.data.directories import (
    count_recorded,
    expected_of,
    open_recorded,
    read_mail,
    read_recorded,
    recorded,
    restore,
)

COMMAND = "python -m tests.frozen.record expected, if only the wording has changed"


@pytest.fixture(params=recorded())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def put(version: str, folder: Path) -> float:
    at_s = expected_of(version)["recorded_at"]
    assert isinstance(at_s, int | float)
    restore(version, folder, at_s)
    return at_s


async def test_recorded_directory_opens_with_equal_content_twice(
    version: str, tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    at_s = put(version, folder)
    expected = expected_of(version)
    for _ in range(2):
        answers = await read_recorded(version, folder, at_s)
        check_text(
            f"data/{version}/expected.json", as_text({**expected, "answers": answers}),
            command=COMMAND,
        )  # fmt: skip


async def test_recorded_event_log_is_replayed_from_its_beginning(
    version: str, tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    at_s = put(version, folder)
    assert await count_recorded(version, folder, at_s) == expected_of(version)["events"]


def test_recorded_mailboxes_are_read_without_a_server(version: str, tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    put(version, folder)
    assert read_mail(folder) == expected_of(version)["mail"]


async def test_recorded_token_opens_the_server(version: str, tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    at_s = put(version, folder)
    token = (folder / "data" / "token").read_text().strip()
    async with open_recorded(folder, at_s, "tcp") as flow:
        for given, status in ((token, 200), ("another", 401)):
            headers = {"Authorization": f"Bearer {given}"}
            answer = await send(flow, "GET", "/v1/version", headers=headers)
            assert answer.status == status
