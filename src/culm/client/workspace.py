"""What a client does in one workspace: every request about it, typed."""

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import msgspec

from culm.ids import MessageId, SessionId, WorkspaceId
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
from culm.wire.config import SelectedModel
from culm.wire.messages import Message
from culm.wire.processes import Process
from culm.wire.rules import Approve
from culm.wire.runs import CancelAnswer, EditPrompt, Run
from culm.wire.sessions import SaveSession, Session
from culm.wire.state import Snapshot
from culm.wire.workspaces import CreateWorkspace, CurrentSession, Workspace

if TYPE_CHECKING:
    from culm.client.http import Client


class RemoteWorkspace:
    """A workspace this client has joined. Made by `Client.open_workspace`."""

    def __init__(self, client: "Client", wish: CreateWorkspace, info: Workspace) -> None:
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

    async def steer(self, session_id: SessionId, text: str) -> Run:
        """Say something to what works in the session; refused (409) if nothing does."""
        path = self.path(f"/agent/sessions/{quote(session_id, safe='')}/steer")
        return await self.client.ask("POST", path, Run, EditPrompt(text))

    async def runs(self, session_id: str = "", state: str = "") -> list[Run]:
        """Runs, the latest first."""
        query = urlencode({"session": session_id, "state": state})
        return await self.client.ask("GET", self.path(f"/runs?{query}"), list[Run])

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
