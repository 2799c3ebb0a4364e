"""A server with supervised commands, until it is killed: `python -m tests.live.processes_server`.

Its argument is the data directory. It prints the pids of each role in one line of JSON.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop

from culm.processes.linux import find_stat
from tests.processes.process_harness import open_process_harness
from tests.processes.test_escapes import DAEMON

STUBBORN = "trap '' TERM; setsid sleep 100 & echo $!; while :; do wait; done"


def parent_of(pid: int) -> int:
    stat = find_stat(pid)
    return 0 if stat is None else stat.parent


async def serve(folder: Path) -> None:
    async with open_process_harness(folder, bound_s=60) as harness:
        stubborn = await harness.bash(STUBBORN)
        daemon = await harness.python(DAEMON + "import time; time.sleep(100)")
        commands = [stubborn.handle.pid, daemon.handle.pid]
        shims = [parent_of(pid) for pid in commands]
        pids = {
            "server": [os.getpid()],
            "supervisor": [parent_of(shims[0])],
            "shims": shims,
            "commands": commands,
            "escaped": [await stubborn.pid(), await daemon.pid()],
        }
        sys.stdout.write(json.dumps(pids) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
