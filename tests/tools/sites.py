"""Local HTTP servers and fake DNS for tests of network tools."""

import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
HTML = {"Content-Type": "text/html"}


@asynccontextmanager
async def open_site(
    *handlers: Handler, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[tuple[str, list[str]]]:
    """Open a local server with the n-th handler at `/n`; yield its address and its requests."""
    seen: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(f"{request.host.partition(':')[0]} {request.path}")
        return await handlers[int(request.path.strip("/") or 0)](request)

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    try:
        place = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await place.start()
        yield f"127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def respond_with(
    body: str | bytes, status: int = 200, kind: str | None = "text/plain", **headers: str
) -> Handler:
    async def handler(_: web.BaseRequest) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        spelled = {name.replace("_", "-"): value for name, value in headers.items()}
        response = web.Response(body=data, status=status, headers=spelled)
        response.headers["Content-Type"] = kind or ""
        return response

    return handler


def redirect_to(location: str) -> Handler:
    return respond_with("", 302, Location=location)


async def endless(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers=HTML)
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65536)


async def cut_short(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    response.content_type = "text/plain"
    await response.prepare(request)
    await response.write(b"x")
    assert request.transport is not None
    request.transport.close()
    return response


class FakeDns:
    """DNS with fixed answers; each answer but the last is given once."""

    def __init__(self, **answers: tuple[str, ...]) -> None:
        self.answers = {name.replace("_", "."): list(given) for name, given in answers.items()}

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        answers = self.answers.get(host, [host])
        return tuple((answers.pop(0) if len(answers) > 1 else answers[0]).split())
