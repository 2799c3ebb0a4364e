"""The worker process: its standard input and stderr, its signals, its exit status and its warm-up.

`culm worker` and every fork of the zygote call `run_worker`. Serving belongs to `lifecycle.py`.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

from culm.errors import AppError
from culm.fleet.protocol.frames import RunSpec, encode_frame
from culm.fleet.provision import (
    PROVISION_BYTES_MAX,
    PROVISION_VERSION,
    BadProvision,
    CulmExtension,
    EchoKind,
    Identity,
    Provision,
    Secrets,
    parse_provision,
)
from culm.fleet.transport.tls import bearer
from culm.fleet.worker.executors.base import preload_executors
from culm.fleet.worker.lifecycle import WorkerEndpoint, work
from culm.fleet.worker_server.connection import ConnectTimeout
from culm.redaction import redact

NAME: Final = "culm worker"
EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2  # The provision was refused.
# Time for a run that does not end and for the processes it started; then the worker is killed.
LEAVE_S: Final = 15
_READ_BYTES: Final = 1 << 20
ROUNDS: Final = 10  # The interpreter specializes code after eight runs.
BOUND_S: Final = 10.0
_TOKEN: Final = secrets.token_hex(16)  # Needed because the worker listens for a moment.
_NOWHERE: Final = "/nowhere"  # Never written: the rehearsal ends before it would register.
# A minimal client: workers are never clients, so the code of a real one should not be loaded.
_UPGRADE: Final = (
    "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Authorization: {bearer(_TOKEN)}\r\n\r\n"
).encode()
_log = logging.getLogger(__name__)


def run_worker(stdin_fd: int = 0, *, no_auth: bool = False) -> int:
    """Read the provision from the descriptor, serve it, and return the exit status.

    0 is a clean end, 2 an unusable provision, 1 any other failure; the reason is one line on
    stderr. Prints nothing on stdout.
    """
    set_up_log(NAME)
    # In a fork of the zygote all signals have the kernel's defaults.
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
    except Exception:  # boundary: the starter reads stderr and the exit status
        _log.exception("unexpected error")
        return EXIT_FAILED
    return 0


def preload() -> None:
    """Do everything that can be done before a process is forked for a worker."""
    set_up_log(NAME)
    preload_executors()
    _new_loop().close()


def run_loop(main: Callable[[asyncio.Event], Coroutine[None, None, None]]) -> None:
    """Run `main` to its end on a new loop; it gets the event that requests a stop."""
    loop = _new_loop()
    try:
        loop.run_until_complete(main(asyncio.Event()))
    finally:
        signal.alarm(0)
        loop.close()


def handle_signals(stop: asyncio.Event) -> None:
    """Make signals request an orderly stop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)


async def _work(provision: Provision, stop: asyncio.Event) -> None:
    if provision.culm.control_fd is None:
        handle_signals(stop)
        await work(provision, stop, WorkerEndpoint(on_leave=limit_shutdown))
        return

    def on_ready(_: str) -> None:
        # Not earlier: the host waits for `ready`, and this takes half a millisecond. Until now
        # nothing was registered or started, so a signal could simply end the process.
        handle_signals(stop)

    await work(provision, stop, WorkerEndpoint(on_ready=on_ready, on_leave=limit_shutdown))


def limit_shutdown() -> None:
    """Kill the process after `LEAVE_S`, by a signal, as a hanging run may block the loop."""
    signal.alarm(LEAVE_S)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _read_provision(descriptor: int) -> bytes:
    """Read the provision up to the limit plus one byte, then replace the descriptor by /dev/null
    so that no child process can read the provision."""
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
    """Raise `BadProvision` if any user of this machine could give the worker runs."""
    if not provision.secrets.worker_auth_token and not no_auth:
        raise BadProvision(
            "there is no secrets.worker_auth_token; `culm worker --no-auth` serves without one"
        )


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def set_up_log(name: str) -> None:
    """Log warnings to stderr, without secrets."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Redacted(f"{name}: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _report(reason: str, status: int) -> int:
    line = f"{NAME}: {' '.join(reason.split())}\n"
    with suppress(OSError):  # The reader may be gone; the status remains.
        os.write(2, line.encode(errors="replace"))
    return status


# --- the warm-up


def warm_up(rounds: int = ROUNDS) -> None:
    """Run whole worker lifecycles in this process, before it becomes a worker.

    In the zygote this initializes everything lazy once for all forks, and lets the interpreter
    specialize the startup code, in memory pages that stay shared. In a preforked worker it copies
    the pages that a worker writes to before a host waits for them. Leaves no threads or sockets;
    raises if a worker cannot work here.
    """
    for _ in range(rounds):
        run_loop(_rehearse)


async def _rehearse(stop: asyncio.Event) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    provision = Provision(
        PROVISION_VERSION,
        Identity("rehearsal"),
        EchoKind(),
        _NOWHERE,
        storage_dir=_NOWHERE,
        secrets=Secrets(worker_auth_token=_TOKEN),
        reusable=True,
        culm=CulmExtension(control_fd=theirs.detach()),
    )
    with ours:
        ours.settimeout(0)
        async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(work(provision, stop), name="worker")
            ready = await asyncio.get_running_loop().sock_recv(ours, _READ_BYTES)
            await _carry_out(int(ready.rpartition(b":")[2]))
            stop.set()


async def _carry_out(port: int) -> None:
    # On loopback the kernel connects at once; the loop itself would use a thread.
    sock = socket.create_connection(("127.0.0.1", port), BOUND_S)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer.write(_UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        spec = encode_frame(RunSpec("once more"))
        # One text message, with a mask of zeros.
        writer.write(bytes((0x81, 0x80 | len(spec), 0, 0, 0, 0)) + spec)
        received = b""
        while b'"terminal"' not in received:
            part = await reader.read(_READ_BYTES)
            if not part:
                raise ConnectionError("a rehearsal ended before its terminal frame")
            received += part
    finally:
        writer.close()
        await writer.wait_closed()
