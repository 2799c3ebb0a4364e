"""One example of every type in a request or response, for the OpenAPI document."""

from collections.abc import Mapping
from datetime import UTC, datetime

from culm.ids import (
    AgentId,
    AskId,
    ClientId,
    FileId,
    GrantId,
    MessageId,
    RunId,
    SessionId,
    WorkspaceId,
)
from culm.wire import agents, asks, config, extensions, messages, runs
from culm.wire import workspaces as ws
from culm.wire.codec import Json
from culm.wire.tools import ToolInfo

_WORKSPACE = WorkspaceId("9a4d2d0c-6b0e-5d0f-8a56-0f7c3f0f7b11")
_SESSION = SessionId("0b0c7a2e-7c8b-4d0e-9a6e-1b9f0d3c5a11")
_CLIENT = ClientId("5c8f5b0e-0f5d-4b1e-8c0e-6f4f2f1f9a10")
_MESSAGE = MessageId("c0ffee00-0000-4000-8000-000000000001")
_RUN = RunId("3b1c1a52-1111-4222-8333-444455556666")
_CURSOR = "8f3a5c1e9b02.118"
_PATH = "/home/dev/proj"
_THEN = 1787338000
_TIME = datetime.fromtimestamp(_THEN, UTC)

_SELECTED = config.SelectedModel(model="demo-1", provider="demo")
_MODEL = config.Model(id="demo-1", name="Demo One", context_window=200_000, default_max_tokens=8192)
_CONFIG = config.Config(
    options=config.Options(data_directory="/home/dev/.local/share/culm"),
    models={"large": _SELECTED, "small": _SELECTED},
    providers={
        "demo": config.ProviderConfig(id="demo", name="Demo", type="openai-compat", models=[_MODEL])
    },
)
_SESSION_EXAMPLE = messages.Session(
    id=_SESSION,
    title="Fix the flaky test",
    message_count=4,
    prompt_tokens=5210,
    completion_tokens=311,
    cost=0.0213,
    todos=[messages.Todo("Run the tests", "in_progress", "Running the tests")],
    created_at=_THEN,
    updated_at=_THEN + 42,
    attached_clients=1,
)
_MESSAGE_EXAMPLE = messages.Message(
    id=_MESSAGE,
    role="assistant",
    session_id=_SESSION,
    parts=[
        messages.ReasoningPart(
            messages.Reasoning("I should list the files.", "", _THEN + 2, _THEN + 3)
        ),
        messages.TextPart(messages.Text("Let me look.")),
        messages.ToolCallPart(messages.ToolCall("call_1", "ls", '{"path":"."}', finished=True)),
        messages.FinishPart(messages.Finish("tool_use", _THEN + 4)),
    ],
    model="demo-1",
    provider="demo",
    created_at=_THEN + 2,
    updated_at=_THEN + 4,
    rev=1,
    run_id=_RUN,
)
_PERMISSION = asks.PermissionRequest(
    id="7d9f7f0e-5a49-4c0e-8d33-0a7a3f2b1c99",
    session_id=_SESSION,
    tool_call_id="call_1",
    tool_name="bash",
    description="Execute command: make test",
    action="execute",
    params={"description": "Test", "command": "make test", "working_dir": ""},
    path=_PATH,
)
_QUESTION = asks.Question(
    id="q1",
    type="single_choice",
    label="Database",
    question="Which database?",
    description="Pick one.",
    choices=[asks.Choice("pg", "PostgreSQL"), asks.Choice("sqlite", "SQLite", "embedded")],
)
_BATCH = asks.QuestionRequest(
    "6f1a6f5e-4f0c-4b43-a8a5-fb8f6b2f0a01", _SESSION, "call_9", [_QUESTION]
)
_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_PRESENT = ws.Present(_CLIENT, _SESSION)
_DIAGNOSTIC = extensions.Diagnostic(
    extensions.Range(extensions.Position(3, 0), extensions.Position(3, 5)), 1, "undefined: x"
)

_RUN_EXAMPLE = runs.Run(
    id=_RUN,
    session_id=_SESSION,
    state="active",
    seq=7,
    run_id_given=True,
    prompt="List the files.",
    provider="demo",
    model="demo-1",
    created_at=_THEN,
    started_at=_THEN,
)
_AGENT_ID = AgentId("6f0f3f0e-7777-4888-8999-aaaabbbbcccc")
_LETTER_ID = "1d2c3b4a-9999-4aaa-8bbb-ccccddddeeee"
_AGENT = agents.Agent(
    agent_id=_AGENT_ID,
    parent_id=_SESSION,
    session_id=SessionId(f"{_MESSAGE}$$call_1"),
    parent_session_id=_SESSION,
    name="Find the callers",
    role="explorer",
    provider="demo",
    model="demo-1",
    state="running",
    pid=4711,
    run_id=_RUN,
    is_read_only=True,
    cost=0.0021,
    tokens=812,
    created_at=_THEN,
    started_at=_THEN,
)
_LETTER = agents.LetterShown(
    letter_id=_LETTER_ID,
    from_=_SESSION,
    to=_AGENT_ID,
    kind="ask",
    state="admitted",
    run_id=_LETTER_ID,
    created_at=_THEN,
    changed_at=_THEN,
)
_QUEUED = runs.QueuedPrompt(_RUN, "Then run the tests.")

_EXAMPLES: tuple[Json, ...] = (
    _RUN_EXAMPLE,
    _QUEUED,
    runs.CancelAnswer("canceled", _RUN_EXAMPLE),
    _AGENT,
    agents.AgentDetails(_AGENT, [_SESSION, _AGENT_ID], [], "Find all callers of `grow`.", "Three."),
    agents.StartAgent(prompt="Review the last commit.", role="reviewer", worktree=True),
    agents.SayToAgent("Leave out the tests."),
    agents.SaidToAgent(_RUN),
    _LETTER,
    agents.SendLetter(to=_AGENT_ID, kind="ask", text="Which tests fail?", from_=_SESSION),
    agents.ReplyToLetter("None."),
    agents.Ring(_AGENT_ID),
    agents.RingProject(_PATH),
    agents.ChangeBudget(tokens=50_000, cost=0.5),
    runs.EditPrompt("Then run the tests twice."),
    runs.OrderQueue([_RUN]),
    ws.Control("shutdown", "culm"),
    ws.VersionInfo("0.1.0", "", "culm-0.1.0", "python3.11.2", "linux/x86_64"),
    ws.Workspace(_WORKSPACE, _PATH, _CONFIG, "/home/dev/.local/share/culm", "0.1.0"),
    ws.CreateWorkspace(path=_PATH, client_id=_CLIENT, env=["LANG=C.UTF-8"]),
    ws.CurrentSession(_SESSION),
    ws.NeedsInit(),
    ws.InitPrompt("Look through this project …"),
    ws.Problem("workspace not found", "workspace_not_found", "open it again"),
    messages.SaveSession("Fix the flaky test"),
    _SESSION_EXAMPLE,
    _MESSAGE_EXAMPLE,
    messages.File(
        FileId("f1e0a3de-3f60-4bd4-9c27-0d5f6c1b7a10"),
        _SESSION,
        f"{_PATH}/main.go",
        "package main\n",
        1,
        _THEN + 30,
        _THEN + 30,
    ),
    messages.ReadFile(_SESSION, f"{_PATH}/main.go"),
    runs.AgentInfo(model=_MODEL, model_cfg=_SELECTED),
    runs.InitAgent(interactive=True),
    runs.Prompt(
        _SESSION,
        "List the files.",
        attachments=[runs.Attachment("notes.txt", "notes.txt", "text/plain", b"hello")],
    ),
    runs.ShellRequest("ls", term_width=118),
    runs.ShellOutput("main.go\n", 0),
    asks.Skip(skip=True),
    asks.SetSkip(skip=True),
    asks.PermissionGrant(asks.PermissionRef(_PERMISSION.id), "allow"),
    asks.Resolved(resolved=False),
    asks.CancelQuestions(_BATCH.id),
    asks.Grant(
        GrantId("9b9f7f0e-5a49-4c0e-8d33-0a7a3f2b1c11"),
        "session",
        _SESSION,
        "bash",
        "execute",
        [f"make test @ {_PATH}"],
        AskId(_PERMISSION.id),
        _CLIENT,
        _THEN,
    ),
    ws.Process(4711, "make test", "call", _SESSION, _RUN, "call_1", 1.5, 9_437_184, [4711, 4713]),
    ToolInfo(
        name="edit",
        kind="edit",
        path_arguments=("file_path",),
        shown_arguments=("file_path",),
    ),
    asks.QuestionAnswer(
        "", [asks.QuestionResponse("q1", ["pg"], notes={"pg": "version 16, please"})]
    ),
    _CONFIG,
    config.Provider("demo", "Demo", "openai-compat", models=[_MODEL]),
    _SELECTED,
    config.SetConfig(0, "options.tui.transparent", value=True),
    config.RemoveConfig(0, "options.tui.transparent"),
    config.SetModel(0, "large", _SELECTED),
    config.SetCompact(0, enabled=True),
    config.SetProviderKey(0, "demo", "string", "sk-example"),
    config.RefreshOAuth(0, "demo"),
    config.ImportedToken(),
    extensions.ReadSkill("crush://skills/review/SKILL.md"),
    extensions.SkillContent(
        b"# Review", extensions.SkillResult("review", "Reviews.", "user", builtin=False)
    ),
    extensions.SkillInfo(
        "review", "review", "Reviews a change.", "user:review", "user", user_invocable=True
    ),
    extensions.StartLsp(f"{_PATH}/main.go"),
    extensions.LspInfo("gopls", 2, _TIME, diagnostic_count=3),
    extensions.McpName("gh"),
    extensions.McpInfo("gh", "connected", _TIME, tool_count=12),
    extensions.PendingAuth("gh", "https://example.com/login"),
    extensions.AuthUrl("https://example.com/login"),
    extensions.ReadResource("gh", "issue://1"),
    extensions.Resource("issue://1", "text/plain", "It is flaky."),
    extensions.McpPrompt(
        "gh:review", "review", "gh", arguments=[extensions.McpArgument("pr", "Number")]
    ),
    extensions.GetPrompt("gh", "review", {"pr": "1"}),
    extensions.PromptText("Review number 1."),
)
EXAMPLES: Mapping[Json, Json] = {
    **{type(example): example for example in _EXAMPLES},
    asks.Ask[asks.PermissionRequest]: asks.Ask(
        _PERMISSION,
        _RUN,
        _MESSAGE,
        _DIGEST,
        [f"make test @ {_PATH}"],
        "`make` is not in the table of read-only commands",
        created_at=_THEN,
    ),
    asks.Ask[asks.QuestionRequest]: asks.Ask(_BATCH, _RUN, _MESSAGE, created_at=_THEN),
    dict[str, list[extensions.Diagnostic]]: {f"file://{_PATH}/main.go": [_DIAGNOSTIC]},
    ws.Snapshot[messages.Message]: ws.Snapshot(
        _CURSOR,
        [_SESSION_EXAMPLE],
        [_MESSAGE_EXAMPLE],
        [_RUN_EXAMPLE],
        [_AGENT],
        [_PRESENT],
        ws.StoreHealth("ok"),
    ),
}
