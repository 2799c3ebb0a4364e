"""A proxy between a client and a server that records requests and changes nothing."""

import asyncio
import re
import tempfile
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress

from culm.client.http import Client, open_client
from culm.server.api import Route
from culm.server.listen import Address
from tests.flow.conftest import FlowServer
from tests.flow.drive import READ_BYTES, connect

_HEAD = re.compile(rb"([A-Z]+) (/v1/[^ ?]*)\S* HTTP/1\.1\r\n")

Requests = set[tuple[str, str]]  # Method and path.


class Relay:
    """Created by `open_relay`."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._sent: list[bytearray] = []  # On each connection.

    def requests(self) -> Requests:
        """Every request so far, without its query."""
        found = (match for sent in self._sent for match in _HEAD.finditer(sent))
        return {(match[1].decode(), match[2].decode()) for match in found}

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it."""
        sent = bytearray()
        self._sent.append(sent)
        their_reader, their_writer = await connect(self._target)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, their_writer, sent))
            tasks.create_task(_copy(their_reader, writer, bytearray()))


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray
) -> None:
    with suppress(ConnectionError):  # The other side was faster.
        while data := await reader.read(READ_BYTES):
            seen += data
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def open_relay(flow: FlowServer) -> AsyncGenerator[tuple[Client, Relay]]:
    """A client of the server whose requests are recorded."""
    relay = Relay(flow.server.addresses[0])
    with tempfile.TemporaryDirectory(prefix="culm-") as short:  # A socket's path must be short.
        server = await asyncio.start_unix_server(relay.pass_on, f"{short}/s")
        async with server, open_client(f"unix://{short}/s") as client:
            yield client, relay


def routes_of(requests: Requests, routes: Iterable[Route]) -> set[tuple[str, str]]:
    """The routes of these requests; fails if a request matches none."""
    found = set[tuple[str, str]]()
    for method, path in requests:
        fitting = [one for one in routes if one.method == method and _fits(one.path, path)]
        assert fitting, f"there is no route for {method} {path}"
        # A literal segment has priority over a parameter, as in the server.
        found.add((method, min(fitting, key=lambda one: one.path.count("{")).path))
    return found


def _fits(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"{\w+}", "[^/]+", pattern), path) is not None
