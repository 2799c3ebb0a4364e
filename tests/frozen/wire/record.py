"""Write the transcripts again. Read the diff before a commit."""

import asyncio
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from culm.store import writer
from culm.testing.model_server import open_model_server
from tests.fleet.host_harness import open_fake_launcher
from tests.flow.conftest import open_flow
from tests.frozen.wire.agents import ScriptedLauncher
from tests.frozen.wire.scenario import SETTINGS, play
from tests.frozen.wire.story import Story, StoryClock
from tests.frozen.wire.transcript import HERE, kept, render
from tests.frozen.wire.turns import SCRIPT, TOOLS

COMMAND = "python -m tests.frozen.wire.record"
PLAY_S = 30.0  # For the whole story; each step has its own limit.


@contextmanager
def one_reader() -> Generator[None]:
    """Make the store read sequentially, in the order of the requests.

    The answer to a request that starts an agent reads the agent before its run does, and only then
    the run begins: otherwise the answer has `pending` or `running`, depending on threads.
    """
    usual, writer.READERS = writer.READERS, 1
    try:
        yield
    finally:
        writer.READERS = usual


async def perform(folder: Path, kind: str) -> Story:
    clock = StoryClock()
    with one_reader():
        return await _perform(folder, kind, clock)


async def _perform(folder: Path, kind: str, clock: StoryClock) -> Story:
    async with (
        asyncio.timeout(PLAY_S),
        open_model_server(SCRIPT) as model,
        open_fake_launcher(ScriptedLauncher) as launcher,
        open_flow(
            folder.resolve(), kind, clock=clock, settings=SETTINGS, tools=TOOLS, launcher=launcher
        ) as flow,
    ):
        return await play(flow, clock, model)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="culm-") as folder:
        story = await perform(Path(folder), "unix")
    for stale in kept():
        (HERE / stale).unlink()
    for name, text in render(story.names, story.exchanges, story.streams).items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    os.environ["CULM_NO_DISCOVERY"] = "1"  # As in tests: keys of this machine are ignored.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
