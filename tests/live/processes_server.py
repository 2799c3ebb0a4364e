"""A process that holds others in custody until it is killed: `python -m tests.live.custody_server`.

Its argument is the data directory. It says who is who in one line of JSON.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop

from culm.processes.linux import find_stat
from tests.processes.test_escapes import DAEMON
from tests.processes.yard import open_yard

DEAF = "trap '' TERM; setsid sleep 100 & echo $!; while :; do wait; done"


def parent_of(pid: int) -> int:
    stat = find_stat(pid)
    return 0 if stat is None else stat.parent


async def hold(folder: Path) -> None:
    async with open_yard(folder, bound_s=60) as yard:
        deaf = await yard.bash(DEAF)
        gone = await yard.python(DAEMON + "import time; time.sleep(100)")
        commands = [deaf.held.pid, gone.held.pid]
        shims = [parent_of(pid) for pid in commands]
        who = {
            "server": [os.getpid()],
            "keeper": [parent_of(shims[0])],
            "wardens": shims,
            "commands": commands,
            "escaped": [await deaf.pid(), await gone.pid()],
        }
        sys.stdout.write(json.dumps(who) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(hold(Path(sys.argv[1])))
