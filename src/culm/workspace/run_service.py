"""The operations of clients on runs: prompts, cancels, the queue, and held runs.

Each operation validates, calls `Runs` in one step, and then waits until the change is durable, so
that a client that disconnects changes nothing. `run/` owns the runs themselves.
"""

import asyncio
import re
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from culm.errors import (
    AgentNotReady,
    InvalidRequest,
    ModelFailed,
    ModelMissing,
    QueueDiffers,
    RunIdReused,
    RunNotFound,
    RunNotHeld,
    RunStarted,
    SessionNotFound,
    TooLarge,
    WorkspaceClosing,
)
from culm.ids import RunId, SessionId
from culm.permission.gate import ApprovalPolicy
from culm.run.limits import check_limits
from culm.run.live_run import AgentDuty, LiveRun, RunRequest, digest_of
from culm.run.runs import Runs
from culm.store.base import Connection
from culm.store.runs import (
    RunBody,
    StoredRun,
    body_of,
    drop_run,
    find_run,
    find_stored,
    list_runs,
)
from culm.store.sessions import find_session
from culm.subagents.tree import AgentTree
from culm.wire.config import SelectedModel
from culm.wire.runs import (
    AgentInfo,
    Attachment,
    CancelAnswer,
    Limits,
    Prompt,
    QueuedPrompt,
    Run,
    State,
)
from culm.workspace.services import WorkspaceServices
from culm.workspace.toolbox import Toolbox

RUNS_SHOWN = 500
PROMPT_CHARS_MAX = 4 << 20
ATTACHMENT_BYTES_MAX = 10 << 20  # Each; a Crush client sends at most 5 MiB.
ATTACHMENTS_MAX = 100
MIME_TYPES = ("text/", "image/")
_RUN_ID = re.compile(r"(?!\.{1,2}$)[!-~]{1,200}")  # Used in URLs and in a header.
CANCEL_WAIT_S = 10.0  # Longer than the time after which a stopped run is abandoned.


class RunService:
    """Runs of one workspace, for its routes."""

    def __init__(
        self, services: WorkspaceServices, runs: Runs, toolbox: Toolbox, agents: AgentTree
    ) -> None:
        self._runs = runs
        self._toolbox = toolbox
        self._agents = agents
        self._store = services.store
        self._models = services.models
        self._check_open = services.lifetime.check_open

    def info(self) -> AgentInfo:
        """Describe the agent. An unusable model counts as ready: a prompt reports the problem."""
        is_busy = bool(self._runs.live())
        models = self._models.current
        named = models.choose("large")
        if named is None:
            return AgentInfo(is_busy=is_busy)
        info = models.info(named)
        return AgentInfo(is_busy=is_busy, is_ready=True, model=info, model_cfg=named)

    def small_model(self, provider_id: str) -> SelectedModel:
        return self._models.current.small_of(provider_id)

    # --- prompts and summaries

    async def prompt(self, body: Prompt) -> RunId:
        """Accept a prompt; it is durable when this returns.

        The same id with the same content is the same run, whatever its state; the same id with
        other content is refused.
        """
        run_id, digest = RunId(body.run_id), digest_of(body)
        # A run that has ended keeps its answer, whatever has changed since. It must not be live
        # meanwhile: its session would be busy, and a cancel would cover it.
        if run_id and self._runs.find(run_id) is None and await self._was_accepted(run_id, digest):
            return run_id
        if not run_id or self._runs.find(run_id) is None:
            self._check_ready()
            _check_prompt(body)
        asked = RunRequest(
            "prompt",
            body.prompt,
            tuple(body.attachments),
            body.limits,
            body.model,
            ApprovalPolicy(
                bool(run_id) and not body.interactive, self._toolbox.parse_approve(body.approve)
            ),
        )
        asked, duty = await self._assign(SessionId(body.session_id), asked)
        run = self._runs.accept(
            SessionId(body.session_id), asked, run_id=run_id or None, digest=digest, duty=duty
        )
        await asyncio.shield(run.control.accepted)
        return run.id

    async def _assign(
        self, session_id: SessionId, asked: RunRequest
    ) -> tuple[RunRequest, AgentDuty | None]:
        """Assign a request in an agent's session to that agent, with its model and budget."""
        # Never wait for a session of people, to keep prompts in order.
        if not self._agents.has_session(session_id):
            return asked, None
        found = await self._agents.find_duty(session_id)
        if found is None:
            return asked, None
        agent, duty = found
        limits = agent.budget if asked.limits == Limits() else asked.limits
        return replace(asked, model=asked.model or agent.selected, limits=limits), duty

    async def _was_accepted(self, run_id: RunId, digest: str) -> bool:
        """Return True if a run that is no longer live had this id; raises `RunIdReused`."""
        known = await self._store.read(partial(find_stored, run_id=run_id))
        if known is not None and known.digest != digest:
            raise RunIdReused(run_id)
        return known is not None

    def _check_ready(self) -> None:
        """Check first that a model is selected: without one no request can be served."""
        self._check_open()
        if self._models.current.choose("large") is None:
            raise AgentNotReady

    async def steer(self, session_id: SessionId, prompt: str) -> Run:
        """Send a message to the running turn; it is read before the next step."""
        self._check_ready()
        body = Prompt(session_id=session_id, prompt=prompt)
        _check_prompt(body)
        asked, duty = await self._assign(session_id, RunRequest("prompt", prompt))
        run = self._runs.accept(session_id, asked, digest=digest_of(body), steers=True, duty=duty)
        await asyncio.shield(run.control.accepted)
        return await self.get_run(run.id)

    async def accept_summary(self, session_id: SessionId) -> LiveRun | None:
        """Start to summarize a session; return None if it is empty."""
        self._check_ready()
        session = await self._store.read(find_session(session_id))
        if session is None:
            raise SessionNotFound(session_id)
        if not session.message_count:
            return None
        asked, duty = await self._assign(session_id, RunRequest("summary"))
        # The server makes it, and it is not an assignment; but a cancel of the agents above stops
        # it.
        above = () if duty is None else duty.above
        run = self._runs.accept(session_id, asked, above=above)
        await asyncio.shield(run.control.accepted)
        return run

    async def summarize(self, session_id: SessionId) -> None:
        """Summarize a session and wait for it; raises `ModelFailed`."""
        run = await self.accept_summary(session_id)
        if run is None:
            return
        await run.control.ended.wait()
        if run.control.ending is None:
            raise WorkspaceClosing  # It has not ended; the next start recovers it.
        if run.control.ending.failed:
            raise ModelFailed(
                run.control.ending.title, run.control.ending.details or run.control.ending.title
            )

    # --- stopping

    async def cancel(self, session_id: SessionId) -> None:
        """Stop every live run of a session; durable when this returns."""
        await _wait_all(self._runs.cancel_session(session_id))

    async def clear(self, session_id: SessionId) -> None:
        """Stop the waiting runs of a session."""
        await _wait_all(self._runs.cancel(self._runs.queued(session_id), "queue"))

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        """Stop one run and report the result after a bounded wait."""
        run = self._runs.find(run_id)
        if run is None:
            stored = await self.get_run(run_id)
            if stored.state == "ended":
                return CancelAnswer("already_ended", stored)
            if stored.state == "held":
                return CancelAnswer("canceled", await self.drop(run_id))
            run = self._runs.find(run_id)  # A person started it meanwhile.
            if run is None:
                return CancelAnswer("already_ended", await self.get_run(run_id))
        await _wait_all(self._runs.cancel_run(run))
        try:
            async with asyncio.timeout(CANCEL_WAIT_S):
                await run.control.ended.wait()
        except TimeoutError:
            return CancelAnswer("not_stopped", await self.get_run(run_id))
        if run.control.ending is None:
            raise WorkspaceClosing
        return CancelAnswer(run.control.settled or "finished_first", await self.get_run(run_id))

    # --- reading

    async def get_run(self, run_id: str) -> Run:
        # Published: a run that is shown as ended no longer makes its session busy.
        run, _ = await self._store.read_published(find_run(run_id))
        if run is None:
            raise RunNotFound(run_id)
        return self._present(run)

    async def list_runs(self, session_id: str, state: State | None) -> list[Run]:
        """Return the runs, latest first."""
        # The store does not know whether a run waits.
        stored = "" if state in ("waiting", "ending") else state or ""
        runs, _ = await self._store.read_published(list_runs(session_id, stored, RUNS_SHOWN))
        shown = [self._present(run) for run in runs]
        return [run for run in shown if state is None or run.state == state]

    def queue(self, session_id: SessionId) -> list[QueuedPrompt]:
        waiting = self._runs.queued(session_id)
        return [QueuedPrompt(run.id, run.asked.prompt) for run in waiting]

    def _present(self, run: Run) -> Run:
        live = self._runs.find(run.id)
        if live is None:
            return run
        if live.shown_state in ("ending", "waiting"):
            run.state = live.shown_state  # The store cannot know this state, or does not store it.
        return run

    # --- the queue

    async def edit(self, run_id: str, prompt: str) -> Run:
        """Change the prompt of a waiting run; raises `RunStarted` if it no longer waits."""
        self._check_open()
        run = await self._get_waiting(run_id)
        while (changing := run.control.changing) is not None and not changing.done():
            await asyncio.wait({changing})  # One after the other, as each may fail alone.
            run = await self._get_waiting(run_id)
        _check_prompt(Prompt(run.session_id, prompt, attachments=list(run.asked.attachments)))
        await asyncio.shield(self._runs.edit(run, prompt))
        return await self.get_run(run_id)

    async def order(self, session_id: SessionId, run_ids: Sequence[RunId]) -> list[QueuedPrompt]:
        """Reorder the queue; raises `QueueDiffers` if it has other runs by now."""
        self._check_open()
        waiting = self._runs.queued(session_id)
        if sorted(run_ids) != sorted(run.id for run in waiting):
            raise QueueDiffers
        if not waiting:
            return []
        await asyncio.shield(self._runs.reorder(session_id, run_ids))
        return self.queue(session_id)

    async def _get_waiting(self, run_id: str) -> LiveRun:
        run = self._runs.find(run_id)
        if run is None:
            await self.get_run(run_id)  # Raises if it never existed.
        if run is None or not run.is_waiting:
            raise RunStarted(run_id)
        return run

    # --- held runs

    async def start(self, run_id: str) -> Run:
        """Continue a held run; raises `RunNotHeld` and `ModelMissing`."""
        self._check_open()
        held, body = await self._get_held(run_id)
        if reason := self._models.current.why_not(held.run.provider, held.run.model):
            raise ModelMissing(reason)
        await asyncio.shield(self._runs.release(held, body).control.accepted)
        return await self.get_run(run_id)

    async def drop(self, run_id: str) -> Run:
        """End a held or waiting run without a trace in its conversation."""
        if (live := self._runs.find(run_id)) is not None:
            if not live.is_waiting:
                raise RunStarted(run_id)
            await _wait_all(self._runs.cancel_run(live))
        else:
            held, _ = await self._get_held(run_id)
            dropped = self._store.write(
                drop_run(held.run.id), lambda _: self._runs.forget_held(held.run.id)
            )
            await asyncio.shield(dropped)
        return await self.get_run(run_id)

    async def _get_held(self, run_id: str) -> tuple[StoredRun, RunBody]:
        def query(connection: Connection) -> tuple[StoredRun | None, RunBody]:
            return find_stored(connection, run_id), body_of(connection, run_id)

        found, body = await self._store.read(query)
        if found is None:
            raise RunNotFound(run_id)
        if found.run.state != "held":
            raise RunNotHeld(run_id, found.run.state)
        return found, body


async def _wait_all(commits: Iterable[asyncio.Future[list[RunId]]]) -> None:
    for commit in commits:
        await asyncio.shield(commit)


def _check_prompt(body: Prompt) -> None:
    """Validate a prompt; raises `InvalidRequest` and `TooLarge`."""
    if not body.session_id:
        raise InvalidRequest("session id is missing")
    if body.run_id and not _RUN_ID.fullmatch(body.run_id):
        raise InvalidRequest("run_id must be 1 to 200 visible ASCII characters", hint="use a UUID")
    if len(body.prompt) > PROMPT_CHARS_MAX:
        raise TooLarge(f"prompt may have at most {PROMPT_CHARS_MAX} characters")
    if len(body.attachments) > ATTACHMENTS_MAX:
        raise TooLarge(f"a prompt may have at most {ATTACHMENTS_MAX} attachments")
    for attachment in body.attachments:
        _check_attachment(attachment)
    has_text_file = any(a.mime_type.startswith("text/") for a in body.attachments)
    if not body.prompt.strip() and not has_text_file:
        raise InvalidRequest("prompt is empty")
    check_limits(body.limits)


def _check_attachment(attachment: Attachment) -> None:
    name = attachment.file_name or attachment.file_path or "attachment"
    if len(attachment.content) > ATTACHMENT_BYTES_MAX:
        raise TooLarge(f"{name} may have at most {ATTACHMENT_BYTES_MAX} bytes")
    if not attachment.mime_type.startswith(MIME_TYPES):
        raise InvalidRequest(
            f"{name} has the unsupported type {attachment.mime_type!r}",
            hint="attach text or an image",
        )
