"""The help of every command is as it was recorded."""

from tests.frozen.comparing import check_text
from tests.frozen.facts import help_text


def test_help_of_every_command_is_unchanged() -> None:
    check_text("help.txt", help_text())
