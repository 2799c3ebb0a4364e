"""Logging is off: simulated servers log a lot, and nobody reads it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Disable logging; formatting would take a fifth of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
