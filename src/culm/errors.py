"""Errors, grouped by the reaction: change the request (Rejected), retry (Unavailable), or neither.

Every error has a stable `code` and an HTTP `status`, and builds its message from its fields. Texts
that a Crush client compares or shows are written as that client expects.
"""

from typing import ClassVar, cast


class AppError(Exception):
    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Rejected(AppError):
    """The caller must change something; nothing happened."""


class Unavailable(AppError):
    """Nothing happened; the same request may succeed later."""

    status = 503
    retryable = True


class NoDescriptors(Unavailable):
    """The process or the system has no file descriptor left."""

    code = "no_descriptors"

    def __init__(self) -> None:
        super().__init__(
            "the server has no free file descriptors",
            hint="close clients or workspaces, or start it with a higher limit (ulimit -n)",
        )


class Failed(AppError):
    """The request was tried and did not work."""


class NoServer(Failed):
    """No server is running, and none can be started."""

    code = "no_server"


class InvalidRequest(Rejected):
    code, status = "invalid_request", 400


class Unauthenticated(Rejected):
    code, status = "unauthenticated", 401


class Denied(Rejected):
    code, status = "denied", 403


class NotFound(Rejected):
    code, status = "not_found", 404


class Conflict(Rejected):
    code, status = "conflict", 409


class TooLarge(Rejected):
    code, status = "too_large", 413


class HeadTooLarge(Rejected):
    code, status = "head_too_large", 431

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the request head exceeds {bytes_max} bytes or 128 fields")


class TooSlow(Rejected):
    code, status = "too_slow", 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request body did not arrive within {seconds:g} s")


class LimitExceeded(Rejected):
    code, status = "limit_exceeded", 429

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"too many {what}: at most {limit}")


class WorkspaceNotFound(NotFound):
    code = "workspace_not_found"

    def __init__(self) -> None:
        super().__init__("workspace not found", hint="open it again with POST /v1/workspaces")


class SessionNotFound(NotFound):
    code = "session_not_found"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session not found: {session_id}")


class MessageNotFound(NotFound):
    code = "message_not_found"

    def __init__(self, message_id: str, *, hint: str = "") -> None:
        super().__init__(f"message not found: {message_id}", hint=hint)


class RunNotFound(NotFound):
    code = "run_not_found"

    def __init__(self, run_id: str = "") -> None:
        super().__init__(f"run not found: {run_id}")


class GrantNotFound(NotFound):
    code = "grant_not_found"

    def __init__(self, grant_id: str = "") -> None:
        super().__init__(f"grant not found: {grant_id}")


class AgentNotFound(NotFound):
    code = "agent_not_found"

    def __init__(self, agent_id: str = "") -> None:
        super().__init__(f"agent not found: {agent_id}")


class LetterNotFound(NotFound):
    code = "letter_not_found"

    def __init__(self, letter_id: str = "") -> None:
        super().__init__(f"letter not found: {letter_id}")


class BudgetReached(Rejected):
    """The next model request would exceed the budget."""

    code, status = "budget_reached", 429


class RunIdReused(Conflict):
    code = "run_id_reused"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run_id {run_id} was already used with a different prompt", hint="use a new run_id"
        )


class RunStarted(Conflict):
    """The run is no longer queued, so it cannot be changed."""

    code = "run_started"

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id} is no longer queued", hint="cancel it instead")


class RunNotHeld(Conflict):
    code = "run_not_held"

    def __init__(self, run_id: str, state: str) -> None:
        super().__init__(f"run {run_id} is not held (state: {state})")


class RunFolded(Conflict):
    code = "run_folded"

    def __init__(self, run_id: str, host_id: str) -> None:
        super().__init__(
            f"run {run_id} shares the turn of run {host_id}", hint=f"cancel run {host_id}"
        )


class ModelMissing(Conflict):
    code = "model_missing"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the run's model cannot be used: {reason}", hint="see docs/models.md")


class QueueDiffers(Conflict):
    code = "queue_differs"

    def __init__(self) -> None:
        super().__init__(
            "run_ids do not match the queued runs", hint="read the queue again and retry"
        )


class SessionBusy(Conflict):
    code = "session_busy"

    def __init__(self) -> None:
        super().__init__(
            "session is currently processing another request", hint="wait for it, or cancel it"
        )


class NothingRuns(Conflict):
    code = "nothing_runs"

    def __init__(self) -> None:
        super().__init__("this session has no active run", hint="send a prompt instead")


class ClientRetired(Conflict):
    code = "client_retired"

    def __init__(self) -> None:
        super().__init__("client has been retired")


class ClientNotAttached(Conflict):
    code = "client_not_attached"

    def __init__(self) -> None:
        super().__init__("client not attached")


class WorkspaceClosing(Conflict):
    code = "workspace_closing"

    def __init__(self) -> None:
        super().__init__("workspace closing")


class ServerInUse(Conflict):
    code = "server_in_use"

    def __init__(self) -> None:
        super().__init__("server is hosting live workspaces")


class ChannelsDiffer(Conflict):
    code = "channels_differ"

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is already open with a different list of channels")


class DataLocked(Conflict):
    """Another process owns the data directory."""

    code = "data_locked"

    def __init__(self, root: str, owner: str) -> None:
        super().__init__(
            f"data directory {root} is in use by {owner}",
            hint="stop that server, or choose another --data-dir",
        )


class LspNotFound(NotFound):
    code = "lsp_not_found"

    def __init__(self) -> None:
        super().__init__("LSP client not found")


class McpNotFound(NotFound):
    code = "mcp_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"MCP server not found: {name}", hint="this version of culm has no MCP")


class SkillNotFound(NotFound):
    code = "skill_not_found"

    def __init__(self, skill_id: str) -> None:
        super().__init__(f"skill not found: {skill_id}", hint="this version of culm has no skills")


class AgentNotReady(InvalidRequest):
    code = "agent_not_ready"

    def __init__(self) -> None:
        super().__init__(
            "agent coordinator not initialized",
            hint="no model is usable; run `culm models` to see why",
        )


class ConfigDamaged(Conflict):
    """The file has an invalid manual edit, which is not overwritten."""

    code = "config_damaged"

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} is not usable: {reason}", hint="fix or remove the file")


class NotBuilt(Failed):
    code, status = "not_built", 501

    def __init__(self, what: str) -> None:
        super().__init__(f"this version of culm has no {what}")


class ModelFailed(Failed):
    """A model gave no valid answer. `title` is for a banner, the message for details."""

    code, status = "model_failed", 502

    def __init__(
        self,
        title: str,
        details: str,
        *,
        transient: bool = False,  # The same request may succeed in a moment.
        retry_after_s: float | None = None,  # As the provider asks for.
        hint: str = "",
    ) -> None:
        super().__init__(details, hint=hint)
        self.title = title
        self.transient = transient
        self.retry_after_s = retry_after_s


class ShuttingDown(Unavailable):
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("server is shutting down")


class StoreBusy(Unavailable):
    """The database refused a write; no data was changed."""

    code = "store_busy"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the store cannot write: {reason}")


class StoreClosed(StoreBusy):
    """The workspace closed during the request; clients see it as not found."""

    code, status, retryable = WorkspaceNotFound.code, WorkspaceNotFound.status, False

    def __init__(self) -> None:
        gone = WorkspaceNotFound()
        AppError.__init__(self, gone.message, hint=gone.hint)


class StoreDamaged(StoreBusy):
    """The file is damaged; it will be moved aside when it is opened next."""

    code = "store_damaged"


class SchemaTooNew(Failed):
    code = "schema_too_new"

    def __init__(self, path: str, found: int, known: int) -> None:
        super().__init__(
            f"{path} was written by a newer culm (schema {found}, this version supports {known})",
            hint="upgrade culm; the file was not changed",
        )


class DataUnusable(Failed):
    code = "data_unusable"

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"cannot use the data directory {root}: {reason}",
            hint="check its permissions and free space",
        )


class ListenFailed(Failed):
    code = "listen_failed"

    def __init__(self, url: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"cannot listen on {url}: {reason}", hint=hint)


def first_cause(exc: Exception) -> Exception:
    """Return the first error of a task group; any other error is returned unchanged."""
    while isinstance(exc, ExceptionGroup):
        # `isinstance` cannot narrow the type argument.
        exc = cast("ExceptionGroup[Exception]", exc).exceptions[0]
    return exc
