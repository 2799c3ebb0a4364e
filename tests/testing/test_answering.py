"""Sending an answer pauses when the client does not read, so memory stays bounded."""

import asyncio
from collections.abc import Iterator

import aiohttp
from aiohttp import web

from culm.testing.answering import AnswerSender
from tests.support import WAIT_S

DELTA = b"x" * 10_000
QUIET_TURNS = 500  # At full speed, every loop iteration sends something.
# The kernel's socket buffers and a little of our own.
BYTES_MAX = 32 << 20


async def test_an_answer_waits_for_a_client_that_does_not_read() -> None:
    made = 0

    def endless() -> Iterator[bytes]:
        nonlocal made
        while True:
            made += 1
            yield DELTA

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse()
        await response.prepare(request)
        await AnswerSender(response, request.transport, asyncio.Event()).send(endless(), 0)
        raise AssertionError("it has no end")

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with (
            asyncio.timeout(WAIT_S),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{site.port}/"),
        ):
            quiet, before = 0, -1
            while quiet < QUIET_TURNS:
                await asyncio.sleep(0)
                quiet, before = (quiet + 1 if made == before else 0), made
                assert made * len(DELTA) < BYTES_MAX
    finally:
        await runner.cleanup()
