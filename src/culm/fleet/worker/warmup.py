"""What a process does before it becomes a worker: live the life of one, from ready to the end.

In the zygote, all that is made at its first use is made once for all forks, and the interpreter
has adapted the code that runs first, in pages that stay shared. In a bud, the pages that a worker
writes to are its own before anybody waits for that.
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
from culm.fleet.transport.auth import bearer
from culm.fleet.worker.lifecycle import work
from culm.fleet.worker.main import run_loop

ROUNDS: Final = 10  # The interpreter adapts what it has seen eight times.
BOUND_S: Final = 10.0
_READ_BYTES: Final = 64 << 10
_TOKEN: Final = secrets.token_hex(16)  # It does listen, for a moment.
_NOWHERE: Final = "/nowhere"  # So short a life leaves no record.
# A client of few words: a worker never is one, and shall not have the code of a real one in use.
_UPGRADE: Final = (
    "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Authorization: {bearer(_TOKEN)}\r\n\r\n"
).encode()


def warm_up(rounds: int = ROUNDS) -> None:
    """Leaves neither a thread nor a socket; raises if a worker could not work here at all."""
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
    # On loopback the kernel connects at once. (The loop itself would use a thread for it.)
    sock = socket.create_connection(("127.0.0.1", port), BOUND_S)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer.write(_UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        spec = encode_frame(RunSpec("once more"))
        # One text message, masked with nothing.
        writer.write(bytes((0x81, 0x80 | len(spec), 0, 0, 0, 0)) + spec)
        heard = b""
        while b'"terminal"' not in heard:
            part = await reader.read(_READ_BYTES)
            if not part:
                raise ConnectionError("a rehearsal ended before its terminal")
            heard += part
    finally:
        writer.close()
        await writer.wait_closed()
