"""A fake worker that misbehaves, or reports how it was started.

The role in its provision selects the behavior. It never listens, and ends with its control socket.
"""

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from culm.clock import LoopClock
from culm.fleet.provision import Provision, parse_provision
from culm.fleet.worker.control import open_control
from culm.fleet.worker.zygote import ForkTask, serve
from culm.processes.base import Processes, ProcessOwner, ProcessRequest
from culm.processes.linux import find_stat

ENDPOINT = "ws://127.0.0.1:9"


def main() -> None:
    serve(lambda: ForkTask(run))


def main_threaded() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    main()


def run() -> int:
    given = parse_provision(os.read(0, 1 << 20))
    assert given.culm.control_fd is not None
    if given.identity.role == "command":
        asyncio.run(run_commands(given))
        return 0
    control = socket.socket(fileno=given.culm.control_fd)
    match given.identity.role:
        case "refuse":
            os.write(2, b"culm worker: no such thing\n")
            return 2
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.write(2, b"about to hang")
            signal.pause()
        case "let go":
            control.close()
            signal.pause()
        case "ask":
            control.send(b"keeper")
            os.write(2, control.recv(1000).removeprefix(b"refused "))
        case "flood":
            for _ in range(64):
                os.write(2, b"x" * (64 << 10))
            os.write(2, b"the end")
        case _:
            write_report(given)
    control.send(f"ready {ENDPOINT}".encode())
    while control.recv(1000):
        continue
    return 0


def write_report(given: Provision) -> None:
    """Write the state of this process to a file."""
    assert given.storage_dir is not None
    status = Path("/proc/self/status").read_text()
    own = find_stat(os.getpid())
    assert own is not None
    report = {
        "descriptors": sorted(int(entry.name) for entry in os.scandir("/proc/self/fd"))[:-1],
        "stdout": str(Path("/proc/self/fd/1").readlink()),
        "leads": os.getsid(0) == os.getpid(),
        "signals": dict(line.split(":\t") for line in status.splitlines() if "Sig" in line),
        "wakeup": signal.set_wakeup_fd(-1),
        "chance": random.random(),
        "name": own.comm,
        "argv": Path("/proc/self/cmdline").read_bytes().decode(),
        "environ": Path("/proc/self/environ").read_bytes().decode(),
    }
    Path(given.storage_dir, given.identity.child_id).write_text(json.dumps(report))


async def run_commands(given: Provision) -> None:
    """Run commands one after the other, and report them to a named pipe."""
    assert given.culm.control_fd is not None
    assert given.storage_dir is not None
    file = os.open(Path(given.storage_dir, given.identity.child_id), os.O_WRONLY)
    with open(file, "w", buffering=1) as output:  # noqa: ASYNC230, PTH123 - blocking is harmless here
        async with (
            open_control(given.culm.control_fd) as control,
            control.open_processes(LoopClock()) as processes,
            asyncio.TaskGroup() as tasks,
        ):
            task = tasks.create_task(run_forever(processes, output.write))
            control.ready(ENDPOINT)
            await control.gone()
            task.cancel()


async def run_forever(processes: Processes, write: Callable[[str], object]) -> None:
    request = ProcessRequest(
        ["sleep", "100"], "/", {"PATH": os.environ["PATH"]}, ProcessOwner("w", "call"), ()
    )
    while True:
        handle = await processes.start(request)
        write(f"{handle.pid}\n")
        exit_ = await handle.wait()
        write(f"{exit_}\n")
