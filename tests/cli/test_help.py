"""Every command explains itself, with an example."""

import re

import click
import pytest

from culm.cli.main import culm
from tests.pages import contexts

CONTEXTS = list(contexts(click.Context(culm, info_name="culm", terminal_width=80)))


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda one: one.command_path)
def test_the_help_of_a_command_has_an_example_that_names_it(context: click.Context) -> None:
    help_ = context.command.get_help(context)
    _, found, example = help_.partition("\n  Example:\n")
    assert found, help_
    assert re.search(rf"\b{context.command_path}\b", example.partition("\nOptions:")[0])
