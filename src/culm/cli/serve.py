"""Run a server in this process: the event loop, the signals, the lines on stdout."""

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial

from culm import __version__
from culm.assemble import open_server
from culm.cli.terminal.signals import ECHO_S
from culm.clock import LoopClock
from culm.ids import Ids
from culm.settings import DETACHED, ServeOptions

log = logging.getLogger(__name__)

FILES = 16_384  # Connections by both kinds of socket, and the databases.


def run_server(options: ServeOptions) -> None:
    """Serve until nobody needs the server or a signal comes; raises `ListenFailed`."""
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options))
        # All that must be done is done. A thread that hangs in a file system is not waited for.
        logging.shutdown()
        os._exit(0)


def _raise_file_limit() -> None:
    """Take the descriptors we may have: a shell's default of 1,024 is too few for our bounds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def _serve(options: ServeOptions) -> None:
    stop = asyncio.Event()
    signals: list[float] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(_on_signal, number, stop, signals))
    async with open_server(options, LoopClock(), Ids(), stop.set) as server:
        log.info("culm %s, data in %s", __version__, options.data_dir)
        for address in server.addresses:
            # The one line a script waits for; it must not sit in a buffer.
            print(f"listening {address}", flush=True)  # noqa: T201
        if os.environ.get(DETACHED):
            _let_go_of_output()
        await stop.wait()
        log.info("leaving")


def _let_go_of_output() -> None:
    """Whoever started us for itself has read enough; the log file has the rest."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _on_signal(number: signal.Signals, stop: asyncio.Event, before: list[float]) -> None:
    now_s = asyncio.get_running_loop().time()
    if before and now_s - before[0] > ECHO_S:
        os._exit(128 + number)  # Asked twice: at once, with whatever is on disk.
    before.append(now_s)
    stop.set()
