"""A real server whose agent has additional tools with a visible effect.

Run as a program. It prints `listening URL` as `culm serve` does, and ends with its stdin, so that
none outlives its test. Every tool appends a line with its name to the file `effects` in the
directory it was started in; the tools named `hang_…` then never answer.
"""

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop

from culm.assemble import open_server
from culm.clock import LoopClock
from culm.config.sources import read_user_file
from culm.ids import Ids
from culm.model.base import ToolSpec
from culm.settings import ServeOptions
from culm.tools.base import CallPlan, CallRequest, CallResult, free_plan
from culm.wire.runs import CrashPolicy

PROGRAM = ("-m", "tests.live.run_server")
EFFECTS = "effects"


@dataclass(frozen=True, slots=True)
class Mark:
    """A tool that leaves a mark, and then answers or hangs."""

    name: str
    crash: CrashPolicy
    hangs: bool
    parallel: bool

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, "Leave a mark.", {"type": "object", "properties": {}})

    async def prepare(self, call: CallRequest) -> CallPlan:
        return free_plan(call, lambda _: self.run(call))

    async def run(self, call: CallRequest) -> CallResult:
        _append(f"{self.name}\n")
        if self.hangs:
            await asyncio.Event().wait()
        return CallResult("marked")


def _append(line: str) -> None:
    with Path(EFFECTS).open("a") as file:
        file.write(line)


TOOLS = {
    tool.name: tool
    for tool in (
        Mark("mark", "ask", hangs=False, parallel=False),
        Mark("hang_again", "again", hangs=True, parallel=True),
        Mark("hang_ask", "ask", hangs=True, parallel=True),
        Mark("hang_never", "never", hangs=True, parallel=True),
    )
}


async def serve(options: ServeOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin, stop.set)  # Nothing is written there: readable means closed.
    async with open_server(options, LoopClock(), Ids(), stop.set, TOOLS) as server:
        for address in server.addresses:
            print(f"listening {address}", flush=True)  # noqa: T201
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    given = parser.parse_args()
    hosts: list[str] = given.host
    settings, file = read_user_file(given.config, os.environ)
    options = ServeOptions(
        data_dir=given.data_dir, hosts=tuple(hosts), settings=settings, config_file=file
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options))


if __name__ == "__main__":
    main()
