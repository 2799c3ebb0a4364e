"""Fixtures of all tests: they run on uvloop, as the product does, in asyncio's debug mode."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

from tests.debugging import ignore_slow_callbacks, shorten_stacks
from tests.suite.steps import PREFIX
from tests.support import BREADTH

OWN_DIRECTORY = pytest.StashKey[str]()
pytest_plugins = ["tests.suite.reporting"]
shorten_stacks()
ignore_slow_callbacks()

# No test finds a key, a model server or the configuration of the user who runs it.
os.environ["CULM_NO_DISCOVERY"] = "1"
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# A slow machine is not a failure: pytest's own time-out is the limit.
settings.register_profile("culm", deadline=None, max_examples=max(10, int(50 * BREADTH)))
settings.load_profile("culm")


def pytest_configure(config: pytest.Config) -> None:
    """Use a directory of its own: a suite that runs at the same time must not find our files."""
    if "TMPDIR" not in os.environ:
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=PREFIX)
        config.stash[OWN_DIRECTORY] = tempfile.tempdir


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and (directory := session.config.stash.get(OWN_DIRECTORY, "")):
        shutil.rmtree(directory, ignore_errors=True)


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
