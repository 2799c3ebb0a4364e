"""Typed requests to a culm server, by unix socket or TCP."""

import io
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest
from culm.ids import ClientId, Ids
from culm.wire.codec import clean, decode, encode
from culm.wire.state import Problem
from culm.wire.workspaces import Control, CreateWorkspace, VersionInfo, Workspace

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0


class Refused(Exception):
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

    def __init__(self, session: aiohttp.ClientSession, base: str, client_id: ClientId) -> None:
        self.id = client_id
        self._session = session
        self._base = base

    async def health(self) -> None:
        await self.request("GET", "/v1/health")

    async def version(self) -> VersionInfo:
        return await self.ask("GET", "/v1/version", VersionInfo)

    async def shut_down(self) -> None:
        """Ask the server to leave; refused (409) while it hosts anything."""
        await self.request("POST", "/v1/control", Control("shutdown", "culm"))

    async def retire(self) -> None:
        """Give up every claim of this client, for good."""
        await self.request("DELETE", f"/v1/clients/{self.id}")

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
        """Create the workspace of a directory, or join it."""
        wish = self._wish(path, data_dir, env or {})
        return RemoteWorkspace(self, wish, await self.create(wish))

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
        """Send and read whole; raises `Refused`, or `aiohttp.ClientError` without an answer.

        Without a `timeout_s` the answer may take as long as it takes.
        """
        data = None if body is None else io.BytesIO(encode(body))  # Leaves in pieces.
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        async with self._session.request(
            method, self._base + path, data=data, timeout=timeout
        ) as response:
            answer = await response.read()
            if response.status not in (200, 202):
                raise Refused(response.status, _problem(answer, response.reason or ""))
            return answer

    @asynccontextmanager
    async def stream(
        self, path: str, *, idle_timeout_s: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open a response that goes on; raises as `request` does."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_s
        )
        async with self._session.get(self._base + path, timeout=timeout) as response:
            if response.status != 200:
                answer = await response.read()
                raise Refused(response.status, _problem(answer, response.reason or ""))
            yield response


def _problem(answer: bytes, reason: str) -> Problem:
    try:
        return decode(answer, Problem)
    except msgspec.MsgspecError:
        return Problem(answer.decode(errors="replace").strip() or reason)


@asynccontextmanager
async def open_client(
    url: str, *, token: str | None = None, client_id: ClientId | None = None
) -> AsyncGenerator[Client]:
    """A client of the server at `unix:///path`, `tcp://host:port` or `https://host:port`."""
    scheme, _, address = url.partition("://")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    if scheme == "unix":
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address, limit=0)
        base = "http://culm.localhost"
    else:
        connector = aiohttp.TCPConnector(limit=0)
        base = f"{'http' if scheme == 'tcp' else scheme}://{address}"
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        yield Client(session, base, client_id or Ids().client())
