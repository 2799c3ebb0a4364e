"""The shapes of the HTTP interface and of the lines of `--json` are as they were recorded."""

from tests.frozen.comparing import check_text
from tests.frozen.shapes import api_text, run_lines_text


def test_shape_of_every_route_and_event_is_unchanged() -> None:
    check_text("api.txt", api_text())


def test_shape_of_every_json_line_is_unchanged() -> None:
    check_text("run-lines.txt", run_lines_text())
