"""A language-model provider played from a script, over real HTTP on loopback.

Owns the socket, the routes and the log of requests. It implements OpenAI's chat completions and
Anthropic's messages; `culm.testing.script` defines the format of a script. Also a program:

    python -m culm.testing.model_server --help
"""

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import uvloop
from aiohttp import web

from culm.clock import LoopClock
from culm.errors import AppError, InvalidRequest, ListenFailed
from culm.testing.answering import JSON, UNREADABLE, ModelExchange, RequestLog, SeenRequest, problem
from culm.testing.dialects import AnthropicDialect, Dialect, OpenAiDialect, RequestShape
from culm.testing.script import Player, Reply, Script, parse_script, read_script
from culm.wire.codec import decode, encode

BODY_BYTES_MAX = 64 << 20  # The largest request that culm itself accepts.
STREAMS_MAX = 2_000
BACKLOG = 2_000  # All clients may connect at once.
CLOSE_S = 5.0  # Cancelled handlers end at once; this limits the effect of a bug.
DIALECTS: dict[str, type[Dialect]] = {
    "/v1/chat/completions": OpenAiDialect,
    "/v1/messages": AnthropicDialect,
}
# One list for both dialects, with the fields of each.
MODELS = encode(
    {
        "object": "list",
        "data": [
            {
                "id": "scripted",
                "object": "model",
                "created": 0,
                "owned_by": "culm",
                "type": "model",
                "display_name": "Scripted",
                "created_at": "1970-01-01T00:00:00Z",
            }
        ],
        "first_id": "scripted",
        "last_id": "scripted",
        "has_more": False,
    }
)
_EMPTY = Script()


class ModelServer:
    """A running server. Made by `open_model_server`."""

    def __init__(self, script: Script) -> None:
        self.url = ""  # Ends in `/v1`.
        self._player = Player(script)
        self._history = RequestLog()
        self._clock = LoopClock()
        # The task of each active connection, and its transport.
        self._live: dict[asyncio.Task[None], asyncio.Transport] = {}
        self._closing = False

    @property
    def requests(self) -> list[SeenRequest]:
        """The newest 10,000 requests for an answer, in order of arrival."""
        return self._history.requests

    def play(self, script: Script) -> None:
        """Replace the script; answers that have begun are not affected."""
        self._player = Player(script)

    def add(self, reply: Reply) -> None:
        """Append to the replies that are given in order."""
        self._player.add(reply)

    def release(self, n: int | None = None) -> None:
        """Let request `n`, or every request so far, pass its `hold_after`.

        A request that has not reached it yet will not stop there. Raises `NotFound`.
        """
        for seen in self.requests if n is None else [self._history.get(n)]:
            seen.released.set()

    async def until_requests(self, n: int) -> None:
        """Wait for the arrival of `n` requests, as `SeenRequest.n` counts them."""
        await self._history.until(lambda: self._history.count >= n)

    async def until_left(self, n: int) -> None:
        """Wait until the client of request `n` leaves; raises `Conflict` if it does not."""
        await self._history.until_left(n)

    # --- the methods below are for `open_model_server`

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self._answer) for path in DIALECTS),
            web.get("/v1/models", self._models),
            web.get("/culm/requests", self._requests),
            web.post("/culm/release", self._release),
            web.post("/culm/script", self._script),
            web.route("*", "/{path:.*}", self._elsewhere),
        ]

    async def close(self) -> None:
        """End all active answers."""
        self._closing = True
        tasks = set(self._live)
        for transport in self._live.values():
            transport.abort()  # A closed transport would wait for a client that does not read.
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        task, transport = request.task, request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        self._live[task] = transport
        try:
            return await self._answer_live(request, transport, DIALECTS[request.path])
        finally:
            del self._live[task]

    async def _answer_live(
        self, request: web.Request, transport: asyncio.Transport, dialect: type[Dialect]
    ) -> web.StreamResponse:
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return problem(dialect, 413, f"the request is larger than {BODY_BYTES_MAX} bytes")
        seen = self._history.record(request.path, request.headers, raw, self._clock.now_s())
        try:
            chosen = self._choose(request, transport, seen, dialect)
            response = chosen if isinstance(chosen, web.Response) else await chosen.answer()
            seen.ended = True
            return response
        except (asyncio.CancelledError, ConnectionError) as exc:
            seen.left = not seen.ended and not self._closing
            # A client that leaves is not an error; aiohttp expects a cancelled handler.
            raise asyncio.CancelledError from exc
        finally:
            self._history.notify()

    def _choose(
        self,
        request: web.Request,
        transport: asyncio.Transport,
        seen: SeenRequest,
        dialect: type[Dialect],
    ) -> ModelExchange | web.Response:
        if len(self._live) > STREAMS_MAX:
            return problem(dialect, 503, f"too many concurrent answers: at most {STREAMS_MAX}")
        try:
            asked = decode(seen.raw, RequestShape)
            reply = self._player.find_reply(lambda: asked.text)
        except UNREADABLE as exc:
            return problem(dialect, 400, f"invalid request: {exc}")
        if reply is not None:
            return ModelExchange(request, transport, seen, asked, reply, dialect)
        return problem(
            dialect,
            500,
            f"the script is exhausted: request {seen.n} matches no rule, no reply is left,"
            " and there is no `otherwise`",
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.Response(body=MODELS, content_type=JSON)

    async def _requests(self, request: web.Request) -> web.Response:
        return web.Response(body=self._history.as_json(), content_type=JSON)

    async def _release(self, request: web.Request) -> web.Response:
        n = request.query.get("n")
        try:
            if n is not None and not n.isdecimal():
                raise InvalidRequest("`n` must be the number of a request")
            self.release(None if n is None else int(n))
        except AppError as exc:
            return problem(OpenAiDialect, exc.status, exc.message)
        return web.json_response({"ok": True})

    async def _script(self, request: web.Request) -> web.Response:
        try:
            self.play(parse_script(await request.read()))
        except AppError as exc:
            return problem(OpenAiDialect, exc.status, exc.message)
        return web.json_response({"ok": True})

    async def _elsewhere(self, request: web.Request) -> web.Response:
        known = ", ".join(["GET /v1/models", *(f"POST {path}" for path in DIALECTS)])
        return problem(
            OpenAiDialect,
            404,
            f"unknown route {request.method} {request.path}; use {known}",
        )


@asynccontextmanager
async def open_model_server(
    script: Script = _EMPTY, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[ModelServer]:
    """Serve `script` in the block; raises `ListenFailed`. Port 0 selects a free one."""
    server = ModelServer(script)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.add_routes(server.routes())
    # The handler is cancelled when its client leaves, which is how that is detected.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        name = f"[{host}]" if ":" in host else host
        try:
            await site.start()
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise ListenFailed(f"http://{name}:{port}", reason, hint="choose another port") from exc
        server.url = f"http://{name}:{site.port}/v1"
        yield server
    finally:
        await server.close()
        await runner.cleanup()
        await asyncio.sleep(0)  # The tasks of idle connections end in this iteration of the loop.


# --- the server as a program

FILES = 4_096  # Twice the concurrent answers; the default of shells is 1,024.
DEFAULT = Script(
    otherwise=Reply(
        text="Hello! I am not a real model but a script: I always give the same answer, I cost"
        " nothing and I need no network. Use --script to give me a script of your own."
    )
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--script",
    "script_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON file with the script (docs/testing.md). Default: a greeting.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="TCP port; 0 selects a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
def model_server(script_file: Path | None, port: int, host: str) -> None:
    """Play a language-model provider from a script, until SIGTERM or SIGINT.

    Implements POST /v1/chat/completions of OpenAI and POST /v1/messages of Anthropic. Prints one
    line `listening URL` when it is ready. Requires no key: anyone who can reach the address can
    use it.

    \b
    GET  /culm/requests     list the requests so far
    POST /culm/release      continue held answers (?n=3: only one)
    POST /culm/script       replace the script

    \b
    Example:
      echo '{"replies": [{"text": "Four."}]}' > four.json
      python -m culm.testing.model_server --script four.json --port 8099
    """
    script = DEFAULT if script_file is None else read_script(script_file)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(script, host, port))


def main() -> None:
    """Run, and report errors with their hints."""
    try:
        model_server(prog_name="python -m culm.testing.model_server")
    except AppError as exc:
        click.echo(f"model server: {exc.message}", err=True)
        if exc.hint:
            click.echo(f"hint: {exc.hint}", err=True)
        sys.exit(1)


async def _serve(script: Script, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_model_server(script, host=host, port=port) as server:
        # Scripts wait for this line; it must not stay in a buffer.
        print(f"listening {server.url}", flush=True)  # noqa: T201
        await stop.wait()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
