"""The worker process: what it reads, what it says on stderr, its signals, its exit status.

`culm worker` and every fork of the zygote end up in `run_worker`. What is served is `work.py`'s.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

from culm.errors import AppError
from culm.fleet.provision import (
    PROVISION_BYTES_MAX,
    BadProvision,
    Provision,
    parse_provision,
)
from culm.fleet.worker.executors import registry
from culm.fleet.worker.lifecycle import WorkerEndpoint, work
from culm.fleet.worker_server.base import ConnectTimeout
from culm.logs import redact

NAME: Final = "culm worker"
EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2  # The provision, or what it wants.
# For a run that does not want to end and for what custody holds; then the process is ended.
LEAVE_S: Final = 15
_READ_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


def run_worker(stdin_fd: int = 0, *, no_auth: bool = False) -> int:
    """Serve what the descriptor says, and return the exit status. Prints nothing on stdout.

    0 is a clean end, 2 a provision that cannot be used, 1 whatever else went wrong; the reason is
    one line on stderr.
    """
    set_up_log(NAME)
    # A fork of the zygote has all signals as the kernel has them.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        provision = parse_provision(_read_provision(stdin_fd))
        _check_auth(provision, no_auth=no_auth)
        run_loop(lambda stop: _work(provision, stop))
    except BadProvision as exc:
        return _report(str(exc), EXIT_REFUSED)
    except AppError as exc:
        return _report(exc.message, EXIT_FAILED)
    except (ConnectTimeout, OSError) as exc:
        return _report(str(exc), EXIT_FAILED)
    except Exception:  # boundary: whoever started it reads its stderr, and its exit status
        _log.exception("it failed")
        return EXIT_FAILED
    return 0


def preload() -> None:
    """Do all that a process can do before it is forked for a worker."""
    set_up_log(NAME)
    registry.preload()
    _new_loop().close()


def run_loop(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    """Run it to its end on a loop of its own, with the event that tells it to end."""
    loop = _new_loop()
    try:
        loop.run_until_complete(main(asyncio.Event()))
    finally:
        signal.alarm(0)
        loop.close()


def handle_signals(stop: asyncio.Event) -> None:
    """From here on a signal asks for an orderly end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)


async def _work(provision: Provision, stop: asyncio.Event) -> None:
    if provision.culm.control_fd is None:
        handle_signals(stop)
        await work(provision, stop, WorkerEndpoint(on_leave=bound_the_end))
        return

    def on_ready(_: str) -> None:
        # Somebody has waited for this, half a millisecond less than if we had done it before. Until
        # now nothing was announced or started: a signal might just have ended us.
        handle_signals(stop)

    await work(provision, stop, WorkerEndpoint(on_ready=on_ready, on_leave=bound_the_end))


def bound_the_end() -> None:
    """What does not end may hold the loop: hence by a signal, and not by a timer of the loop."""
    signal.alarm(LEAVE_S)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _read_provision(descriptor: int) -> bytes:
    """All of it, or more than is allowed; then nobody else can read it there any more."""
    parts: list[bytes] = []
    left = PROVISION_BYTES_MAX + 1
    try:
        while left > 0 and (part := os.read(descriptor, min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
    except OSError as exc:
        raise BadProvision(f"standard input cannot be read: {exc.strerror}") from exc
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, descriptor)
    os.close(null)
    return b"".join(parts)


def _check_auth(provision: Provision, *, no_auth: bool) -> None:
    """Raises `BadProvision` if anybody on this machine could give it work."""
    if not provision.secrets.worker_auth_token and not no_auth:
        raise BadProvision(
            "there is no secrets.worker_auth_token; `culm worker --no-auth` serves without one"
        )


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def set_up_log(name: str) -> None:
    """Warnings go to stderr, without secrets."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Redacted(f"{name}: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _report(words: str, status: int) -> int:
    line = f"{NAME}: {' '.join(words.split())}\n"
    with suppress(OSError):  # Nobody may be left to read it; the status says it, too.
        os.write(2, line.encode(errors="replace"))
    return status
