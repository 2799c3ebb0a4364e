"""Typed requests about one workspace.

Requests about its configuration are in `config.py`, about skills and servers in `extensions.py`;
both are attributes of the workspace.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlencode

import msgspec

from culm.client.config import RemoteConfig, RemoteProject
from culm.client.extensions import RemoteLsps, RemoteMcp, RemoteSkills
from culm.ids import MessageId, RunId, SessionId, WorkspaceId
from culm.wire.agents import (
    Agent,
    AgentDetails,
    ChangeBudget,
    LetterShown,
    ReplyToLetter,
    Ring,
    SaidToAgent,
    SayToAgent,
    SendLetter,
    StartAgent,
)
from culm.wire.asks import (
    Approve,
    Ask,
    AskState,
    CancelQuestions,
    Grant,
    PermissionGrant,
    PermissionRef,
    PermissionRequest,
    QuestionAnswer,
    QuestionRequest,
    QuestionResponse,
    Resolved,
    SetSkip,
    Skip,
)
from culm.wire.config import SelectedModel
from culm.wire.messages import File, Message, ReadFile, SaveSession, Session
from culm.wire.runs import (
    RUN_HEADER,
    AgentInfo,
    Attachment,
    CancelAnswer,
    EditPrompt,
    InitAgent,
    Limits,
    OrderQueue,
    Prompt,
    QueuedPrompt,
    Run,
    ShellOutput,
    ShellRequest,
    State,
    Stats,
)
from culm.wire.tools import ToolInfo
from culm.wire.workspaces import CreateWorkspace, CurrentSession, Process, Snapshot, Workspace

if TYPE_CHECKING:
    from culm.client.http import Client

AnyAsk = Ask[PermissionRequest] | Ask[QuestionRequest]
NEVER = 1  # The year of Go's zero time, which means that something never happened.


class RemoteWorkspace:
    """A workspace that this client has joined. Created by `Client.open_workspace`."""

    def __init__(self, client: "Client", request: CreateWorkspace, info: Workspace) -> None:
        self.client = client
        self.info = info
        self.config = RemoteConfig(self)
        self.project = RemoteProject(self)
        self.skills = RemoteSkills(self)
        self.lsps = RemoteLsps(self)
        self.mcp = RemoteMcp(self)
        self._request = request

    @property
    def id(self) -> WorkspaceId:
        return self.info.id

    def path(self, rest: str = "") -> str:
        return f"/v1/workspaces/{self.id}{rest}"

    async def rejoin(self) -> None:
        """Create or join it again, after the server restarted or the claim expired."""
        self.info = await self.client.create(self._request)

    async def refresh(self) -> Workspace:
        """Read its current state and configuration, and update `info`."""
        self.info = await self.client.ask("GET", self.path(), Workspace)
        return self.info

    async def release(self) -> None:
        await self.client.request("DELETE", self.path(f"?client_id={self.client.id}"))

    async def select_session(self, session_id: str) -> None:
        """Publish the session that this client displays; needs an open event stream."""
        path = self.path(f"/current-session?client_id={self.client.id}")
        await self.client.request("POST", path, CurrentSession(session_id))

    async def snapshot(self, *sessions: str) -> Snapshot[Message]:
        """The stored state, with the messages of `sessions`; "*" for all."""
        path = self.path(f"/snapshot?sessions={quote(','.join(sessions), safe='*,')}")
        return await self.client.ask("GET", path, Snapshot[Message])

    async def processes(self) -> list[Process]:
        return await self.client.ask("GET", self.path("/processes"), list[Process])

    async def tools(self) -> list[ToolInfo]:
        return await self.client.ask("GET", self.path("/tools"), list[ToolInfo])

    # --- sessions, their messages and files

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

    async def user_messages(self, session_id: str = "") -> list[Message]:
        """The messages of users in a session, or in all sessions, newest first."""
        path = self._session_path(SessionId(session_id)) if session_id else self.path()
        return await self.client.ask("GET", f"{path}/messages/user", list[Message])

    async def find_message(self, session_id: SessionId, message_id: MessageId) -> Message | None:
        found = [m for m in await self.messages(session_id) if m.id == message_id]
        return found[0] if found else None

    async def file_history(self, session_id: SessionId) -> list[File]:
        """All versions of all files that a session wrote, by version and then by age."""
        path = f"{self._session_path(session_id)}/history"
        return await self.client.ask("GET", path, list[File])

    async def read_files(self, session_id: SessionId) -> list[str]:
        """The files that a session has read, most recent first."""
        path = f"{self._session_path(session_id)}/filetracker/files"
        return await self.client.ask("GET", path, list[str])

    async def mark_read(self, session_id: SessionId, file: str) -> None:
        """Record that a session has read a file now."""
        await self.client.request(
            "POST", self.path("/filetracker/read"), ReadFile(session_id, file)
        )

    async def find_last_read(self, session_id: SessionId, file: str) -> datetime | None:
        """The time of the last read of a file by a session; None if there was none."""
        query = urlencode({"session_id": session_id, "path": file})
        path = self.path(f"/filetracker/lastread?{query}")
        found = await self.client.ask("GET", path, datetime)
        return None if found.year == NEVER else found

    # --- the agent, and its runs

    async def agent_info(self) -> AgentInfo:
        """The state of the agent (ready, busy) and its model."""
        return await self.client.ask("GET", self.path("/agent"), AgentInfo)

    async def init_agent(self, *, interactive: bool = False) -> None:
        """Initialize the agent. It is always ready, so this has no effect on runs."""
        await self.client.request("POST", self.path("/agent/init"), InitAgent(interactive))

    async def update_agent(self) -> None:
        """Make the agent reload models and tools, which it also does by itself."""
        await self.client.request("POST", self.path("/agent/update"))

    async def default_small_model(self, provider_id: str) -> SelectedModel:
        """The small model of a provider to suggest to a user."""
        path = self.path(f"/agent/default-small-model?provider_id={_quoted(provider_id)}")
        return await self.client.ask("GET", path, SelectedModel)

    async def agent_session(self, session_id: SessionId) -> Session:
        """A session, including the busy state of its agent."""
        return await self.client.ask("GET", self._agent_session_path(session_id), Session)

    async def prompt(
        self,
        session_id: SessionId,
        text: str,
        *,
        run_id: str = "",
        model: SelectedModel | None = None,
        interactive: bool = False,
        approve: Approve | None = None,
        attachments: Sequence[Attachment] = (),
        limits: Limits | None = None,
    ) -> RunId:
        """Send a prompt to the agent; once this returns, the run does not need this client.

        Returns the id of the run, which is `run_id` if one was passed. `model` is for this run
        only; the default is the model of the workspace. With a `run_id` and without `interactive`
        the run is headless: nobody has to be present, and `approve` answers asks. `limits` restrict
        the usage of the run where the settings of the server do not.
        """
        body = Prompt(
            session_id,
            text,
            run_id,
            list(attachments),
            limits or Limits(),
            model=model,
            interactive=interactive,
        )
        body.approve = None if approve is None else msgspec.to_builtins(approve)
        headers, _ = await self.client.exchange("POST", self.path("/agent"), body)
        return RunId(headers.get(RUN_HEADER.lower(), run_id))

    async def steer(self, session_id: SessionId, text: str) -> Run:
        """Send a message to the live run of a session, which reads it before its next step."""
        path = self._agent_session_path(session_id, "/steer")
        return await self.client.ask("POST", path, Run, EditPrompt(text))

    async def summarize(self, session_id: SessionId) -> None:
        """Replace the model's context of a session by a summary, and wait for it.

        The caller bounds the wait; canceling the wait does not stop the run.
        """
        path = self._agent_session_path(session_id, "/summarize")
        await self.client.request("POST", path, timeout_s=None)

    async def compact(self, session_id: SessionId) -> None:
        """Summarize as `summarize` does, without waiting for the run."""
        await self.client.request("POST", self._agent_session_path(session_id, "/compact"))

    async def shell(self, session_id: SessionId, command: str, *, width: int = 0) -> ShellOutput:
        """Run a command of the user and wait for its end; canceling the wait kills it.

        `width` is the width of the terminal that the command sees.
        """
        path = self._agent_session_path(session_id, "/shell")
        body = ShellRequest(command, term_width=width)
        return await self.client.ask("POST", path, ShellOutput, body, timeout_s=None)

    async def cancel(self, session_id: SessionId) -> None:
        """Cancel every live run of the session."""
        await self.client.request("POST", self._agent_session_path(session_id, "/cancel"))

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        """Cancel one run, and return the result."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/cancel", CancelAnswer)

    async def run(self, run_id: str) -> Run:
        return await self.client.ask("GET", self._run_path(run_id), Run)

    async def runs(self, session_id: str = "", state: State | Literal[""] = "") -> list[Run]:
        """The runs, latest first; optionally of one session or in one state."""
        query = urlencode({"session": session_id, "state": state})
        return await self.client.ask("GET", self.path(f"/runs?{query}"), list[Run])

    async def edit_run(self, run_id: str, text: str) -> Run:
        """Change the prompt of a queued run."""
        return await self.client.ask("PUT", self._run_path(run_id), Run, EditPrompt(text))

    async def start_run(self, run_id: str) -> Run:
        """Start a held run."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/start", Run)

    async def drop_run(self, run_id: str) -> Run:
        """End a held or queued run before it starts."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/drop", Run)

    # --- the queue of a session

    async def queue(self, session_id: SessionId) -> list[QueuedPrompt]:
        """The queued runs in order, each with its whole prompt."""
        path = self._agent_session_path(session_id, "/queue")
        return await self.client.ask("GET", path, list[QueuedPrompt])

    async def order_queue(
        self, session_id: SessionId, run_ids: Sequence[RunId]
    ) -> list[QueuedPrompt]:
        """Reorder the queued runs; all of them must be listed."""
        path, body = self._agent_session_path(session_id, "/queue"), OrderQueue(list(run_ids))
        return await self.client.ask("PUT", path, list[QueuedPrompt], body)

    async def clear_queue(self, session_id: SessionId) -> None:
        """Remove all queued prompts."""
        await self.client.request("POST", self._agent_session_path(session_id, "/prompts/clear"))

    async def queued_prompts(self, session_id: SessionId) -> list[str]:
        """The prompts of `queue`, without the runs."""
        return await self.client.ask(
            "GET", self._agent_session_path(session_id, "/prompts/list"), list[str]
        )

    async def count_queued(self, session_id: SessionId) -> int:
        return await self.client.ask(
            "GET", self._agent_session_path(session_id, "/prompts/queued"), int
        )

    async def stats(self, days: int = 0, utc_offset_s: int = 0) -> Stats:
        """The usage of runs in the last `days`, including today; 0 means all time."""
        query = urlencode({"days": days, "utc_offset_s": utc_offset_s})
        return await self.client.ask("GET", self.path(f"/stats?{query}"), Stats)

    # --- agents, and letters to them

    async def agents(self, below: str = "") -> list[Agent]:
        """All agents, or those below one, in the order of their start."""
        path = self.path(f"/agents?below={_quoted(below)}")
        return await self.client.ask("GET", path, list[Agent])

    async def agent(self, agent_id: str) -> AgentDetails:
        return await self.client.ask("GET", self._agent_path(agent_id), AgentDetails)

    async def start_agent(self, request: StartAgent) -> Agent:
        """Start an agent outside a conversation."""
        return await self.client.ask("POST", self.path("/agents"), Agent, request)

    async def steer_agent(self, agent_id: str, text: str) -> SaidToAgent:
        """Steer a running agent, or give an ended one a new assignment."""
        path = f"{self._agent_path(agent_id)}/message"
        return await self.client.ask("POST", path, SaidToAgent, SayToAgent(text))

    async def cancel_agent(self, agent_id: str) -> Agent:
        """Cancel an agent and all agents below it."""
        return await self.client.ask("POST", f"{self._agent_path(agent_id)}/cancel", Agent)

    async def set_budget(self, agent_id: str, budget: ChangeBudget) -> Agent:
        """Change the limits that are set in `budget`."""
        path = f"{self._agent_path(agent_id)}/budget"
        return await self.client.ask("POST", path, Agent, budget)

    async def send_letter(self, letter: SendLetter) -> LetterShown:
        return await self.client.ask("POST", self.path("/mail"), LetterShown, letter)

    async def reply_to_letter(self, letter_id: str, text: str, *, sender: str = "") -> LetterShown:
        """Answer a letter, by default as the user; the first reply counts."""
        path = f"{self._letter_path(letter_id)}/reply"
        return await self.client.ask("POST", path, LetterShown, ReplyToLetter(text, sender))

    async def letter(self, letter_id: str) -> LetterShown:
        return await self.client.ask("GET", self._letter_path(letter_id), LetterShown)

    async def letters(self, agent_id: str = "") -> list[LetterShown]:
        path = self.path(f"/mail?agent={_quoted(agent_id)}")
        return await self.client.ask("GET", path, list[LetterShown])

    async def ring(self, agent_id: str = "") -> None:
        """Make the server check a mailbox, or all: letters arrived that it did not deliver."""
        await self.client.request("POST", self.path("/mail/ring"), Ring(agent_id))

    # --- asks and questions

    async def asks(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[PermissionRequest]]:
        """The permission requests in a state, latest first."""
        query = urlencode({"session": session_id, "state": state})
        path = self.path(f"/permissions/asks?{query}")
        return await self.client.ask("GET", path, list[Ask[PermissionRequest]])

    async def answer(self, ask: Ask[PermissionRequest], action: str) -> bool:
        """Answer the request as it was shown; return False if another client was faster.

        `action` is `allow`, `allow_session`, `allow_workspace` or `deny`.
        """
        body = PermissionGrant(PermissionRef(ask.request.id), action, ask.digest)
        return await self._resolve("/permissions/grant", body)

    async def grants(self) -> list[Grant]:
        """The permissions granted for more than one call."""
        return await self.client.ask("GET", self.path("/permissions/grants"), list[Grant])

    async def remove_grant(self, grant_id: str) -> None:
        """Revoke a grant; it allows no further calls."""
        path = self.path(f"/permissions/grants/{_quoted(grant_id)}")
        await self.client.request("DELETE", path)

    async def is_skipped(self, session_id: str = "") -> bool:
        """Return True if calls run without asking, in a session or in all."""
        path = self.path(f"/permissions/skip?session_id={_quoted(session_id)}")
        return (await self.client.ask("GET", path, Skip)).skip

    async def set_skip(self, *, on: bool, session_id: str = "") -> None:
        """Turn running without asking on or off, in a session or in all."""
        path = self.path(f"/permissions/skip?client_id={self.client.id}")
        await self.client.request("POST", path, SetSkip(on, session_id))

    async def questions(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[QuestionRequest]]:
        """The batches of questions in a state, latest first."""
        path = self.path(f"/questions?{urlencode({'session': session_id, 'state': state})}")
        return await self.client.ask("GET", path, list[Ask[QuestionRequest]])

    async def open_asks(self, session_id: str = "") -> list[AnyAsk]:
        """Open permissions, then open questions, the latest of each first."""
        return [*await self.asks(session_id), *await self.questions(session_id)]

    async def answer_questions(self, batch_id: str, responses: list[QuestionResponse]) -> bool:
        """Answer a batch of questions; return False if another client was faster."""
        return await self._resolve("/questions/answer", QuestionAnswer(batch_id, responses))

    async def cancel_questions(self, batch_id: str) -> bool:
        """Decline to answer a batch; return False if another client was faster."""
        return await self._resolve("/questions/cancel", CancelQuestions(batch_id))

    async def _resolve(self, path: str, body: msgspec.Struct) -> bool:
        path = self.path(f"{path}?client_id={self.client.id}")
        return (await self.client.ask("POST", path, Resolved, body)).resolved

    def _agent_path(self, agent_id: str) -> str:
        return self.path(f"/agents/{_quoted(agent_id)}")

    def _letter_path(self, letter_id: str) -> str:
        return self.path(f"/mail/letters/{_quoted(letter_id)}")

    def _run_path(self, run_id: str) -> str:
        return self.path(f"/runs/{_quoted(run_id)}")

    def _agent_session_path(self, session_id: SessionId, rest: str = "") -> str:
        """The path of the agent's part of a session: messages to it and its queue."""
        return self.path(f"/agent/sessions/{_quoted(session_id)}{rest}")

    def _session_path(self, session_id: SessionId) -> str:
        return self.path(f"/sessions/{_quoted(session_id)}")


def _quoted(name: str) -> str:
    """Quote a name for a URL; text that is not UTF-8 cannot match anything."""
    return quote(name, safe="", errors="replace")
