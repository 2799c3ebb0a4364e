"""Check the non-public parts of aiohttp that `EventResponse` uses."""

import asyncio

from aiohttp import web

from culm.server.routes.workspaces import EventResponse
from tests.support import WAIT_S


async def test_the_response_is_close_delimited_and_its_head_is_sent_at_once() -> None:
    released = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = EventResponse()
        await response.prepare(request)
        await response.drained()
        assert request.transport is not None
        request.transport.write(b"data: 1\n\n")
        await released.wait()
        return response

    app = web.Application()
    app.add_routes([web.get("/", handler)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert "transfer-encoding" not in head
            assert "content-length" not in head
            assert "connection: close" in head
            assert "content-type: text/event-stream" in head
            assert await reader.readexactly(9) == b"data: 1\n\n"
            released.set()
            assert await reader.read() == b""
    finally:
        writer.close()
        server.close()
        await runner.cleanup()
