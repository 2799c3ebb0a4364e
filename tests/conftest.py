"""Every test runs on the loop that the product runs on; asyncio's debug mode is on."""

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

from tests.debugging import keep_notes_short
from tests.support import BREADTH

pytest_plugins = ["tests.suite.reporting"]
keep_notes_short()

# No test finds a key, a model server or the configuration of whoever runs it.
os.environ["CULM_NO_DISCOVERY"] = "1"
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# A busy machine is no failure: what takes too long is bounded by pytest's own time-out.
settings.register_profile("culm", deadline=None, max_examples=max(10, int(50 * BREADTH)))
settings.load_profile("culm")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is in `live/` is marked so, and runs last."""
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(pytest.mark.live)
    items.sort(key=lambda item: "live" in item.path.parts)
