"""One example of each payload on the wire: those of the OpenAPI document, and of events."""

from collections.abc import Mapping

from culm.ids import AskId
from culm.wire import asks, extensions, runs
from culm.wire import events as ev
from culm.wire import workspaces as ws
from culm.wire.codec import Json
from culm.wire.examples import EXAMPLES as DOCUMENTED
from culm.wire.messages import Message, Session

_MESSAGE: Message = DOCUMENTED[Message]
_RUN: runs.Run = DOCUMENTED[runs.Run]
_SESSION: Session = DOCUMENTED[Session]
_ASK: asks.Ask[asks.PermissionRequest] = DOCUMENTED[asks.Ask[asks.PermissionRequest]]
_BATCH: asks.QuestionRequest = DOCUMENTED[asks.Ask[asks.QuestionRequest]].request
_SNAPSHOT: ws.Snapshot[Message] = DOCUMENTED[ws.Snapshot[Message]]
_WORKSPACE: ws.Workspace = DOCUMENTED[ws.Workspace]
_CLIENT = _SNAPSHOT.presence[0].client_id
_SKILL = extensions.SkillState("review", f"{_WORKSPACE.path}/.skills/review/SKILL.md")

_OF_EVENTS: tuple[Json, ...] = (
    runs.RunChanged(_RUN.id, _SESSION.id, "active", 7, run_id_given=True),
    runs.RunRetry(_RUN.id, _SESSION.id, 5.0, "No connection", "127.0.0.1:11434 cannot be reached"),
    runs.QueueChanged(_SESSION.id, [DOCUMENTED[runs.QueuedPrompt]]),
    runs.CancelChanged(
        "7d1b0f0e-3333-4444-8555-666677778888",
        _SESSION.id,
        "session",
        "settled",
        [runs.CancelledRun(_RUN.id, "canceled")],
    ),
    runs.Limits(wall_s=600.0, tokens=50_000, cost=0.5),
    runs.AgentEvent("agent_finished", session_id=_SESSION.id, session_title="List files"),
    runs.RunComplete(_SESSION.id, _RUN.id, _MESSAGE.id, "There are 3 files."),
    _ASK.request,
    asks.PermissionNotification("call_1", granted=True),
    _BATCH,
    asks.QuestionNotification(_BATCH.id),
    asks.AskChanged(
        AskId(_ASK.request.id),
        _SESSION.id,
        _RUN.id,
        "call_1",
        "bash",
        "execute",
        _ASK.request.description,
        _ASK.digest,
        "allowed",
        by=_CLIENT,
    ),
    asks.QuestionChanged(AskId(_BATCH.id), _SESSION.id, _RUN.id, "call_9", "open"),
    asks.SkipChanged("workspace", "", on=True, by=_CLIENT),
    _SNAPSHOT.presence[0],
    _SNAPSHOT.store,
    ev.CallOutput(_SESSION.id, "call_1", 0, "12 passed\n"),
    ev.ConfigChanged(_WORKSPACE.id),
    ev.SkillsEvent([_SKILL]),
    extensions.LspEvent("diagnostics_changed", "gopls", 2, diagnostic_count=3),
    extensions.McpEvent("state_changed", "gh", "connected", tool_count=12),
    ev.MessageDelta(_MESSAGE.id, _SESSION.id, 0, 1, "text", 8, "look."),
    ev.Resync(_SNAPSHOT.cursor, "trimmed"),
    ev.UpdateAvailable("0.1.0", "0.2.0", is_development=False),
)
EXAMPLES: Mapping[Json, Json] = {
    **DOCUMENTED,
    **{type(example): example for example in _OF_EVENTS},
}
