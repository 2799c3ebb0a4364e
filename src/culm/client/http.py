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
from culm.client.transport import HttpResponse, HttpTransport, parse_address
from culm.client.workspace import RemoteWorkspace
from culm.errors import AppError, InvalidRequest
from culm.ids import ClientId, Ids
from culm.wire.agents import RingProject
from culm.wire.codec import clean, decode, encodable, encode
from culm.wire.state import Problem
from culm.wire.workspaces import Control, CreateWorkspace, VersionInfo, Workspace

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0
OPEN_S = 15.0  # A server that is leaving is replaced by a new one within this.
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
        """Whether the same request can succeed later: a server that starts, closes or is full."""
        return (
            self.status >= 500
            or self.status == 429
            or self.code in ("data_locked", "workspace_closing")
        )


class Client:
    """One client process, as the server knows it. Made by `open_client`."""

    def __init__(
        self, transport: HttpTransport, client_id: ClientId, starter: ServerStarter | None = None
    ) -> None:
        self.id = client_id
        self._transport = transport
        self._starter = starter  # None if the server is somebody else's to start.

    async def health(self) -> None:
        await self.request("GET", "/v1/health")

    async def version(self) -> VersionInfo:
        return await self.ask("GET", "/v1/version", VersionInfo)

    async def shut_down(self, version: str = "") -> None:
        """Ask the server to leave; refused (409) while it hosts anything, or is another version."""
        await self.request("POST", "/v1/control", Control("shutdown", "culm", version))

    async def revive(self) -> None:
        """Start a server of ours again that has died; whether that works is seen by asking it."""
        if self._starter is not None:
            with suppress(AppError):
                await self._starter.revive()

    async def retire(self) -> None:
        """Give up every claim of this client, for good."""
        await self.request("DELETE", f"/v1/clients/{self.id}")

    async def leave(self) -> None:
        """As `retire`, in a moment or not at all: a server that is gone holds nothing for us."""
        with suppress(RequestRefused, OSError):
            async with asyncio.timeout(LEAVE_S):
                await self.retire()

    async def config(self) -> dict[str, str]:
        """What is configured for all workspaces: nothing, each has its own."""
        return await self.ask("GET", "/v1/config", dict[str, str])

    async def ring(self, directory: str, agent_id: str = "") -> None:
        """Have a mailbox of any project looked into that the server knows, or all of them."""
        await self.request("POST", "/v1/mail/ring", RingProject(directory, agent_id))

    async def workspaces(self) -> list[Workspace]:
        return await self.ask("GET", "/v1/workspaces", list[Workspace])

    async def find_workspace(self, directory: Path) -> RemoteWorkspace | None:
        """The workspace of a real directory, if the server has it; it is not joined."""
        for info in await self.workspaces():
            if info.path == str(directory):
                return RemoteWorkspace(self, self._wish(directory, "", {}), info)
        return None

    async def open_workspace(
        self,
        path: str | os.PathLike[str],
        *,
        data_dir: str = "",
        env: Mapping[str, str] | None = None,
    ) -> RemoteWorkspace:
        """Create the workspace of a directory, or join it.

        `env` is what its models and tools find; by default that of `connect`, else nothing. A
        server of ours that is just leaving is waited for, and started again.
        """
        around = self._starter.env if env is None and self._starter is not None else env
        wish = self._wish(path, data_dir, around or {})
        if self._starter is None:
            return RemoteWorkspace(self, wish, await self.create(wish))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + OPEN_S
        while True:
            try:
                return RemoteWorkspace(self, wish, await self.create(wish))
            except RequestRefused as exc:
                if not exc.may_pass or loop.time() > end_s:
                    raise
            except OSError:
                if not self._starter.wanted.can_start or loop.time() > end_s:
                    raise
            await asyncio.sleep(OPEN_AGAIN_S)
            await self._starter.ensure()

    def _wish(
        self, path: str | os.PathLike[str], data_dir: str, env: Mapping[str, str]
    ) -> CreateWorkspace:
        place = str(Path(path).absolute())  # Links and `..` are the server's to resolve.
        if place != clean(place):
            raise InvalidRequest(f"{clean(place)} cannot be a workspace: its path is not UTF-8")
        return CreateWorkspace(
            path=place,
            client_id=self.id,
            data_dir=data_dir,
            env=[f"{name}={value}" for name, value in env.items()],
        )

    async def create(self, wish: CreateWorkspace) -> Workspace:
        return await self.ask("POST", "/v1/workspaces", Workspace, wish)

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
        """Send and read whole; raises `Refused`, or `OSError` without an answer."""
        return (await self.exchange(method, path, body, timeout_s=timeout_s))[1]

    async def exchange(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> tuple[Mapping[str, str], bytes]:
        """As `request`, with the answer's headers, whose names are in small letters."""
        data = b"" if body is None else _encoded(body)
        async with asyncio.timeout(timeout_s), self._transport.open(method, path, data) as answer:
            await _check(answer)
            return answer.headers, await answer.read()

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncGenerator[HttpResponse]:
        """Open a response that goes on; raises as `request` does."""
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await stack.enter_async_context(self._transport.open("GET", path))
                await _check(answer)
            yield answer


def _encoded(body: msgspec.Struct) -> bytes:
    """What an environment, a file's name or an argument may have that is not UTF-8 is replaced."""
    try:
        return encode(body)
    except UnicodeEncodeError:
        return encode(encodable(body))


async def _check(answer: HttpResponse) -> None:
    """Raises `Refused` if it is one."""
    if answer.status not in (200, 202):
        raise RequestRefused(answer.status, _problem(await answer.read(), answer.reason))


def _problem(answer: bytes, reason: str) -> Problem:
    try:
        return decode(answer, Problem)
    except msgspec.MsgspecError:
        return Problem(answer.decode(errors="replace").strip() or reason)


@asynccontextmanager
async def open_client(
    url: str,
    *,
    token: str | None = None,
    client_id: ClientId | None = None,
    starter: ServerStarter | None = None,
) -> AsyncGenerator[Client]:
    """A client of the server at `unix:///path`, `tcp://host:port` or `https://host:port`."""
    headers = {"User-Agent": f"culm/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    transport = HttpTransport(parse_address(url), headers)
    yield Client(transport, client_id or Ids().client(), starter)
