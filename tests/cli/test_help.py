"""Every command has help with an example."""

import re

import click
import pytest

from tests.pages import all_contexts


@pytest.mark.parametrize("context", list(all_contexts()), ids=lambda one: one.command_path)
def test_command_help_has_an_example_with_its_path(context: click.Context) -> None:
    help_ = context.command.get_help(context)
    _, found, example = help_.partition("\n  Example:\n")
    assert found, help_
    assert re.search(rf"\b{context.command_path}\b", example.partition("\nOptions:")[0])
