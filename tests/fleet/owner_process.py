"""A process that owns workers until it is killed: `python -m tests.fleet.owner_process <folder>`.

It owns two idle workers and two with a run. One of each kind is forked and has a control socket;
the other one was started by hand and only knows its owner's pid. It prints their pids in one line
of JSON.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from culm.clock import LoopClock
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.host.startup import WORKER, make_stamp, open_document, python_argv, stamped
from culm.fleet.protocol.frames import RunSpec, encode_frame
from culm.fleet.transport.base import Link
from culm.fleet.transport.websocket import connect_websocket
from tests.fleet.launch_harness import make_provision, open_launcher

LONG = "__sleep_ms:60000 and the rest"


async def begin(link: Link) -> None:
    """Start a long run; the frame received shows that a second run superseded the first."""
    await link.send(encode_frame(RunSpec(LONG)))
    await link.send(encode_frame(RunSpec(LONG)))
    assert await link.receive() is not None


async def start_by_hand(folder: Path, name: str) -> tuple[int, Link]:
    given = stamped(make_provision(folder, name), make_stamp(LoopClock().now_s()), None)
    document = open_document(given)
    process = await asyncio.create_subprocess_exec(
        *python_argv(WORKER), stdin=document, start_new_session=True
    )
    discovery = FileDiscovery(folder / "fabric", LoopClock())
    while (record := discovery.resolve(name)) is None:
        await asyncio.sleep(0.02)
    return process.pid, await connect_websocket(record.endpoint, given.secrets.worker_auth_token)


async def own(folder: Path) -> None:
    async with open_launcher(folder) as launcher, AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        for name in ("forked idle", "forked busy"):
            worker = await launcher.launch(make_provision(folder, name.replace(" ", "-")))
            assert worker.pid is not None
            pids[name] = worker.pid
            link = await worker.connect()
            stack.push_async_callback(link.close)
            if "busy" in name:
                await begin(link)
        for name in ("stamped idle", "stamped busy"):
            pids[name], link = await start_by_hand(folder, name.replace(" ", "-"))
            stack.push_async_callback(link.close)
            if "busy" in name:
                await begin(link)
        sys.stdout.write(json.dumps(pids) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(own(Path(sys.argv[1])))
