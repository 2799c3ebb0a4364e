"""Fixtures of all tests: they run on uvloop, as the product does, in asyncio's debug mode."""

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

from tests.debugging import ignore_slow_callbacks, shorten_stacks
from tests.support import BREADTH

pytest_plugins = ["tests.suite.reporting"]
shorten_stacks()
ignore_slow_callbacks()

# No test finds a key, a model server or the configuration of the user who runs it.
os.environ["CULM_NO_DISCOVERY"] = "1"
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# A slow machine is not a failure: pytest's own time-out is the limit.
settings.register_profile("culm", deadline=None, max_examples=max(10, int(50 * BREADTH)))
settings.load_profile("culm")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in `live/` and run them last."""
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(pytest.mark.live)
    items.sort(key=lambda item: "live" in item.path.parts)
