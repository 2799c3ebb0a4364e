"""Simulated servers complain much, and nobody reads it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Formatting what they say would take a fifth of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
