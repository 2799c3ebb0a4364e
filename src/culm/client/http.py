"""Typed requests to a culm server, by unix socket or TCP."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from culm import __version__
from culm.client.launch import ServerStarter
from culm.client.transport import REQUEST_TIMEOUT_S, HttpResponse, HttpTransport, parse_address
from culm.client.workspace import RemoteWorkspace
from culm.errors import AppError, InvalidRequest
from culm.ids import ClientId, Ids
from culm.wire.agents import RingProject
from culm.wire.codec import clean, decode, encodable, encode
from culm.wire.workspaces import Control, CreateWorkspace, Problem, VersionInfo, Workspace

T = TypeVar("T")

OPEN_S = 15.0  # An exiting server is replaced by a new one within this time.
OPEN_AGAIN_S = 0.1
LEAVE_S = 1.0


class RequestRefused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(f"{problem.message} ({status})")
        self.status = status
        self.code = problem.code
        self.message = problem.message
        self.hint = problem.hint

    @property
    def may_pass(self) -> bool:
        """True if the same request can succeed later, when the server has started or has room."""
        return (
            self.status >= 500
            or self.status == 429
            or self.code in ("data_locked", "workspace_closing")
        )


class Client:
    """One client of a server, with an id. Created by `open_client`."""

    def __init__(
        self, transport: HttpTransport, client_id: ClientId, starter: ServerStarter | None = None
    ) -> None:
        self.id = client_id
        self._transport = transport
        self._starter = starter  # None if this client never starts the server.

    async def health(self) -> None:
        await self.request("GET", "/v1/health")

    async def version(self) -> VersionInfo:
        return await self.ask("GET", "/v1/version", VersionInfo)

    async def shut_down(self, version: str = "") -> None:
        """Ask the server to exit; refused (409) if it is busy or has another version."""
        await self.request("POST", "/v1/control", Control("shutdown", "culm", version))

    async def revive(self) -> None:
        """Restart the user's server if it has died. Does not raise: the next request will fail."""
        if self._starter is not None:
            with suppress(AppError):
                await self._starter.revive()

    async def retire(self) -> None:
        """Give up all claims of this client permanently."""
        await self.request("DELETE", f"/v1/clients/{self.id}")

    async def leave(self) -> None:
        """Retire, but ignore a slow or failed request: a server that is gone has no claims."""
        with suppress(RequestRefused, OSError):
            async with asyncio.timeout(LEAVE_S):
                await self.retire()

    async def config(self) -> dict[str, str]:
        """The configuration of all workspaces: empty, because each workspace has its own."""
        return await self.ask("GET", "/v1/config", dict[str, str])

    async def ring(self, directory: str, agent_id: str = "") -> None:
        """Make the server check one mailbox of a project, or all of them."""
        await self.request("POST", "/v1/mail/ring", RingProject(directory, agent_id))

    async def workspaces(self) -> list[Workspace]:
        return await self.ask("GET", "/v1/workspaces", list[Workspace])

    async def find_workspace(self, directory: Path) -> RemoteWorkspace | None:
        """The open workspace of a resolved directory, without joining it; None if there is none."""
        for info in await self.workspaces():
            if info.path == str(directory):
                return RemoteWorkspace(self, self._create_request(directory, "", {}), info)
        return None

    async def open_workspace(
        self,
        path: str | os.PathLike[str],
        *,
        data_dir: str = "",
        env: Mapping[str, str] | None = None,
    ) -> RemoteWorkspace:
        """Create the workspace of a directory, or join it.

        `env` is the environment of its models and tools; the default is that of `connect`, or else
        an empty one. If the user's own server is just exiting, waits for that and restarts it.
        """
        environ = self._starter.env if env is None and self._starter is not None else env
        request = self._create_request(path, data_dir, environ or {})
        if self._starter is None:
            return RemoteWorkspace(self, request, await self.create(request))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + OPEN_S
        while True:
            try:
                return RemoteWorkspace(self, request, await self.create(request))
            except RequestRefused as exc:
                if not exc.may_pass or loop.time() > end_s:
                    raise
            except OSError:
                if not self._starter.wanted.can_start or loop.time() > end_s:
                    raise
            await asyncio.sleep(OPEN_AGAIN_S)
            await self._starter.ensure()

    def _create_request(
        self, path: str | os.PathLike[str], data_dir: str, env: Mapping[str, str]
    ) -> CreateWorkspace:
        location = str(Path(path).absolute())  # The server resolves links and `..`.
        if location != clean(location):
            raise InvalidRequest(f"{clean(location)} cannot be a workspace: its path is not UTF-8")
        return CreateWorkspace(
            path=location,
            client_id=self.id,
            data_dir=data_dir,
            env=[f"{name}={value}" for name, value in env.items()],
        )

    async def create(self, request: CreateWorkspace) -> Workspace:
        return await self.ask("POST", "/v1/workspaces", Workspace, request)

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> T:
        return decode(await self.request(method, path, body, timeout_s=timeout_s), kind)

    async def request(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> bytes:
        """Return the response body; raises `RequestRefused`, or `OSError` without a response."""
        return (await self.exchange(method, path, body, timeout_s=timeout_s))[1]

    async def exchange(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> tuple[Mapping[str, str], bytes]:
        """Request as `request` does; also return the headers, with names in lower case."""
        data = b"" if body is None else _encoded(body)
        async with asyncio.timeout(timeout_s), self._transport.open(method, path, data) as response:
            await _check(response)
            return response.headers, await response.read()

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncGenerator[HttpResponse]:
        """Open a response of unlimited length; raises the errors of `request`."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await stack.enter_async_context(self._transport.open("GET", path))
                await _check(response)
            yield response


def _encoded(body: msgspec.Struct) -> bytes:
    """Encode a body. Replaces text that is not UTF-8, as in file names or the environment."""
    try:
        return encode(body)
    except UnicodeEncodeError:
        return encode(encodable(body))


async def _check(response: HttpResponse) -> None:
    """Raise `RequestRefused` unless the status is a success."""
    if response.status not in (200, 202):
        raise RequestRefused(response.status, _problem(await response.read(), response.reason))


def _problem(body: bytes, reason: str) -> Problem:
    try:
        return decode(body, Problem)
    except msgspec.MsgspecError:
        return Problem(body.decode(errors="replace").strip() or reason)


@asynccontextmanager
async def open_client(
    url: str,
    *,
    token: str | None = None,
    client_id: ClientId | None = None,
    starter: ServerStarter | None = None,
) -> AsyncGenerator[Client]:
    """Yield a client of the server at `unix:///path`, `tcp://host:port` or `https://host:port`."""
    headers = {"User-Agent": f"culm/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    transport = HttpTransport(parse_address(url), headers)
    yield Client(transport, client_id or Ids().client(), starter)
