"""Typed requests to a culm server, by unix socket or TCP."""

import io
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from culm.errors import InvalidRequest
from culm.ids import ClientId, Ids, MessageId, SessionId, WorkspaceId
from culm.wire.agent import Prompt
from culm.wire.agents import (
    Agent,
    AgentDetails,
    ChangeBudget,
    LetterShown,
    SaidToAgent,
    SayToAgent,
    SendLetter,
    StartAgent,
)
from culm.wire.asks import (
    Ask,
    CancelQuestions,
    PermissionGrant,
    PermissionRef,
    PermissionRequest,
    QuestionAnswer,
    QuestionRequest,
    QuestionResponse,
    Resolved,
)
from culm.wire.codec import clean, decode, encode
from culm.wire.config import SelectedModel
from culm.wire.messages import Message
from culm.wire.processes import Process
from culm.wire.rules import Approve
from culm.wire.runs import CancelAnswer, Run
from culm.wire.sessions import SaveSession, Session
from culm.wire.state import Problem, Snapshot
from culm.wire.workspaces import Control, CreateWorkspace, CurrentSession, VersionInfo, Workspace

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

    async def find_workspace(self, directory: Path) -> "RemoteWorkspace | None":
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
    ) -> "RemoteWorkspace":
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
        self, method: str, path: str, kind: type[T], body: msgspec.Struct | None = None
    ) -> T:
        return decode(await self.request(method, path, body), kind)

    async def request(self, method: str, path: str, body: msgspec.Struct | None = None) -> bytes:
        """Send and read whole; raises `Refused`, or `aiohttp.ClientError` without an answer."""
        data = None if body is None else io.BytesIO(encode(body))  # Leaves in pieces.
        async with self._session.request(method, self._base + path, data=data) as response:
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


class RemoteWorkspace:
    """A workspace this client has joined. Made by `Client.open_workspace`."""

    def __init__(self, client: Client, wish: CreateWorkspace, info: Workspace) -> None:
        self.client = client
        self.info = info
        self._wish = wish

    @property
    def id(self) -> WorkspaceId:
        return self.info.id

    def path(self, rest: str = "") -> str:
        return f"/v1/workspaces/{self.id}{rest}"

    async def rejoin(self) -> None:
        """Create it again as at first, after the server or the claim went away."""
        self.info = await self.client.create(self._wish)

    async def release(self) -> None:
        await self.client.request("DELETE", self.path(f"?client_id={self.client.id}"))

    async def look_at(self, session_id: str) -> None:
        """Tell the others which session this client shows; needs an open event stream."""
        path = self.path(f"/current-session?client_id={self.client.id}")
        await self.client.request("POST", path, CurrentSession(session_id))

    async def snapshot(self, *sessions: str) -> Snapshot[Message]:
        """The stored state, with the messages of `sessions`; "*" for all."""
        path = self.path(f"/snapshot?sessions={quote(','.join(sessions), safe='*,')}")
        return await self.client.ask("GET", path, Snapshot[Message])

    async def sessions(self) -> list[Session]:
        return await self.client.ask("GET", self.path("/sessions"), list[Session])

    async def create_session(self, title: str) -> Session:
        return await self.client.ask("POST", self.path("/sessions"), Session, SaveSession(title))

    async def session(self, session_id: SessionId) -> Session:
        return await self.client.ask("GET", self._session_path(session_id), Session)

    async def rename_session(self, session_id: SessionId, title: str) -> Session:
        path = self._session_path(session_id)
        return await self.client.ask("PUT", path, Session, SaveSession(title))

    async def delete_session(self, session_id: SessionId) -> None:
        await self.client.request("DELETE", self._session_path(session_id))

    async def messages(self, session_id: SessionId) -> list[Message]:
        path = f"{self._session_path(session_id)}/messages"
        return await self.client.ask("GET", path, list[Message])

    async def find_message(self, session_id: SessionId, message_id: MessageId) -> Message | None:
        found = [m for m in await self.messages(session_id) if m.id == message_id]
        return found[0] if found else None

    async def prompt(
        self,
        session_id: SessionId,
        text: str,
        *,
        run_id: str = "",
        model: SelectedModel | None = None,
        interactive: bool = False,
        approve: Approve | None = None,
    ) -> None:
        """Ask the agent something; when this returns it will be done, whoever stays.

        `model` is for this run only; without one it is the workspace's. With a `run_id` and not
        `interactive` nobody need be there to be asked for permission; `approve` answers instead.
        """
        body = Prompt(session_id, text, run_id, model=model, interactive=interactive)
        body.approve = None if approve is None else msgspec.to_builtins(approve)
        await self.client.request("POST", self.path("/agent"), body)

    async def cancel(self, session_id: SessionId) -> None:
        """Stop every run of the session that is live now."""
        path = self.path(f"/agent/sessions/{quote(session_id, safe='')}/cancel")
        await self.client.request("POST", path)

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        """Stop one run, and hear what came of it."""
        path = self.path(f"/runs/{quote(run_id, safe='')}/cancel")
        return await self.client.ask("POST", path, CancelAnswer)

    async def run(self, run_id: str) -> Run:
        return await self.client.ask("GET", self.path(f"/runs/{quote(run_id, safe='')}"), Run)

    async def processes(self) -> list[Process]:
        return await self.client.ask("GET", self.path("/processes"), list[Process])

    # --- agents, and letters to them

    async def agents(self, below: str = "") -> list[Agent]:
        """All agents, or those below one, in the order they were started."""
        path = self.path(f"/agents?below={quote(below, safe='')}")
        return await self.client.ask("GET", path, list[Agent])

    async def agent(self, agent_id: str) -> AgentDetails:
        return await self.client.ask("GET", self._agent_path(agent_id), AgentDetails)

    async def start_agent(self, wish: StartAgent) -> Agent:
        """Start one outside a conversation."""
        return await self.client.ask("POST", self.path("/agents"), Agent, wish)

    async def say_to_agent(self, agent_id: str, text: str) -> SaidToAgent:
        """Steer one that works, or give one that has ended more to do."""
        path = f"{self._agent_path(agent_id)}/message"
        return await self.client.ask("POST", path, SaidToAgent, SayToAgent(text))

    async def cancel_agent(self, agent_id: str) -> Agent:
        """Stop an agent and all below it."""
        return await self.client.ask("POST", f"{self._agent_path(agent_id)}/cancel", Agent)

    async def set_budget(self, agent_id: str, budget: ChangeBudget) -> Agent:
        """Change the limits that are named."""
        path = f"{self._agent_path(agent_id)}/budget"
        return await self.client.ask("POST", path, Agent, budget)

    async def send_letter(self, letter: SendLetter) -> LetterShown:
        return await self.client.ask("POST", self.path("/mail"), LetterShown, letter)

    async def letter(self, letter_id: str) -> LetterShown:
        path = self.path(f"/mail/letters/{quote(letter_id, safe='')}")
        return await self.client.ask("GET", path, LetterShown)

    async def letters(self, agent_id: str = "") -> list[LetterShown]:
        path = self.path(f"/mail?agent={quote(agent_id, safe='')}")
        return await self.client.ask("GET", path, list[LetterShown])

    # --- what people are asked

    async def asks(self, session_id: str = "") -> list[Ask[PermissionRequest]]:
        """The permission requests that are open, the latest first."""
        path = self.path(f"/permissions/asks?session={quote(session_id, safe='')}")
        return await self.client.ask("GET", path, list[Ask[PermissionRequest]])

    async def answer(self, ask: Ask[PermissionRequest], action: str) -> bool:
        """Answer what was shown, and nothing else; False if somebody was faster.

        `action` is `allow`, `allow_session`, `allow_workspace` or `deny`.
        """
        body = PermissionGrant(PermissionRef(ask.request.id), action, ask.digest)
        return await self._resolve("/permissions/grant", body)

    async def questions(self, session_id: str = "") -> list[Ask[QuestionRequest]]:
        """The batches of questions that are open, the latest first."""
        path = self.path(f"/questions?session={quote(session_id, safe='')}")
        return await self.client.ask("GET", path, list[Ask[QuestionRequest]])

    async def answer_questions(self, batch_id: str, responses: list[QuestionResponse]) -> bool:
        """Answer a batch of questions; False if somebody was faster."""
        return await self._resolve("/questions/answer", QuestionAnswer(batch_id, responses))

    async def cancel_questions(self, batch_id: str) -> bool:
        """Decline to answer them; False if somebody was faster."""
        return await self._resolve("/questions/cancel", CancelQuestions(batch_id))

    async def _resolve(self, path: str, body: msgspec.Struct) -> bool:
        path = self.path(f"{path}?client_id={self.client.id}")
        return (await self.client.ask("POST", path, Resolved, body)).resolved

    def _agent_path(self, agent_id: str) -> str:
        return self.path(f"/agents/{quote(agent_id, safe='')}")

    def _session_path(self, session_id: SessionId) -> str:
        return self.path(f"/sessions/{quote(session_id, safe='')}")


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
