"""Warm up a process before it becomes a worker, by running whole worker lifecycles in it.

In the zygote this initializes everything lazy once for all forks, and lets the interpreter
specialize the startup code, in memory pages that stay shared. In a preforked worker it copies the
pages that a worker writes to before a host waits for them.
"""

import asyncio
import secrets
import socket
from typing import Final

from culm.fleet.protocol.frames import RunSpec, encode_frame
from culm.fleet.provision import (
    PROVISION_VERSION,
    CulmExtension,
    EchoKind,
    Identity,
    Provision,
    Secrets,
)
from culm.fleet.transport.tls import bearer
from culm.fleet.worker.lifecycle import work
from culm.fleet.worker.main import run_loop

ROUNDS: Final = 10  # The interpreter specializes code after eight runs.
BOUND_S: Final = 10.0
_READ_BYTES: Final = 64 << 10
_TOKEN: Final = secrets.token_hex(16)  # Needed because the worker listens for a moment.
_NOWHERE: Final = "/nowhere"  # Never written: the rehearsal ends before it would register.
# A minimal client: workers are never clients, so the code of a real one should not be loaded.
_UPGRADE: Final = (
    "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Authorization: {bearer(_TOKEN)}\r\n\r\n"
).encode()


def warm_up(rounds: int = ROUNDS) -> None:
    """Run some rehearsals. Leaves no threads or sockets; raises if a worker cannot work here."""
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
