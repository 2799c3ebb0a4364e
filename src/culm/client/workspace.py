"""Typed requests about one workspace.

Requests about its configuration, its project, its skills and its servers are grouped in attributes
of the workspace.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from culm.client.transport import REQUEST_TIMEOUT_S
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
from culm.wire.codec import Json, decode
from culm.wire.config import (
    Config,
    ImportedToken,
    ModelType,
    OAuthToken,
    Provider,
    RefreshOAuth,
    RemoveConfig,
    SelectedModel,
    SetCompact,
    SetConfig,
    SetModel,
    SetProviderKey,
)
from culm.wire.extensions import (
    AuthUrl,
    Diagnostic,
    GetPrompt,
    LspInfo,
    McpInfo,
    McpName,
    McpPrompt,
    PendingAuth,
    PromptText,
    ReadResource,
    ReadSkill,
    Resource,
    SkillContent,
    SkillInfo,
    StartLsp,
)
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
from culm.wire.workspaces import (
    CreateWorkspace,
    CurrentSession,
    InitPrompt,
    NeedsInit,
    Process,
    Snapshot,
    Workspace,
)

if TYPE_CHECKING:
    from culm.client.http import Client

T = TypeVar("T")

Scope = Literal["user", "workspace"]  # The document that a change of the configuration goes to.
_SCOPES: dict[Scope, int] = {"user": 0, "workspace": 1}  # The numbers of the wire format.
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
        self._create_request = request

    @property
    def id(self) -> WorkspaceId:
        return self.info.id

    def path(self, rest: str = "") -> str:
        return f"/v1/workspaces/{self.id}{rest}"

    async def ask(
        self,
        method: str,
        route: str,
        kind: type[T],
        *ids: str,
        body: msgspec.Struct | None = None,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
        **query: str | int,
    ) -> T:
        """Request as `request` does, and decode the response."""
        data = await self.request(method, route, *ids, body=body, timeout_s=timeout_s, **query)
        return decode(data, kind)

    async def request(
        self,
        method: str,
        route: str,
        *ids: str,
        body: msgspec.Struct | None = None,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
        **query: str | int,
    ) -> bytes:
        """Send a request below the path of the workspace; each `{}` of the route is an id.

        Raises `RequestRefused`, or `OSError` without a response.
        """
        # Text that is not UTF-8 cannot match anything.
        path = self.path(route.format(*(quote(one, safe="", errors="replace") for one in ids)))
        if query:
            path += f"?{urlencode(query, safe='*,', errors='replace')}"
        return await self.client.request(method, path, body, timeout_s=timeout_s)

    async def rejoin(self) -> None:
        """Create or join it again, after the server restarted or the claim expired."""
        self.info = await self.client.create(self._create_request)

    async def refresh(self) -> Workspace:
        """Read its current state and configuration, and update `info`."""
        self.info = await self.ask("GET", "", Workspace)
        return self.info

    async def release(self) -> None:
        await self.request("DELETE", "", client_id=self.client.id)

    async def select_session(self, session_id: str) -> None:
        """Publish the session that this client displays; needs an open event stream."""
        await self.request(
            "POST", "/current-session", body=CurrentSession(session_id), client_id=self.client.id
        )

    async def snapshot(self, *sessions: str) -> Snapshot[Message]:
        """The stored state, with the messages of `sessions`; "*" for all."""
        return await self.ask("GET", "/snapshot", Snapshot[Message], sessions=",".join(sessions))

    async def processes(self) -> list[Process]:
        return await self.ask("GET", "/processes", list[Process])

    async def tools(self) -> list[ToolInfo]:
        return await self.ask("GET", "/tools", list[ToolInfo])

    # --- sessions, their messages and files

    async def sessions(self) -> list[Session]:
        return await self.ask("GET", "/sessions", list[Session])

    async def create_session(self, title: str) -> Session:
        return await self.ask("POST", "/sessions", Session, body=SaveSession(title))

    async def session(self, session_id: SessionId) -> Session:
        return await self.ask("GET", "/sessions/{}", Session, session_id)

    async def rename_session(self, session_id: SessionId, title: str) -> Session:
        return await self.ask("PUT", "/sessions/{}", Session, session_id, body=SaveSession(title))

    async def delete_session(self, session_id: SessionId) -> None:
        await self.request("DELETE", "/sessions/{}", session_id)

    async def messages(
        self, session_id: SessionId, *, limit: int | None = None, before: str = ""
    ) -> list[Message]:
        """The messages of a session, oldest first: all, or the last `limit` before a message."""
        route, kind = "/sessions/{}/messages", list[Message]
        if limit is None:
            return await self.ask("GET", route, kind, session_id, before=before)
        return await self.ask("GET", route, kind, session_id, before=before, limit=limit)

    async def user_messages(self, session_id: str = "") -> list[Message]:
        """The messages of users in a session, or in all sessions, newest first."""
        if not session_id:
            return await self.ask("GET", "/messages/user", list[Message])
        return await self.ask("GET", "/sessions/{}/messages/user", list[Message], session_id)

    async def find_message(self, session_id: SessionId, message_id: MessageId) -> Message | None:
        found = [m for m in await self.messages(session_id) if m.id == message_id]
        return found[0] if found else None

    async def file_history(self, session_id: SessionId) -> list[File]:
        """All versions of all files that a session wrote, by version and then by age."""
        return await self.ask("GET", "/sessions/{}/history", list[File], session_id)

    async def read_files(self, session_id: SessionId) -> list[str]:
        """The files that a session has read, most recent first."""
        return await self.ask("GET", "/sessions/{}/filetracker/files", list[str], session_id)

    async def mark_read(self, session_id: SessionId, file: str) -> None:
        """Record that a session has read a file now."""
        await self.request("POST", "/filetracker/read", body=ReadFile(session_id, file))

    async def find_last_read(self, session_id: SessionId, file: str) -> datetime | None:
        """The time of the last read of a file by a session; None if there was none."""
        found = await self.ask(
            "GET", "/filetracker/lastread", datetime, session_id=session_id, path=file
        )
        return None if found.year == NEVER else found

    # --- the agent, and its runs

    async def agent_info(self) -> AgentInfo:
        """The state of the agent (ready, busy) and its model."""
        return await self.ask("GET", "/agent", AgentInfo)

    async def init_agent(self, *, interactive: bool = False) -> None:
        """Initialize the agent. It is always ready, so this has no effect on runs."""
        await self.request("POST", "/agent/init", body=InitAgent(interactive))

    async def update_agent(self) -> None:
        """Make the agent reload models and tools, which it also does by itself."""
        await self.request("POST", "/agent/update")

    async def default_small_model(self, provider_id: str) -> SelectedModel:
        """The small model of a provider to suggest to a user."""
        return await self.ask(
            "GET", "/agent/default-small-model", SelectedModel, provider_id=provider_id
        )

    async def agent_session(self, session_id: SessionId) -> Session:
        """A session, including the busy state of its agent."""
        return await self.ask("GET", "/agent/sessions/{}", Session, session_id)

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
        return await self.ask(
            "POST", "/agent/sessions/{}/steer", Run, session_id, body=EditPrompt(text)
        )

    async def summarize(self, session_id: SessionId) -> None:
        """Replace the model's context of a session by a summary, and wait for it.

        The caller bounds the wait; canceling the wait does not stop the run.
        """
        await self.request("POST", "/agent/sessions/{}/summarize", session_id, timeout_s=None)

    async def compact(self, session_id: SessionId) -> None:
        """Summarize as `summarize` does, without waiting for the run."""
        await self.request("POST", "/agent/sessions/{}/compact", session_id)

    async def shell(self, session_id: SessionId, command: str, *, width: int = 0) -> ShellOutput:
        """Run a command of the user and wait for its end; canceling the wait kills it.

        `width` is the width of the terminal that the command sees.
        """
        return await self.ask(
            "POST",
            "/agent/sessions/{}/shell",
            ShellOutput,
            session_id,
            body=ShellRequest(command, term_width=width),
            timeout_s=None,
        )

    async def cancel(self, session_id: SessionId) -> None:
        """Cancel every live run of the session."""
        await self.request("POST", "/agent/sessions/{}/cancel", session_id)

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        """Cancel one run, and return the result."""
        return await self.ask("POST", "/runs/{}/cancel", CancelAnswer, run_id)

    async def run(self, run_id: str) -> Run:
        return await self.ask("GET", "/runs/{}", Run, run_id)

    async def runs(self, session_id: str = "", state: State | Literal[""] = "") -> list[Run]:
        """The latest 500 runs, latest first; optionally of one session or in one state."""
        return await self.ask("GET", "/runs", list[Run], session=session_id, state=state)

    async def edit_run(self, run_id: str, text: str) -> Run:
        """Change the prompt of a queued run."""
        return await self.ask("PUT", "/runs/{}", Run, run_id, body=EditPrompt(text))

    async def start_run(self, run_id: str) -> Run:
        """Start a held run."""
        return await self.ask("POST", "/runs/{}/start", Run, run_id)

    async def drop_run(self, run_id: str) -> Run:
        """End a held or queued run before it starts."""
        return await self.ask("POST", "/runs/{}/drop", Run, run_id)

    # --- the queue of a session

    async def queue(self, session_id: SessionId) -> list[QueuedPrompt]:
        """The queued runs in order, each with its whole prompt."""
        return await self.ask("GET", "/agent/sessions/{}/queue", list[QueuedPrompt], session_id)

    async def order_queue(
        self, session_id: SessionId, run_ids: Sequence[RunId]
    ) -> list[QueuedPrompt]:
        """Reorder the queued runs; all of them must be listed."""
        return await self.ask(
            "PUT",
            "/agent/sessions/{}/queue",
            list[QueuedPrompt],
            session_id,
            body=OrderQueue(list(run_ids)),
        )

    async def clear_queue(self, session_id: SessionId) -> None:
        """Remove all queued prompts."""
        await self.request("POST", "/agent/sessions/{}/prompts/clear", session_id)

    async def queued_prompts(self, session_id: SessionId) -> list[str]:
        """The prompts of `queue`, without the runs."""
        return await self.ask("GET", "/agent/sessions/{}/prompts/list", list[str], session_id)

    async def count_queued(self, session_id: SessionId) -> int:
        return await self.ask("GET", "/agent/sessions/{}/prompts/queued", int, session_id)

    async def stats(self, days: int = 0, utc_offset_s: int = 0) -> Stats:
        """The usage of runs in the last `days`, including today; 0 means all time."""
        return await self.ask("GET", "/stats", Stats, days=days, utc_offset_s=utc_offset_s)

    # --- agents, and letters to them

    async def agents(self, below: str = "") -> list[Agent]:
        """All agents, or those below one, in the order of their start."""
        return await self.ask("GET", "/agents", list[Agent], below=below)

    async def agent(self, agent_id: str) -> AgentDetails:
        return await self.ask("GET", "/agents/{}", AgentDetails, agent_id)

    async def start_agent(self, request: StartAgent) -> Agent:
        """Start an agent outside a conversation."""
        return await self.ask("POST", "/agents", Agent, body=request)

    async def steer_agent(self, agent_id: str, text: str) -> SaidToAgent:
        """Steer a running agent, or give an ended one a new assignment."""
        return await self.ask(
            "POST", "/agents/{}/message", SaidToAgent, agent_id, body=SayToAgent(text)
        )

    async def cancel_agent(self, agent_id: str) -> Agent:
        """Cancel an agent and all agents below it."""
        return await self.ask("POST", "/agents/{}/cancel", Agent, agent_id)

    async def set_budget(self, agent_id: str, budget: ChangeBudget) -> Agent:
        """Change the limits that are set in `budget`."""
        return await self.ask("POST", "/agents/{}/budget", Agent, agent_id, body=budget)

    async def send_letter(self, letter: SendLetter) -> LetterShown:
        return await self.ask("POST", "/mail", LetterShown, body=letter)

    async def reply_to_letter(self, letter_id: str, text: str, *, sender: str = "") -> LetterShown:
        """Answer a letter, by default as the user; the first reply counts."""
        return await self.ask(
            "POST",
            "/mail/letters/{}/reply",
            LetterShown,
            letter_id,
            body=ReplyToLetter(text, sender),
        )

    async def letter(self, letter_id: str) -> LetterShown:
        return await self.ask("GET", "/mail/letters/{}", LetterShown, letter_id)

    async def letters(self, agent_id: str = "") -> list[LetterShown]:
        return await self.ask("GET", "/mail", list[LetterShown], agent=agent_id)

    async def ring(self, agent_id: str = "") -> None:
        """Make the server check a mailbox, or all: letters arrived that it did not deliver."""
        await self.request("POST", "/mail/ring", body=Ring(agent_id))

    # --- asks and questions

    async def asks(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[PermissionRequest]]:
        """The permission requests in a state, latest first."""
        return await self.ask(
            "GET",
            "/permissions/asks",
            list[Ask[PermissionRequest]],
            session=session_id,
            state=state,
        )

    async def answer(self, ask: Ask[PermissionRequest], action: str) -> bool:
        """Answer the request as it was shown; return False if another client was faster.

        `action` is `allow`, `allow_session`, `allow_workspace` or `deny`.
        """
        body = PermissionGrant(PermissionRef(ask.request.id), action, ask.digest)
        return await self._resolve("/permissions/grant", body)

    async def grants(self) -> list[Grant]:
        """The permissions granted for more than one call."""
        return await self.ask("GET", "/permissions/grants", list[Grant])

    async def remove_grant(self, grant_id: str) -> None:
        """Revoke a grant; it allows no further calls."""
        await self.request("DELETE", "/permissions/grants/{}", grant_id)

    async def is_skipped(self, session_id: str = "") -> bool:
        """Return True if calls run without asking, in a session or in all."""
        return (await self.ask("GET", "/permissions/skip", Skip, session_id=session_id)).skip

    async def set_skip(self, *, on: bool, session_id: str = "") -> None:
        """Turn running without asking on or off, in a session or in all."""
        await self.request(
            "POST", "/permissions/skip", body=SetSkip(on, session_id), client_id=self.client.id
        )

    async def questions(
        self, session_id: str = "", state: AskState | Literal["all"] = "open"
    ) -> list[Ask[QuestionRequest]]:
        """The batches of questions in a state, latest first."""
        return await self.ask(
            "GET", "/questions", list[Ask[QuestionRequest]], session=session_id, state=state
        )

    async def open_asks(self, session_id: str = "") -> list[AnyAsk]:
        """Open permissions, then open questions, the latest of each first."""
        return [*await self.asks(session_id), *await self.questions(session_id)]

    async def answer_questions(self, batch_id: str, responses: list[QuestionResponse]) -> bool:
        """Answer a batch of questions; return False if another client was faster."""
        return await self._resolve("/questions/answer", QuestionAnswer(batch_id, responses))

    async def cancel_questions(self, batch_id: str) -> bool:
        """Decline to answer a batch; return False if another client was faster."""
        return await self._resolve("/questions/cancel", CancelQuestions(batch_id))

    async def _resolve(self, route: str, body: msgspec.Struct) -> bool:
        found = await self.ask("POST", route, Resolved, body=body, client_id=self.client.id)
        return found.resolved


class RemoteConfig(Struct, frozen=True):
    """The configuration of a workspace, as `RemoteWorkspace.config`."""

    workspace: RemoteWorkspace

    async def show(self) -> Config:
        """The effective configuration of all layers, without keys, tokens or environment."""
        return await self.workspace.ask("GET", "/config", Config)

    async def providers(self) -> list[Provider]:
        """The configured providers, in the form of a catalog."""
        return await self.workspace.ask("GET", "/providers", list[Provider])

    async def set(self, key: str, value: Json, *, scope: Scope = "workspace") -> None:
        """Set one key: a dotted path, in which a dot inside a name is written `\\.`."""
        await self._change("set", SetConfig(_SCOPES[scope], key, value))

    async def remove(self, key: str, *, scope: Scope = "workspace") -> None:
        """Remove one key; a missing key is not an error."""
        await self._change("remove", RemoveConfig(_SCOPES[scope], key))

    async def select_model(
        self, model: SelectedModel, kind: ModelType = "large", *, scope: Scope = "workspace"
    ) -> None:
        """Choose a model for all future runs; it is added to the recent models."""
        await self._change("model", SetModel(_SCOPES[scope], kind, model))

    async def set_compact(self, *, on: bool, scope: Scope = "workspace") -> None:
        """Turn the compact display on or off."""
        await self._change("compact", SetCompact(_SCOPES[scope], on))

    async def set_provider_key(
        self, provider_id: str, key: str | OAuthToken, *, scope: Scope = "workspace"
    ) -> None:
        """Store a provider's key or token. No request returns it."""
        kind = "string" if isinstance(key, str) else "oauth"
        body = SetProviderKey(_SCOPES[scope], provider_id, kind, msgspec.to_builtins(key))
        await self._change("provider-key", body)

    async def import_copilot(self) -> ImportedToken:
        """Import the token of another program, if the server supports it."""
        return await self.workspace.ask("POST", "/config/import-copilot", ImportedToken)

    async def refresh_oauth(self, provider_id: str, *, scope: Scope = "workspace") -> None:
        """Renew a provider's token; refused (404) if it has no token that can be renewed."""
        await self._change("refresh-oauth", RefreshOAuth(_SCOPES[scope], provider_id))

    async def _change(self, action: str, body: msgspec.Struct) -> None:
        await self.workspace.request("POST", "/config/{}", action, body=body)


class RemoteProject(Struct, frozen=True):
    """The project of a workspace, and its introduction for agents."""

    workspace: RemoteWorkspace

    async def needs_init(self) -> bool:
        """Return True if the user should be offered to generate an introduction."""
        found = await self.workspace.ask("GET", "/project/needs-init", NeedsInit)
        return found.needs_init

    async def init(self) -> None:
        """Record that the offer was accepted or declined."""
        await self.workspace.request("POST", "/project/init")

    async def init_prompt(self) -> str:
        """The prompt with which an agent writes the introduction."""
        return (await self.workspace.ask("GET", "/project/init-prompt", InitPrompt)).prompt


class RemoteSkills(Struct, frozen=True):
    """The skills of a workspace, as `RemoteWorkspace.skills`."""

    workspace: RemoteWorkspace

    async def all(self) -> list[SkillInfo]:
        return await self.workspace.ask("GET", "/skills", list[SkillInfo])

    async def read(self, skill_id: str) -> SkillContent:
        return await self.workspace.ask(
            "POST", "/skills/read", SkillContent, body=ReadSkill(skill_id)
        )


class RemoteLsps(Struct, frozen=True):
    """The language servers of a workspace, as `RemoteWorkspace.lsps`."""

    workspace: RemoteWorkspace

    async def states(self) -> dict[str, LspInfo]:
        """The state of each server, by name."""
        return await self.workspace.ask("GET", "/lsps", dict[str, LspInfo])

    async def diagnostics(self, name: str) -> dict[str, list[Diagnostic]]:
        """The diagnostics of one server, by the URI of the file."""
        return await self.workspace.ask(
            "GET", "/lsps/{}/diagnostics", dict[str, list[Diagnostic]], name
        )

    async def start(self, path: str) -> None:
        """Start the servers that handle a file."""
        await self.workspace.request("POST", "/lsps/start", body=StartLsp(path))

    async def stop(self) -> None:
        """Stop all of them."""
        await self.workspace.request("POST", "/lsps/stop")


class RemoteMcp(Struct, frozen=True):
    """The MCP servers of a workspace, as `RemoteWorkspace.mcp`."""

    workspace: RemoteWorkspace

    async def states(self) -> dict[str, McpInfo]:
        """The state of each server, by name."""
        return await self.workspace.ask("GET", "/mcp/states", dict[str, McpInfo])

    async def pending_auth(self) -> list[PendingAuth]:
        """The servers that wait for a person to log in."""
        return await self.workspace.ask("GET", "/mcp/pending-auth", list[PendingAuth])

    async def auth_url(self, name: str) -> str:
        """The login URL of a server; empty if it does not wait for a login."""
        return (await self.workspace.ask("GET", "/mcp/auth-url", AuthUrl, name=name)).auth_url

    async def authenticate(self, name: str) -> dict[str, str]:
        """Start a login and wait until the person has completed it; the caller bounds the wait."""
        return await self.workspace.ask(
            "POST", "/mcp/auth", dict[str, str], body=McpName(name), timeout_s=None
        )

    async def refresh_tools(self, name: str) -> None:
        await self.workspace.request("POST", "/mcp/refresh-tools", body=McpName(name))

    async def refresh_prompts(self, name: str) -> None:
        await self.workspace.request("POST", "/mcp/refresh-prompts", body=McpName(name))

    async def refresh_resources(self, name: str) -> None:
        await self.workspace.request("POST", "/mcp/refresh-resources", body=McpName(name))

    async def read_resource(self, name: str, uri: str) -> list[Resource]:
        return await self.workspace.ask(
            "POST", "/mcp/read-resource", list[Resource], body=ReadResource(name, uri)
        )

    async def prompts(self) -> list[McpPrompt]:
        """The prompts of all servers."""
        return await self.workspace.ask("GET", "/mcp/prompts", list[McpPrompt])

    async def fill_prompt(self, name: str, prompt_id: str, args: Mapping[str, str]) -> str:
        """A prompt of a server, filled in with arguments."""
        body = GetPrompt(name, prompt_id, dict(args))
        return (await self.workspace.ask("POST", "/mcp/get-prompt", PromptText, body=body)).prompt

    async def enable_docker(self) -> None:
        """Enable the MCP server of Docker."""
        await self.workspace.request("POST", "/mcp/docker/enable")

    async def disable_docker(self) -> None:
        await self.workspace.request("POST", "/mcp/docker/disable")
