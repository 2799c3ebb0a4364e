"""The TUI's screen, as far as the wire determines it: the reactions of crush-wire §7.11.

Pure: an event in, the new screen and the requested calls out. `client.py` makes the calls.
"""

from dataclasses import dataclass, field
from typing import Literal

from tests.crush_client.golang import Record, texts
from tests.crush_client.syntax import parse_whole
from tests.crush_client.types import part_type

Reaction = Literal[
    "poll", "queue", "history", "workspace", "lsps", "mcp_states", "pending_auth", "mcp_prompts",
    "agent_update", "refresh-tools", "refresh-prompts", "refresh-resources",
]  # fmt: skip
POLLS: list[Reaction] = ["poll", "queue"]
MCP_REACTIONS: dict[str, list[Reaction]] = {
    "state_changed": ["agent_update", "mcp_states", "pending_auth", "mcp_prompts"],
    "tools_list_changed": ["refresh-tools"],
    "prompts_list_changed": ["refresh-prompts"],
    "resources_list_changed": ["refresh-resources"],
}
CallState = Literal["pending", "awaiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the stream; `payload` is partly filled if `error` is set."""

    type: str
    op: str
    payload: Record
    error: Exception | None = None


@dataclass(slots=True)
class Item:
    """A message on the screen."""

    message_id: str
    role: str
    text: str = ""
    finish: str = ""  # The finish reason; empty while open.
    banner: tuple[str, str] = ("", "")  # Title and details of the error.
    is_summary: bool = False


@dataclass(slots=True)
class Call:
    """A tool call on the screen."""

    call_id: str
    name: str
    input: str = ""
    finished: bool = False
    state: CallState = "pending"
    result: str = ""
    nested: list[str] = field(default_factory=list[str])  # Message ids of its sub-agent.


@dataclass
class Screen:
    session_id: str = ""  # Of the open session; empty on the landing screen.
    title: str = ""
    tokens: int = 0
    todos: list[str] = field(default_factory=list[str])
    items: dict[str, Item] = field(default_factory=dict[str, Item])  # By message id, in order.
    calls: dict[str, Call] = field(default_factory=dict[str, Call])  # By tool-call id.
    permission: Record | None = None  # The open dialog.
    questions: Record | None = None  # The open form.
    files: list[str] = field(default_factory=list[str])
    # By path: the content of a file before the session changed it, and now.
    changes: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    is_ready: bool = False
    is_busy: bool = False
    queue: list[str] = field(default_factory=list[str])
    skip: bool = False
    skills: list[str] = field(default_factory=list[str])
    mcp_name: str = ""  # The server of the last `mcp_event`.
    update: str = ""
    toasts: list[str] = field(default_factory=list[str])  # Errors shown to the user.

    def open_session(self, session: Record) -> None:
        if session.text("id") != self.session_id:
            self.items.clear()
            self.calls.clear()
        self.session_id = session.text("id")
        self._show_session(session)

    def close_session(self) -> None:
        self.session_id, self.title, self.tokens = "", "", 0
        for shown in (self.items, self.calls, self.todos, self.files, self.queue):
            shown.clear()
        self.changes.clear()

    def show_messages(self, messages: list[Record]) -> None:
        """Replace all messages by those of a load."""
        self.items.clear()
        self.calls.clear()
        for message in messages:
            self._add(message)

    def apply(self, event: Event) -> list[Reaction]:
        payload = event.payload
        match event.type:
            case "message":
                return self._on_message(event.op, payload)
            case "session":
                self._on_session(event.op, payload)
            case "file":
                return ["history"] if self.session_id else []
            case "permission_request":
                self.permission = payload  # Of any session.
            case "permission_notification":
                self._on_permission(payload)
            case "question_batch_request":
                self.questions = payload
            case "question_batch_notification":
                self.questions = None  # With any id.
            case "agent_event":
                if payload.text("type") in ("agent_finished", "error"):
                    return POLLS
            case "config_changed":
                return ["workspace"]
            case "lsp_event":
                return ["lsps"]
            case "mcp_event":
                self.mcp_name = payload.text("name")
                return MCP_REACTIONS.get(payload.text("type"), [])
            case "skills_event":
                self.skills = [state.text("name") for state in payload.records("states")]
            case "update_available":
                self.update = payload.text("latest_version")
            case _:
                pass  # `run_complete` is not for the TUI.
        return []

    def _on_message(self, op: str, message: Record) -> list[Reaction]:
        session_id, message_id = message.text("session_id"), message.text("id")
        parent, separator, call_id = session_id.partition("$$")
        if separator and parent in self.items and call_id in self.calls:
            if any(part_type(p) in ("tool_call", "tool_result") for p in message.records("parts")):
                nested = self.calls[call_id].nested
                nested += [] if message_id in nested else [message_id]
            return []
        if not session_id or session_id != self.session_id:
            return POLLS if op == "created" else []
        if op == "created":
            if message_id not in self.items and not _is_shell(message):
                self._add(message)
            return POLLS
        if op == "deleted":
            self.items.pop(message_id, None)
        elif message.text("role") == "assistant":
            # A message never announced has no item for its text; its calls are still shown.
            if message_id in self.items:
                self.items[message_id] = _item(message)
            self._add_calls(message)
        return []

    def _on_session(self, op: str, session: Record) -> None:
        if session.text("id") != self.session_id:
            return
        if op == "updated":
            self._show_session(session)
        elif op == "deleted":
            self.close_session()

    def _on_permission(self, notification: Record) -> None:
        call_id = notification.text("tool_call_id")
        granted, denied = notification.flag("granted"), notification.flag("denied")
        if call := self.calls.get(call_id):
            call.state = "running" if granted else "awaiting"
        dialog = self.permission
        if (granted or denied) and dialog is not None and dialog.text("tool_call_id") == call_id:
            self.permission = None

    def _show_session(self, session: Record) -> None:
        self.title = session.text("title")
        self.tokens = session.integer("prompt_tokens") + session.integer("completion_tokens")
        self.todos = [todo.text("content") for todo in session.records("todos")]

    def _add(self, message: Record) -> None:
        if message.text("role") == "tool":
            for part in message.records("parts"):
                if part_type(part) == "tool_result":
                    self._show_result(part)
        else:
            self.items[message.text("id")] = _item(message)
            self._add_calls(message)

    def _add_calls(self, message: Record) -> None:
        for part in message.records("parts"):
            if part_type(part) != "tool_call":
                continue
            call = self.calls.setdefault(part.text("id"), Call(part.text("id"), part.text("name")))
            call.input, call.finished = part.text("input"), part.flag("finished")
            if call.finished:
                parse_whole(call.input.encode())  # The TUI renders it: raises if it is not JSON.

    def _show_result(self, part: Record) -> None:
        call_id = part.text("tool_call_id")
        call = self.calls.setdefault(call_id, Call(call_id, part.text("name")))
        call.state, call.result = "done", part.text("content")


def _item(message: Record) -> Item:
    item = Item(message.text("id"), message.text("role"))
    item.is_summary = message.flag("is_summary_message")
    found: set[str] = set()
    for part in message.records("parts"):
        kind = part_type(part)
        if kind == "text" and kind not in found:  # Only the first of each is read.
            item.text = part.text("text")
        elif kind == "finish" and kind not in found:
            item.finish = part.text("reason")
            if item.finish == "error":
                item.banner = (part.text("message"), part.text("details"))
        found.add(kind)
    return item


def _is_shell(message: Record) -> bool:
    return any(part_type(part) == "shell_command" for part in message.records("parts"))


def changes_in(history: list[Record]) -> dict[str, tuple[str, str]]:
    """The lowest and the highest version of each file, which the sidebar compares."""
    versions: dict[str, list[Record]] = {}
    for file in history:
        versions.setdefault(file.text("path"), []).append(file)
    found: dict[str, tuple[str, str]] = {}
    for path, files in versions.items():
        files.sort(key=lambda file: file.integer("version"))
        found[path] = (files[0].text("content"), files[-1].text("content"))
    return found


def file_paths(history: list[Record], read: object) -> list[str]:
    """Paths that the session changed or read, once each."""
    return list(dict.fromkeys([*(file.text("path") for file in history), *texts(read)]))
