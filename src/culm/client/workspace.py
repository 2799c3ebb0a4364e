"""What a client does in one workspace: every request about it, typed.

Here is what a face needs every day. What is configured is in `config.py`, what else there may be
in a workspace in `extensions.py`; each is an attribute of it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlencode

import msgspec

from culm.client.config import RemoteConfig, RemoteProject
from culm.client.extensions import RemoteLsps, RemoteMcp, RemoteSkills
from culm.ids import MessageId, RunId, SessionId, WorkspaceId
from culm.wire.agent import (
    RUN_HEADER,
    AgentInfo,
    Attachment,
    InitAgent,
    Prompt,
    ShellCommand,
    ShellOutput,
)
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
from culm.wire.files import File, ReadFile
from culm.wire.messages import Message
from culm.wire.processes import Process
from culm.wire.rules import Approve
from culm.wire.runs import CancelAnswer, EditPrompt, Limits, OrderQueue, QueuedPrompt, Run, State
from culm.wire.sessions import SaveSession, Session
from culm.wire.state import Snapshot
from culm.wire.stats import Stats
from culm.wire.workspaces import CreateWorkspace, CurrentSession, Workspace

if TYPE_CHECKING:
    from culm.client.http import Client

NEVER = 1  # The year in which a server says that something happened that never did.


class RemoteWorkspace:
    """A workspace this client has joined. Made by `Client.open_workspace`."""

    def __init__(self, client: "Client", wish: CreateWorkspace, info: Workspace) -> None:
        self.client = client
        self.info = info
        self.config = RemoteConfig(self)
        self.project = RemoteProject(self)
        self.skills = RemoteSkills(self)
        self.lsps = RemoteLsps(self)
        self.mcp = RemoteMcp(self)
        self._wish = wish

    @property
    def id(self) -> WorkspaceId:
        return self.info.id

    def path(self, rest: str = "") -> str:
        return f"/v1/workspaces/{self.id}{rest}"

    async def rejoin(self) -> None:
        """Create it again as at first, after the server or the claim went away."""
        self.info = await self.client.create(self._wish)

    async def refresh(self) -> Workspace:
        """Read it again, with its configuration; `info` is then as it stands now."""
        self.info = await self.client.ask("GET", self.path(), Workspace)
        return self.info

    async def release(self) -> None:
        await self.client.request("DELETE", self.path(f"?client_id={self.client.id}"))

    async def select_session(self, session_id: str) -> None:
        """Tell the others which session this client shows; needs an open event stream."""
        path = self.path(f"/current-session?client_id={self.client.id}")
        await self.client.request("POST", path, CurrentSession(session_id))

    async def snapshot(self, *sessions: str) -> Snapshot[Message]:
        """The stored state, with the messages of `sessions`; "*" for all."""
        path = self.path(f"/snapshot?sessions={quote(','.join(sessions), safe='*,')}")
        return await self.client.ask("GET", path, Snapshot[Message])

    async def processes(self) -> list[Process]:
        return await self.client.ask("GET", self.path("/processes"), list[Process])

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
        """What users said in a session, or in all of them, the newest first."""
        place = self._session_path(SessionId(session_id)) if session_id else self.path()
        return await self.client.ask("GET", f"{place}/messages/user", list[Message])

    async def find_message(self, session_id: SessionId, message_id: MessageId) -> Message | None:
        found = [m for m in await self.messages(session_id) if m.id == message_id]
        return found[0] if found else None

    async def file_history(self, session_id: SessionId) -> list[File]:
        """Every version of every file a session wrote, by version and then by age."""
        path = f"{self._session_path(session_id)}/history"
        return await self.client.ask("GET", path, list[File])

    async def read_files(self, session_id: SessionId) -> list[str]:
        """The files a session has read, the last read first."""
        path = f"{self._session_path(session_id)}/filetracker/files"
        return await self.client.ask("GET", path, list[str])

    async def mark_read(self, session_id: SessionId, file: str) -> None:
        """Note that a session has read a file now."""
        await self.client.request(
            "POST", self.path("/filetracker/read"), ReadFile(session_id, file)
        )

    async def find_last_read(self, session_id: SessionId, file: str) -> datetime | None:
        """When a session last read a file, if it did."""
        query = urlencode({"session_id": session_id, "path": file})
        path = self.path(f"/filetracker/lastread?{query}")
        found = await self.client.ask("GET", path, datetime)
        return None if found.year == NEVER else found

    # --- the agent, and its runs

    async def agent_info(self) -> AgentInfo:
        """Whether the agent is ready and busy, and which model it uses."""
        return await self.client.ask("GET", self.path("/agent"), AgentInfo)

    async def init_agent(self, *, interactive: bool = False) -> None:
        """Make the agent ready; it always is, and no run is disturbed."""
        await self.client.request("POST", self.path("/agent/init"), InitAgent(interactive))

    async def update_agent(self) -> None:
        """Let it take up changed models and tools, which it does by itself."""
        await self.client.request("POST", self.path("/agent/update"))

    async def default_small_model(self, provider_id: str) -> SelectedModel:
        """The small model of a provider that a person may be proposed."""
        path = self.path(f"/agent/default-small-model?provider_id={_quoted(provider_id)}")
        return await self.client.ask("GET", path, SelectedModel)

    async def agent_session(self, session_id: SessionId) -> Session:
        """A session, and whether the agent is busy with it."""
        return await self.client.ask("GET", self._talk_path(session_id), Session)

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
        """Ask the agent something; when this returns it will be done, whoever stays.

        Returns the id of its run, which is `run_id` if one was given. `model` is for this run
        only; without one it is the workspace's. With a `run_id` and not `interactive` nobody need
        be there to be asked for permission; `approve` answers instead. `limits` bound what the run
        may use up, where the server's settings do not.
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
        """Say something to the session's live run; it reads it before its next step."""
        path = self._talk_path(session_id, "/steer")
        return await self.client.ask("POST", path, Run, EditPrompt(text))

    async def summarize(self, session_id: SessionId) -> None:
        """Replace what the model reads of a session by a summary, and wait until that is done.

        The caller bounds the wait; who no longer waits has not stopped it.
        """
        path = self._talk_path(session_id, "/summarize")
        await self.client.request("POST", path, timeout_s=None)

    async def compact(self, session_id: SessionId) -> None:
        """As `summarize`, without waiting: a run like any other."""
        await self.client.request("POST", self._talk_path(session_id, "/compact"))

    async def shell(self, session_id: SessionId, command: str, *, width: int = 0) -> ShellOutput:
        """Run a person's own command and wait for its end; to cancel the wait ends it.

        `width` is that of the terminal it believes to write to.
        """
        path, body = self._talk_path(session_id, "/shell"), ShellCommand(command, term_width=width)
        return await self.client.ask("POST", path, ShellOutput, body, timeout_s=None)

    async def cancel(self, session_id: SessionId) -> None:
        """Stop every run of the session that is live now."""
        await self.client.request("POST", self._talk_path(session_id, "/cancel"))

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        """Stop one run, and hear what came of it."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/cancel", CancelAnswer)

    async def run(self, run_id: str) -> Run:
        return await self.client.ask("GET", self._run_path(run_id), Run)

    async def runs(self, session_id: str = "", state: State | Literal[""] = "") -> list[Run]:
        """The latest first; of one session or in one state if asked."""
        query = urlencode({"session": session_id, "state": state})
        return await self.client.ask("GET", self.path(f"/runs?{query}"), list[Run])

    async def edit_run(self, run_id: str, text: str) -> Run:
        """Change the prompt of a run that waits."""
        return await self.client.ask("PUT", self._run_path(run_id), Run, EditPrompt(text))

    async def start_run(self, run_id: str) -> Run:
        """Let a held run go on."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/start", Run)

    async def drop_run(self, run_id: str) -> Run:
        """End a held run, or one that waits, before it began."""
        return await self.client.ask("POST", f"{self._run_path(run_id)}/drop", Run)

    # --- what waits in a session

    async def queue(self, session_id: SessionId) -> list[QueuedPrompt]:
        """The runs that wait, in their order, each with its whole prompt."""
        path = self._talk_path(session_id, "/queue")
        return await self.client.ask("GET", path, list[QueuedPrompt])

    async def order_queue(
        self, session_id: SessionId, run_ids: Sequence[RunId]
    ) -> list[QueuedPrompt]:
        """Put those that wait into another order; all of them must be named."""
        path, body = self._talk_path(session_id, "/queue"), OrderQueue(list(run_ids))
        return await self.client.ask("PUT", path, list[QueuedPrompt], body)

    async def clear_queue(self, session_id: SessionId) -> None:
        """Forget the prompts that wait."""
        await self.client.request("POST", self._talk_path(session_id, "/prompts/clear"))

    async def queued_prompts(self, session_id: SessionId) -> list[str]:
        """What `queue` says, without the runs."""
        return await self.client.ask("GET", self._talk_path(session_id, "/prompts/list"), list[str])

    async def count_queued(self, session_id: SessionId) -> int:
        return await self.client.ask("GET", self._talk_path(session_id, "/prompts/queued"), int)

    async def stats(self, days: int = 0, utc_offset_s: int = 0) -> Stats:
        """What runs have used up in so many days, today included; 0 is all there is."""
        query = urlencode({"days": days, "utc_offset_s": utc_offset_s})
        return await self.client.ask("GET", self.path(f"/stats?{query}"), Stats)

    # --- agents, and letters to them

    async def agents(self, below: str = "") -> list[Agent]:
        """All agents, or those below one, in the order they were started."""
        path = self.path(f"/agents?below={_quoted(below)}")
        return await self.client.ask("GET", path, list[Agent])

    async def agent(self, agent_id: str) -> AgentDetails:
        return await self.client.ask("GET", self._agent_path(agent_id), AgentDetails)

    async def start_agent(self, wish: StartAgent) -> Agent:
        """Start one outside a conversation."""
        return await self.client.ask("POST", self.path("/agents"), Agent, wish)

    async def steer_agent(self, agent_id: str, text: str) -> SaidToAgent:
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

    async def reply_to_letter(self, letter_id: str, text: str, *, sender: str = "") -> LetterShown:
        """Answer a letter, as a person unless a `sender` is named; the first reply counts."""
        path = f"{self._letter_path(letter_id)}/reply"
        return await self.client.ask("POST", path, LetterShown, ReplyToLetter(text, sender))

    async def letter(self, letter_id: str) -> LetterShown:
        return await self.client.ask("GET", self._letter_path(letter_id), LetterShown)

    async def letters(self, agent_id: str = "") -> list[LetterShown]:
        path = self.path(f"/mail?agent={_quoted(agent_id)}")
        return await self.client.ask("GET", path, list[LetterShown])

    async def ring(self, agent_id: str = "") -> None:
        """Have a mailbox looked into now, or all: letters came that the server did not bring."""
        await self.client.request("POST", self.path("/mail/ring"), Ring(agent_id))

    # --- what people are asked

    async def asks(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[PermissionRequest]]:
        """The permission requests in a state, the latest first."""
        query = urlencode({"session": session_id, "state": state})
        path = self.path(f"/permissions/asks?{query}")
        return await self.client.ask("GET", path, list[Ask[PermissionRequest]])

    async def answer(self, ask: Ask[PermissionRequest], action: str) -> bool:
        """Answer what was shown, and nothing else; False if somebody was faster.

        `action` is `allow`, `allow_session`, `allow_workspace` or `deny`.
        """
        body = PermissionGrant(PermissionRef(ask.request.id), action, ask.digest)
        return await self._resolve("/permissions/grant", body)

    async def grants(self) -> list[Grant]:
        """What people have allowed for more than one call."""
        return await self.client.ask("GET", self.path("/permissions/grants"), list[Grant])

    async def remove_grant(self, grant_id: str) -> None:
        """Take a grant back: nothing more is let through by it."""
        path = self.path(f"/permissions/grants/{_quoted(grant_id)}")
        await self.client.request("DELETE", path)

    async def is_skipped(self, session_id: str = "") -> bool:
        """Whether calls go ahead without being asked for, in a session or in all."""
        path = self.path(f"/permissions/skip?session_id={_quoted(session_id)}")
        return (await self.client.ask("GET", path, Skip)).skip

    async def set_skip(self, *, on: bool, session_id: str = "") -> None:
        """Let calls go ahead without being asked for, or no longer; in a session or in all."""
        path = self.path(f"/permissions/skip?client_id={self.client.id}")
        await self.client.request("POST", path, SetSkip(on, session_id))

    async def questions(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[QuestionRequest]]:
        """The batches of questions in a state, the latest first."""
        path = self.path(f"/questions?{urlencode({'session': session_id, 'state': state})}")
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
        return self.path(f"/agents/{_quoted(agent_id)}")

    def _letter_path(self, letter_id: str) -> str:
        return self.path(f"/mail/letters/{_quoted(letter_id)}")

    def _run_path(self, run_id: str) -> str:
        return self.path(f"/runs/{_quoted(run_id)}")

    def _talk_path(self, session_id: SessionId, rest: str = "") -> str:
        """What is said in a session to the agent, and waits to be."""
        return self.path(f"/agent/sessions/{_quoted(session_id)}{rest}")

    def _session_path(self, session_id: SessionId) -> str:
        return self.path(f"/sessions/{_quoted(session_id)}")


def _quoted(name: str) -> str:
    """As a part of an address; what is not UTF-8 names nothing there is."""
    return quote(name, safe="", errors="replace")
