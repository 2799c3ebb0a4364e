"""What goes with a prompt, as a person says it."""

from pathlib import Path

import pytest

from culm.cli.asking import FILE_BYTES_MAX, limits_of, read_attachments
from culm.errors import InvalidRequest
from culm.wire.runs import Limits
from culm.workspace.run_service import ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX


@pytest.mark.parametrize(
    ("budgets", "timeout", "limits"),
    [
        ((), "", Limits()),
        (("0.50",), "", Limits(cost=0.5)),
        (("$2",), "90", Limits(cost=2, wall_s=90)),
        (("200ktokens",), "5m", Limits(tokens=200_000, wall_s=300)),
        (("1.5M tok", "20 steps", "0.01usd"), "1h", Limits(3600, 20, 1_500_000, 0.01)),
        (("1,000tokens",), "0.5s", Limits(tokens=1000, wall_s=0.5)),
    ],
)
def test_budgets_and_times_are_read_as_people_write_them(
    budgets: tuple[str, ...], timeout: str, limits: Limits
) -> None:
    assert limits_of(budgets, timeout) == limits


@pytest.mark.parametrize(
    ("budgets", "timeout"), [(("0",), ""), (("-1",), ""), (("ten",), ""), ((), "0s"), ((), "1y")]
)
def test_what_is_none_or_nothing_is_refused_with_a_hint(
    budgets: tuple[str, ...], timeout: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        limits_of(budgets, timeout)
    assert refused.value.hint


def test_a_file_is_what_its_content_says_and_as_large_as_the_server_takes_it(
    tmp_path: Path,
) -> None:
    assert (FILE_BYTES_MAX, 100) == (ATTACHMENT_BYTES_MAX, ATTACHMENTS_MAX)
    contents = {"a.py": b"x = 1", "b.png": b"\x89PNG", "c": "schön".encode(), "d.svg": b"<svg/>"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = read_attachments([tmp_path / name for name in contents])
    kinds = ["text/x-python", "image/png", "text/plain", "text/plain"]
    assert [(one.file_name, one.mime_type) for one in found] == [*zip(contents, kinds, strict=True)]
