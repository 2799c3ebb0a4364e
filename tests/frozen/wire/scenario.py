"""One fixed story that calls every route and causes every event, so that answers are full.

Things that the product does not make yet (a linked picture, a language server) are inserted where
it would make them: messages through the workspace, events through its store.
"""

from contextlib import AsyncExitStack

from culm.ids import Ids, SessionId
from culm.settings import Settings
from culm.store.base import Op
from culm.store.sessions import add_file, set_todos
from culm.testing.model_server import ModelServer
from culm.wire import messages as parts
from culm.wire import workspaces as wire
from culm.wire.codec import decode, encode
from culm.wire.events import PAYLOADS
from culm.wire.messages import Session, Todo
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN
from tests.frozen.wire.agents import hand_work_on, start_agents, write_letters
from tests.frozen.wire.asking import ask_for_permission, ask_questions, stop_asking
from tests.frozen.wire.story import A, S, Story, StoryClock, W
from tests.frozen.wire.transcript import Names
from tests.frozen.wire.turns import (
    end_runs,
    find_runs_again,
    leave_runs_behind,
    prompt,
    take_a_turn,
    use_the_queue,
)
from tests.wire.payloads import EXAMPLES

SETTINGS = Settings(abandoned_runs_s=2.0)
# With the operation that the reference sends (crush-wire §7.4).
UNMADE: dict[str, Op] = {
    "lsp_event": "updated",
    "mcp_event": "updated",
    "skills_event": "updated",
    "update_available": "updated",
}
# Every value that must not be shown contains this word.
SECRET = "secret"
PROVIDER = {
    "name": "Demo",
    "type": "openai-compat",
    "extra_headers": {"X-Team": SECRET},
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


async def play(flow: FlowServer, clock: StoryClock, model: ModelServer) -> Story:
    """Drive a fresh server from its first answer to its last."""
    ids = Ids(seed=1)
    clients = [ids.client() for _ in range(3)]
    names = Names({str(flow.folder): "<folder>", model.url: "<model url>"})
    async with AsyncExitStack() as exits:
        run_ids = [ids.run() for _ in range(12)]
        story = Story(flow, clock, model, exits, names, clients, run_ids)
        for client in clients:
            names.know(client, "client")
        await _arrive(story)
        await _configure(story)
        session, other = await _begin_sessions(story)
        await take_a_turn(story, session)
        await _write_unmade_messages(story, session)
        await _run_own_commands(story, session)
        await _touch_files(story, session)
        await _read_sessions(story, session)
        await _ask_agent(story, session)
        await use_the_queue(story, session)
        await end_runs(story, session, other)
        await ask_for_permission(story, session)
        await ask_questions(story, session)
        await start_agents(story)
        await hand_work_on(story, session)
        await write_letters(story, session)
        await stop_asking(story, session)
        await _call_empty_routes(story)
        await _publish_unmade_events(story)
        await _resume(story)
        await _leave(story, session, other)
        await _come_back(story, session)
    for stream in story.streams:
        names.learn(stream)
    return story


async def _arrive(story: Story) -> None:
    for path in ("health", "version", "config", "openapi.json", "docs", "workspaces"):
        await story.ask("GET", f"/v1/{path}")
    one, two, three = story.clients
    await story.ask("POST", "/v1/workspaces", {"client_id": one})
    await story.ask("POST", "/v1/workspaces", {"path": story.folder, "client_id": "me"})
    await story.ask("GET", W)
    env = ["LANG=C.UTF-8", f"DEMO_KEY={SECRET}"]
    body = {"path": story.folder, "client_id": one, "env": env, "version": "0.80.0"}
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
    await story.ask("GET", f"{W}/agent")
    offline = {"scope": 0, "key": "providers.offline.disable"}
    await story.ask("POST", f"{W}/config/set", {**offline, "value": True})
    await story.ask("GET", f"{W}/agent")
    await prompt(story, UNKNOWN, "Is anybody there?")
    await story.ask("POST", f"{W}/config/remove", offline)
    tui = {"diff_mode": "split", "completions": {"max_items": 9}, "transparent": True}
    gopls = {"command": "gopls", "filetypes": ["go"], "timeout": 30}
    github = {"type": "stdio", "command": "gh-mcp", "env": {"TOKEN": SECRET}}
    for scope, key, value in (
        (0, "providers.demo", {**PROVIDER, "base_url": story.model.url}),
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
    key = {"scope": 0, "provider_id": "demo", "kind": "string", "api_key": f"sk-{SECRET}"}
    token = {"access_token": SECRET, "refresh_token": SECRET, "expires_in": 3600}
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
        await story.tick()
    await story.ask("POST", f"{W}/sessions", {"title": 7})
    renamed = {"id": made[0], "title": "Renamed", "message_count": 99}
    await story.ask("PUT", S, renamed, session_id=made[0])
    for client in story.clients[:2]:
        query = {"client_id": client}
        await story.ask("POST", f"{W}/current-session", {"session_id": made[0]}, query)
    await story.ask(
        "POST", f"{W}/current-session", {"session_id": ""}, {"client_id": story.clients[1]}
    )
    await story.tick()
    return made[0], made[1]


async def _write_unmade_messages(story: Story, session_id: SessionId) -> None:
    """Write a linked picture, and a list of todos."""
    picture = parts.ImageUrlPart(parts.ImageUrl("https://example.com/shot.png", "low"))
    _, written = story.workspace.messages.add(session_id, "user", [picture])
    await written
    await story.tick()
    todos = [Todo("Look", "completed"), Todo("Run the tests", "in_progress", "Running the tests")]
    await story.workspace.store.write(set_todos(session_id, todos))
    await story.tick()


async def _run_own_commands(story: Story, session_id: SessionId) -> None:
    shell = {"session_id": "", "command": "echo main.go; exit 3", "term_width": 80}
    await story.ask("POST", f"{A}/shell", shell, session_id=session_id)
    await story.ask("POST", f"{A}/shell", {"command": " "}, session_id=session_id)
    await story.ask("POST", f"{A}/shell", shell, session_id=UNKNOWN)
    await story.ask("GET", f"{W}/processes")
    await story.ask("GET", f"{W}/tools")
    await story.ask("GET", f"{W}/stats")
    await story.tick()


async def _touch_files(story: Story, session_id: SessionId) -> None:
    file = f"{story.folder}/main.go"
    ids = Ids()
    for content in ("package main\n", "package main\n\nfunc main() {}\n"):
        await story.workspace.store.write(add_file(ids.file(), session_id, file, content))
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
    for page in ({"limit": "1"}, {"limit": "0"}, {"limit": "1001"}, {"before": UNKNOWN}):
        await story.ask("GET", f"{S}/messages", query=page, session_id=session_id)
    await story.ask("GET", f"{W}/messages/user")
    await story.ask("GET", f"{W}/snapshot")
    await story.ask("GET", f"{W}/snapshot", query={"sessions": session_id})


async def _ask_agent(story: Story, session_id: SessionId) -> None:
    await story.ask("POST", f"{W}/agent/init", {"interactive": True})
    await story.ask("POST", f"{W}/agent/update")
    await story.ask("GET", f"{W}/agent")
    await story.ask("GET", f"{W}/agent/default-small-model", query={"provider_id": "demo"})
    for session in (session_id, UNKNOWN):
        await story.ask("GET", A, session_id=session)
    for path in ("prompts/queued", "prompts/list", "queue"):
        await story.ask("GET", f"{A}/{path}", session_id=session_id)


async def _call_empty_routes(story: Story) -> None:
    """Call the routes that have only empty answers for now."""
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


async def _publish_unmade_events(story: Story) -> None:
    for kind, op in UNMADE.items():
        payload = encode(EXAMPLES[PAYLOADS[kind]])
        await story.workspace.store.append(kind, op, payload=payload)
    await story.tick()


async def _resume(story: Story) -> None:
    """Reconnect with a cursor of the log, and with one of another database."""
    first = story.streams[0].raw.headers["culm-cursor"]
    for cursor, types, last in (
        (first, "file,run_complete,update_available", b"latest_version"),
        ("000000000000.1", "", b"store_health"),
    ):
        async with AsyncExitStack() as exits:
            raw = await story.attach(exits, 2, "delta", cursor=cursor, types=types)
            await raw.until(last)
        await story.gone(2)


async def _leave(story: Story, session_id: SessionId, other: SessionId) -> None:
    one, two, three = story.clients
    for _ in range(2):
        await story.ask("DELETE", S, session_id=other)
    await story.ask("DELETE", W)
    await story.ask("DELETE", W, query={"client_id": three})
    await leave_runs_behind(story, session_id)
    await story.ask("DELETE", "/v1/clients/{client_id}", client_id="me")
    for client in (one, two):
        await story.ask("DELETE", "/v1/clients/{client_id}", client_id=client)
    await story.ask("POST", "/v1/control", {"command": "shutdown", "server": "culm"})
    story.clock.advance(SETTINGS.abandoned_runs_s)
    for stream in story.streams[:2]:
        await stream.raw.end()
        stream.ended = True
    await story.ask("GET", W)


async def _come_back(story: Story, session_id: SessionId) -> None:
    one, _, three = story.clients
    for client in (one, three):
        await story.ask("POST", "/v1/workspaces", {"path": story.folder, "client_id": client})
    raw = await story.attach(story.exits, 2, "delta")
    await find_runs_again(story, session_id)
    await story.ask("DELETE", "/v1/clients/{client_id}", client_id=three)
    await raw.end()
    story.streams[-1].ended = True
    await story.ask("POST", "/v1/control", {"command": "shutdown", "server": "culm"})
