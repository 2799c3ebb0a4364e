"""One fixed story that calls every route and tells every event, so that answers are full.

What nothing in the product makes yet (a run, an ask, a language server) is put in where the
product would put it: messages through the workspace, events through its store.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from culm.client.http import RemoteWorkspace
from culm.events.hub import COALESCE_S
from culm.ids import ClientId, Ids, SessionId, WorkspaceId
from culm.store.base import Op
from culm.store.history import add_file
from culm.store.sessions import add_session
from culm.wire import messages as parts
from culm.wire import workspaces as wire
from culm.wire.codec import decode, encode
from culm.wire.config import Config
from culm.wire.events import PAYLOADS
from culm.wire.examples import EXAMPLES
from culm.wire.sessions import Session
from culm.workspace.workspace import Workspace
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN, Answer, RawStream, open_events, send, until
from tests.golden.transcript import Exchange, Names, Stream

W = "/v1/workspaces/{workspace_id}"
S = f"{W}/sessions/{{session_id}}"
A = f"{W}/agent/sessions/{{session_id}}"
# With the operation that the reference sends (crush-wire §7.4).
UNMADE: dict[str, Op] = {
    "agent_event": "created",
    "run_complete": "updated",
    "permission_request": "created",
    "permission_notification": "created",
    "question_batch_request": "created",
    "question_batch_notification": "created",
    "lsp_event": "updated",
    "mcp_event": "updated",
    "skills_event": "updated",
    "update_available": "updated",
}
PROVIDER = {
    "name": "Demo",
    "type": "openai-compat",
    "base_url": "https://models.example/v1",
    "models": [
        {
            "id": "demo-1",
            "name": "Demo One",
            "context_window": 200_000,
            "cost_per_1m_in": 3,
            "cost_per_1m_out": 15.5,
            "can_reason": True,
            "reasoning_levels": ["low", "high"],
        }
    ],
}
LARGE = {"model": "demo-1", "provider": "demo", "max_tokens": 8192, "temperature": 0.5}


@dataclass
class Story:
    """A server, and all that was said to it and by it."""

    flow: FlowServer
    exits: AsyncExitStack
    names: Names
    clients: list[ClientId]
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    streams: list[Stream] = field(default_factory=list[Stream])
    workspace_id: str = UNKNOWN

    @property
    def folder(self) -> str:
        return str(self.flow.directory())

    @property
    def workspace(self) -> Workspace:
        return self.flow.workspace(self.workspace_id)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        **ids: str,
    ) -> Answer:
        """Call a route by its path in the table, and keep what was said."""
        target = quote(path.format(**{"workspace_id": self.workspace_id, **ids}), safe="/$")
        if query:
            target += f"?{urlencode(query, safe='/$')}"
        data = b"" if body is None else json.dumps(body).encode()
        answer = await send(self.flow, method, target, data)
        self.exchanges.append(Exchange(method, path, target, data, answer))
        return answer

    async def attach(
        self, exits: AsyncExitStack, client: int, view: str, *, cursor: str = "", types: str = ""
    ) -> RawStream:
        """Open a stream that lasts as long as `exits`."""
        about = await self.flow.client(self.clients[client])
        info = wire.Workspace(WorkspaceId(self.workspace_id), "", Config())
        remote = RemoteWorkspace(about, wire.CreateWorkspace(), info)
        raw = await exits.enter_async_context(
            open_events(self.flow, remote, view=view, cursor=cursor, types=types)
        )
        query = {"client_id": about.id, "view": view, "cursor": cursor, "types": types}
        query = {name: value for name, value in query.items() if value}
        target = remote.path(f"/events?{urlencode(query, safe=',')}")
        self.streams.append(Stream(view, target, raw))
        answer = Answer(raw.status, raw.headers, b"")
        self.exchanges.append(Exchange("GET", f"{W}/events", target, b"", answer))
        await until(lambda: self.is_present(about.id))
        return raw

    def is_present(self, client_id: ClientId) -> bool:
        return client_id in {present.client_id for present in self.workspace.presence()}

    async def gone(self, client: int) -> None:
        """Wait until the server has noticed that a client's stream is closed."""
        await until(lambda: not self.is_present(self.clients[client]))
        self.workspace.hub.flush()

    async def tick(self) -> None:
        """Let everything be told, and then a second pass."""
        await self.settle()
        self.flow.clock.advance(1)
        await self.settle()

    async def settle(self) -> None:
        await self.workspace.store.write(lambda tx: None)
        self.workspace.hub.flush()


async def play(flow: FlowServer) -> Story:
    """Drive a fresh server from its first answer to its last."""
    ids = Ids(seed=1)
    clients = [ids.client() for _ in range(3)]
    async with AsyncExitStack() as exits:
        story = Story(flow, exits, Names(flow.folder), clients)
        for client in clients:
            story.names.know(client, "client")
        await _arrive(story)
        await _configure(story)
        session, other = await _begin_sessions(story)
        await _write_messages(story, session)
        await _touch_files(story, session)
        await _read_sessions(story, session)
        await _ask_agent(story, session)
        await _ask_around(story)
        await _tell_what_is_not_made(story)
        await _resume(story)
        await _leave(story, session, other)
    return story


async def _arrive(story: Story) -> None:
    for path in ("health", "version", "config", "openapi.json", "docs", "workspaces"):
        await story.ask("GET", f"/v1/{path}")
    one, two, three = story.clients
    await story.ask("POST", "/v1/workspaces", {"client_id": one})
    await story.ask("POST", "/v1/workspaces", {"path": story.folder, "client_id": "me"})
    await story.ask("GET", W)
    body = {"path": story.folder, "client_id": one, "env": ["LANG=C.UTF-8"], "version": "0.80.0"}
    created = await story.ask("POST", "/v1/workspaces", body)
    story.workspace_id = decode(created.body, wire.Workspace).id
    story.names.know(story.workspace_id, "workspace")
    for client in (two, three):
        await story.ask("POST", "/v1/workspaces", {"path": story.folder, "client_id": client})
    await story.attach(story.exits, 0, "delta")
    await story.attach(story.exits, 1, "crush")
    await story.ask("POST", "/v1/control", {"command": "shutdown"})
    await story.ask("POST", "/v1/control", {"command": "restart"})
    selected = {"session_id": UNKNOWN}
    await story.ask("POST", f"{W}/current-session", selected, {"client_id": three})


async def _configure(story: Story) -> None:
    tui = {"diff_mode": "split", "completions": {"max_items": 9}, "transparent": True}
    gopls = {"command": "gopls", "filetypes": ["go"], "timeout": 30}
    github = {"type": "stdio", "command": "gh-mcp", "env": {"TOKEN": "secret"}}
    for scope, key, value in (
        (0, "providers.demo", PROVIDER),
        (0, "options.tui", tui),
        (0, "options.context_paths", ["AGENTS.md"]),
        (1, "lsp.gopls", gopls),
        (1, "mcp.gh", github),
        (1, "permissions.allowed_tools", ["ls"]),
        (1, "options.debug_lsp", True),
        (1, "options.tui", "wide"),
        (2, "options.debug_lsp", True),
    ):
        body = {"scope": scope, "key": key, "value": value}
        await story.ask("POST", f"{W}/config/set", body)
    await story.ask("POST", f"{W}/config/remove", {"scope": 1, "key": "options.debug_lsp"})
    for name, model in (("large", LARGE), ("small", {"model": "demo-1", "provider": "demo"})):
        body = {"scope": 0, "model_type": name, "model": model}
        await story.ask("POST", f"{W}/config/model", body)
    await story.ask("POST", f"{W}/config/compact", {"scope": 0, "enabled": True})
    key = {"scope": 0, "provider_id": "demo", "kind": "string", "api_key": "sk-secret"}
    token = {"access_token": "secret", "refresh_token": "secret", "expires_in": 3600}
    await story.ask("POST", f"{W}/config/provider-key", key)
    await story.ask("POST", f"{W}/config/provider-key", {**key, "kind": "oauth", "api_key": token})
    await story.ask("POST", f"{W}/config/import-copilot")
    await story.ask("POST", f"{W}/config/refresh-oauth", {"scope": 0, "provider_id": "demo"})
    await story.tick()
    for path in (f"{W}/config", f"{W}/providers", W, "/v1/workspaces"):
        await story.ask("GET", path)


async def _begin_sessions(story: Story) -> tuple[SessionId, SessionId]:
    made: list[SessionId] = []
    for title in ("New Session", "Another"):
        answer = await story.ask("POST", f"{W}/sessions", {"title": title})
        made.append(decode(answer.body, Session).id)
        story.names.know(made[-1], "session")
        await story.tick()
    await story.ask("POST", f"{W}/sessions", {"title": 7})
    renamed = {"id": made[0], "title": "Fix the flaky test", "message_count": 99}
    await story.ask("PUT", S, renamed, session_id=made[0])
    for client in story.clients[:2]:
        query = {"client_id": client}
        await story.ask("POST", f"{W}/current-session", {"session_id": made[0]}, query)
    await story.ask(
        "POST", f"{W}/current-session", {"session_id": ""}, {"client_id": story.clients[1]}
    )
    await story.tick()
    return made[0], made[1]


async def _write_messages(story: Story, session_id: SessionId) -> None:
    messages, clock = story.workspace.messages, story.flow.clock

    async def add(role: parts.Role, *given: parts.Part) -> parts.Message:
        message, written = messages.add(session_id, role, list(given))
        story.names.know(message.id, "message")
        await written
        await story.tick()
        return message

    def grow(draft_part: int, kind: parts.Growing, text: str) -> None:
        messages.append(draft, draft_part, kind, text)
        story.workspace.hub.flush()
        clock.advance(COALESCE_S)

    await add(
        "user",
        parts.TextPart(parts.Text("What fails here? “Ärger” 🙂 <b>&</b>")),
        parts.BinaryPart(parts.Binary("shot.png", "image/png", b"\x89PNG\r\n\x1a\n")),
        parts.ImageUrlPart(parts.ImageUrl("https://example.com/shot.png", "low")),
    )
    draft, opened = messages.open(session_id, model="demo-1", provider="demo")
    story.names.know(draft.message.id, "message")
    await opened
    grow(0, "text", "A first try")
    await messages.clear(draft)
    grow(0, "reasoning", "I should ")
    grow(0, "reasoning", "run it.")
    thought = parts.Reasoning("I should run it.", "", int(clock.now_s()), int(clock.now_s()))
    await messages.put(draft, 0, parts.ReasoningPart(thought))
    grow(1, "text", "Let me look. 🙂")
    await messages.put(draft, 2, parts.ToolCallPart(parts.ToolCall("call_1", "bash")))
    grow(2, "input", '{"command":')
    async with AsyncExitStack() as exits:
        raw = await story.attach(exits, 2, "delta", types="message_snapshot,message_delta")
        grow(2, "input", '"make test"}')
        await raw.until(b"make test")
    await story.gone(2)
    call = parts.ToolCall("call_1", "bash", '{"command":"make test"}', finished=True)
    await messages.put(draft, 2, parts.ToolCallPart(call))
    await story.tick()
    await messages.finish(draft, parts.Finish("tool_use", int(clock.now_s())))
    child = SessionId(f"{draft.message.id}$$call_1")
    await story.workspace.store.write(
        add_session(child, "A sub-agent", parent_id=session_id, sessions_max=9)
    )
    result = parts.ToolResult("call_1", "bash", "1 failed", metadata='{"output":"1 failed"}')
    await add("tool", parts.ToolResultPart(result))
    await add("user", parts.ShellCommandPart(parts.ShellCommand("ls", "main.go\n", 0)))
    mistake = await add("user", parts.TextPart(parts.Text("A mistake")))
    await messages.delete(mistake.id)
    await story.tick()


async def _touch_files(story: Story, session_id: SessionId) -> None:
    file = f"{story.folder}/main.go"
    ids = Ids()
    for content in ("package main\n", "package main\n\nfunc main() {}\n"):
        file_id = ids.file()
        story.names.know(file_id, "file")
        await story.workspace.store.write(add_file(file_id, session_id, file, content))
        await story.tick()
    await story.ask("POST", f"{W}/filetracker/read", {"session_id": session_id, "path": file})
    await story.ask("POST", f"{W}/filetracker/read", {"session_id": UNKNOWN, "path": file})
    for name in ("main.go", "other.go"):
        query = {"session_id": session_id, "path": f"{story.folder}/{name}"}
        await story.ask("GET", f"{W}/filetracker/lastread", query=query)
    await story.ask("GET", f"{S}/filetracker/files", session_id=session_id)
    await story.ask("GET", f"{S}/history", session_id=session_id)


async def _read_sessions(story: Story, session_id: SessionId) -> None:
    await story.ask("GET", f"{W}/sessions")
    for path in (S, f"{S}/messages", f"{S}/messages/user"):
        await story.ask("GET", path, session_id=session_id)
    await story.ask("GET", S, session_id=UNKNOWN)
    await story.ask("GET", f"{S}/messages", session_id=UNKNOWN)
    await story.ask("GET", f"{W}/messages/user")
    await story.ask("GET", f"{W}/snapshot")
    await story.ask("GET", f"{W}/snapshot", query={"sessions": session_id})


async def _ask_agent(story: Story, session_id: SessionId) -> None:
    await story.ask("POST", f"{W}/agent/init", {"interactive": True})
    await story.ask("POST", f"{W}/agent/update")
    await story.ask("GET", f"{W}/agent")
    await story.ask("GET", f"{W}/agent/default-small-model", query={"provider_id": "demo"})
    await story.ask("POST", f"{W}/agent", {"session_id": session_id, "prompt": "List the files."})
    await story.ask("GET", A, session_id=session_id)
    await story.ask("GET", A, session_id=UNKNOWN)
    for path in ("cancel", "prompts/clear", "summarize"):
        await story.ask("POST", f"{A}/{path}", session_id=session_id)
    for path in ("prompts/queued", "prompts/list"):
        await story.ask("GET", f"{A}/{path}", session_id=session_id)
    await story.ask("POST", f"{A}/shell", {"command": "ls"}, session_id=session_id)


async def _ask_around(story: Story) -> None:
    """What is answered in its empty form for now, each with what a client would send."""
    await story.ask("GET", f"{W}/permissions/skip")
    await story.ask("POST", f"{W}/permissions/skip", {"skip": True})
    await story.ask("GET", f"{W}/permissions/skip")
    grant = {"permission": {"id": UNKNOWN, "params": None}, "action": "allow_session"}
    await story.ask("POST", f"{W}/permissions/grant", grant)
    await story.ask("POST", f"{W}/permissions/grant", {**grant, "action": "maybe"})
    answers = [{"request_id": "q1", "selected_ids": ["pg"], "yes": None}]
    await story.ask("POST", f"{W}/questions/answer", {"batch_request_id": "", "responses": answers})
    await story.ask("POST", f"{W}/questions/cancel")
    await story.ask("GET", f"{W}/project/needs-init")
    await story.ask("POST", f"{W}/project/init")
    await story.ask("GET", f"{W}/project/init-prompt")
    await story.ask("GET", f"{W}/skills")
    await story.ask("POST", f"{W}/skills/read", {"skill_id": "crush://skills/review/SKILL.md"})
    await story.ask("GET", f"{W}/lsps")
    await story.ask("GET", f"{W}/lsps/{{lsp}}/diagnostics", lsp="gopls")
    await story.ask("POST", f"{W}/lsps/start", {"path": f"{story.folder}/main.go"})
    await story.ask("POST", f"{W}/lsps/stop")
    for path in ("states", "pending-auth", "prompts"):
        await story.ask("GET", f"{W}/mcp/{path}")
    await story.ask("GET", f"{W}/mcp/auth-url", query={"name": "gh"})
    await story.ask("GET", f"{W}/mcp/auth-url")
    for path in ("auth", "refresh-tools", "refresh-prompts", "refresh-resources"):
        await story.ask("POST", f"{W}/mcp/{path}", {"name": "gh"})
    await story.ask("POST", f"{W}/mcp/read-resource", {"name": "gh", "uri": "issue://1"})
    prompt = {"client_id": "gh", "prompt_id": "review", "args": {"pr": "1"}}
    await story.ask("POST", f"{W}/mcp/get-prompt", prompt)
    for path in ("enable", "disable"):
        await story.ask("POST", f"{W}/mcp/docker/{path}")
    await story.tick()


async def _tell_what_is_not_made(story: Story) -> None:
    for kind, op in UNMADE.items():
        payload = encode(EXAMPLES[PAYLOADS[kind]])
        await story.workspace.store.append(kind, op, payload=payload)
    await story.tick()


async def _resume(story: Story) -> None:
    """Come back with a cursor: one that the log has, and one of another database."""
    first = story.streams[0].raw.headers["culm-cursor"]
    for cursor, types, last in (
        (first, "session,file", b"func main"),
        ("000000000000.1", "", b"store_health"),
    ):
        async with AsyncExitStack() as exits:
            raw = await story.attach(exits, 2, "delta", cursor=cursor, types=types)
            await raw.until(last)
        await story.gone(2)


async def _leave(story: Story, session_id: SessionId, other: SessionId) -> None:
    one, two, three = story.clients
    await story.ask("DELETE", S, session_id=other)
    await story.ask("DELETE", S, session_id=other)
    await story.ask("DELETE", W)
    await story.ask("DELETE", W, query={"client_id": three})
    # What is open when the workspace closes is ended by it.
    draft, opened = story.workspace.messages.open(session_id, model="demo-1", provider="demo")
    story.names.know(draft.message.id, "message")
    await opened
    story.workspace.messages.append(draft, 0, "text", "Cut off in the")
    await story.settle()
    await story.ask("DELETE", "/v1/clients/{client_id}", client_id="me")
    for client in (one, two):
        await story.ask("DELETE", "/v1/clients/{client_id}", client_id=client)
    for stream in story.streams[:2]:
        await stream.raw.end()
        stream.ended = True
    await story.ask("GET", W)
    await story.ask("POST", "/v1/workspaces", {"path": story.folder, "client_id": one})
    await story.ask("POST", "/v1/control", {"command": "shutdown", "server": "culm"})
