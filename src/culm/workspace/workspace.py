"""One workspace: the store, events, messages, runs and attached clients of a directory.

Owns everything that ends with the workspace. `claims.py` decides when that is, and `registry.py`
carries it out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from culm.clock import Clock, Timer
from culm.config.documents import Edit
from culm.errors import (
    ClientNotAttached,
    InvalidRequest,
    LimitExceeded,
    NotBuilt,
    SessionBusy,
    SessionNotFound,
    StoreBusy,
    TooLarge,
    WorkspaceClosing,
    WorkspaceNotFound,
)
from culm.events.hub import Hub, TransientEvent
from culm.events.views import Cursor
from culm.ids import ClientId, Ids, SessionId
from culm.model.choice import Models
from culm.run.journal import TurnJournal
from culm.run.live_run import AgentDuty, LiveRun
from culm.run.messages import Messages
from culm.run.project_context import ProjectContext, context_paths_of
from culm.run.recovery import recover
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.settings import Settings
from culm.store.agents import StoredAgent, agents_at_work
from culm.store.base import Connection, StoredEvent
from culm.store.messages import all_messages, close_open_messages, messages_of_session
from culm.store.runs import open_runs
from culm.store.sessions import (
    add_session,
    all_sessions,
    delete_session,
    files_of_session,
    find_session,
    last_read,
    mark_read,
    read_files,
    rename_session,
    top_sessions,
)
from culm.store.store import TRIM_MAX, Store, trim
from culm.tools.files.read_tool import stamp_of
from culm.wire.agents import Agent as SubAgent
from culm.wire.codec import encode
from culm.wire.config import Config
from culm.wire.messages import File, RawMessage, Session
from culm.wire.runs import Ending, Run, RunChanged
from culm.wire.workspaces import Present, Process, Snapshot, StoreHealth
from culm.workspace.agent_service import NO_WORKERS, AgentService, make_agent_service
from culm.workspace.claims import (
    ArmTimer,
    Claims,
    Graces,
    HoldExpired,
    Input,
    RunsChanged,
    Selected,
    StreamClosed,
    StreamOpened,
    WorkspaceFate,
    on_claim,
)
from culm.workspace.config import ConfigOrigins, WorkspaceConfig
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.run_service import RunService
from culm.workspace.toolbox import ServerServices, Toolbox

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # The time limit for the last writes of a closing workspace.
HEAL_EVERY_S = 5.0  # The retry interval of a failed store.
TRIM_EVERY_S = 600.0  # The interval for trimming the event log.
TRIM_EVERY = 10_000  # It is also trimmed after this many new events.
TITLE_CHARS_MAX = 10_000  # A listing repeats the title of every session.
SESSION_ID_CHARS_MAX = 512  # A child's id is made of its parent's message and call.
PATH_CHARS_MAX = 4096  # The limit of the operating system.
NEVER = datetime(1, 1, 1, tzinfo=UTC)  # Go's zero time, which clients show as "never".
SNAPSHOT_MESSAGES_MAX = 50_000


@dataclass(frozen=True, slots=True)
class SessionFiles:
    store: Store
    check_open: Callable[[], None]  # Raises once the workspace is closing.

    async def history(self, session_id: SessionId) -> list[File]:
        return await self.store.read(files_of_session(session_id))

    async def mark_read(self, session_id: str, path: str) -> None:
        """Record that a session has read a file now."""
        self.check_open()
        if not path.startswith("/") or len(path) > PATH_CHARS_MAX:
            raise InvalidRequest(f"path must be absolute, of at most {PATH_CHARS_MAX} characters")
        # The stamp lets the agent change a file that the user attached without reading it again.
        stamp = await asyncio.to_thread(_find_stamp, path)
        await asyncio.shield(self.store.write(mark_read(session_id, path, stamp)))

    async def last_read(self, session_id: str, path: str) -> datetime:
        """Return the time of a session's last read of a file; the year 1 if there was none."""
        at = await self.store.read(last_read(session_id, path))
        return NEVER if at is None else datetime.fromtimestamp(at, UTC)

    async def all_read(self, session_id: SessionId) -> list[str]:
        return await self.store.read(read_files(session_id))


class LiveWorkspace:
    """An open workspace. Created by `open_workspace`."""

    def __init__(
        self,
        about: WorkspaceInfo,
        store: Store,
        origins: ConfigOrigins,
        services: ServerServices,
        clock: Clock,
        ids: Ids,
        cfg: Settings,
        tasks: asyncio.TaskGroup,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.about = about
        self.store = store
        self.configuration = WorkspaceConfig(
            about.id,
            about.path,
            origins,
            store,
            base_env=services.env,
            env=env or {},
            data_directory=str(about.root),
            debug=about.debug,
        )
        self.messages = Messages(store, clock, ids)
        self.hub = Hub(
            store.epoch,
            store.seq,
            clock,
            self.messages,
            streams_max=cfg.streams_max,
            buffer_bytes_max=cfg.stream_buffer_bytes,
        )
        self._models = Models(
            self.configuration, services.make_model, self.configuration.run_command
        )
        self.toolbox = Toolbox(
            about.id,
            about.path,
            about.root,
            store,
            self.messages,
            self.configuration,
            services,
            tasks,
            clock,
            ids,
            publish=self.hub.publish_transient,
            is_watched=lambda: self.claims.is_watched(),
            skip=about.yolo,
        )
        self.gate = self.toolbox.gate
        context = self._context(clock, ids, cfg, tasks)
        self.runs = Runs(context, lambda _: self._count_work())
        fleet_services = (self.toolbox, self.configuration, about, services)
        self._agent_service = make_agent_service(
            context, self.runs, *fleet_services, self._check_open, self._count_work
        )
        self.files = SessionFiles(store, self._check_open)
        self.agent = RunService(
            self.runs, store, self._models, self.toolbox, self._find_duty, self._check_open
        )
        self.claims = Claims()
        self.closing = False
        self._is_abandoned = False  # Its runs had no client for too long: none keeps waiting.
        self.on_fate: Callable[[WorkspaceFate], None] = _keep
        self._read_context = services.read_project_context
        self.clock = clock
        self._ids = ids
        self._settings = cfg
        self._graces = Graces(cfg.create_grace_s, cfg.detach_grace_s, cfg.abandoned_runs_s)
        self._timers: dict[ClientId | None, Timer] = {}
        self._trim_timer: Timer | None = None
        self._heal_timer: Timer | None = None
        self._trimmed_at = store.seq
        self.messages.publish_through(self.hub)
        self.hub.show_on_attach(self._unlogged_state)
        store.publish = self._publish
        store.on_health = self._publish_health

    def _context(
        self, clock: Clock, ids: Ids, cfg: Settings, tasks: asyncio.TaskGroup
    ) -> TurnContext:
        return TurnContext(
            path=str(self.about.path),
            store=self.store,
            messages=self.messages,
            models=self._models,
            tools=self.toolbox.tools,
            gate=self.gate,
            read_project_context=self._read_project_context,
            publish=self.hub.publish_transient,
            find_left=self.toolbox.find_left,
            run_elsewhere=self._run_elsewhere,
            clock=clock,
            ids=ids,
            settings=cfg,
            tasks=tasks,
        )

    async def _run_elsewhere(self, run: LiveRun, journal: TurnJournal) -> Ending:
        return (
            NO_WORKERS
            if self._agent_service is None
            else await self._agent_service.agents.run_turn(run, journal)
        )

    @property
    def agents(self) -> AgentService:
        """The agents of the workspace; raises `NotBuilt` on a server without workers."""
        if self._agent_service is None:
            raise NotBuilt("agents: this server has no workers")
        return self._agent_service

    async def processes(self) -> list[Process]:
        """Return its running processes: of calls and jobs, and the workers of agents."""
        workers = [] if self._agent_service is None else await self._agent_service.workers()
        return [*workers, *await self.toolbox.processes()]

    # --- attached clients

    @property
    def at_work(self) -> int:
        """The number of runs and letters that keep it open without a client."""
        return len(self.runs.live()) + (
            0 if self._agent_service is None else self._agent_service.mail.busy
        )

    def _count_work(self) -> None:
        self.claim(RunsChanged(self.at_work))

    def claim(self, event: Input) -> None:
        """Apply one input to the claims and carry out the result."""
        if self.closing:
            return  # Its fate is decided.
        before = self.claims
        step = on_claim(before, event, self._graces)
        self.claims = step.claims
        if step.arm is not None:
            self._arm(step.arm)
        self._publish_presence(before)
        if step.fate is not WorkspaceFate.KEEP:
            self._is_abandoned = step.fate is WorkspaceFate.INTERRUPT
            self.on_fate(step.fate)

    def open_stream(self, client_id: ClientId, *, interactive: bool = False) -> int:
        """Count a stream of this client; return the number to pass to `close_stream`."""
        if self.closing:
            raise WorkspaceNotFound
        self.check_room(client_id)
        self.claim(StreamOpened(client_id, interactive))
        return self.claims.by_client[client_id].claim_id

    def check_room(self, client_id: ClientId) -> None:
        """Raise `LimitExceeded` if there is no room for another client."""
        if client_id not in self.claims.by_client and (
            len(self.claims.by_client) >= self._settings.clients_max
        ):
            raise LimitExceeded("clients of this workspace", self._settings.clients_max)

    def close_stream(
        self, client_id: ClientId, claim_id: int, *, interactive: bool = False
    ) -> None:
        self.claim(StreamClosed(client_id, claim_id, interactive))

    def select(self, client_id: ClientId, session_id: str) -> None:
        """Record the session that a client shows; requires a live stream."""
        claim = self.claims.by_client.get(client_id)
        if claim is None or not claim.streams:
            raise ClientNotAttached
        if len(session_id) > SESSION_ID_CHARS_MAX:
            raise InvalidRequest(f"session_id may have at most {SESSION_ID_CHARS_MAX} characters")
        self.claim(Selected(client_id, session_id))

    def _arm(self, arm: ArmTimer) -> None:
        """Keep one timer per client: a newer one voids the report of the older one."""
        owner = arm.then.client_id if isinstance(arm.then, HoldExpired) else None
        if older := self._timers.pop(owner, None):
            older.cancel()

        def fire() -> None:
            del self._timers[owner]
            self.claim(arm.then)

        self._timers[owner] = self.clock.call_later(arm.delay_s, fire)

    # --- sessions

    async def create_session(self, title: str) -> Session:
        self._check_open()
        _check_title(title)
        unit = add_session(self._ids.session(), title, sessions_max=self._settings.sessions_max)
        return await asyncio.shield(self.store.write(unit))

    async def get_session(self, session_id: SessionId) -> Session:
        session = await self.store.read(find_session(session_id))
        if session is None:
            raise SessionNotFound(session_id)
        return self._present(session)

    async def list_sessions(self) -> list[Session]:
        sessions = await self.store.read(top_sessions)
        attached = self.claims.attached()
        for session in sessions:
            session.attached_clients = attached[session.id]
            session.is_busy = self.runs.is_busy(session.id)
        return sessions

    async def rename_session(self, session_id: SessionId, title: str) -> Session:
        self._check_open()
        _check_title(title)
        write = self.store.write(rename_session(session_id, title))
        return self._present(await asyncio.shield(write))

    async def delete_session(self, session_id: SessionId) -> None:
        self._check_open()
        if self.runs.of_session(session_id):
            raise SessionBusy

        def deleted(agents: list[StoredAgent]) -> None:
            for one in {session_id, *(stored.agent.session_id for stored in agents)}:
                self.messages.forget_session(one)
                self.runs.forget_session(one)
                self.toolbox.forget_session(one)

        write = self.store.write(delete_session(session_id), deleted)
        agents = await asyncio.shield(write)
        if self._agent_service is not None:
            await self._agent_service.forget(session_id, agents)

    async def _find_duty(self, session_id: str) -> tuple[SubAgent, AgentDuty] | None:
        """Find the agent of a session; never waits for its own, to keep prompts in order."""
        if self._agent_service is None or not self._agent_service.agents.has_session(session_id):
            return None
        return await self._agent_service.agents.find_duty(session_id)

    # --- configuration

    @property
    def config(self) -> Config:
        return self.configuration.shown

    async def change_config(self, scope: int, edit: Edit) -> None:
        """Change the document of a scope; raises `InvalidRequest` if the result is invalid."""
        self._check_open()
        await self.configuration.change(scope, edit)

    async def _read_project_context(self) -> ProjectContext:
        try:
            paths = context_paths_of(self.configuration.shown.options)
            return await self._read_context(self.about.path, paths, self.clock.now_s())
        except Exception:  # boundary: a model works without the context
            log.exception("cannot read the project context of %s", self.about.path)
            return ProjectContext(str(self.about.path))

    # --- snapshots

    async def snapshot(self, sessions: frozenset[str] | None) -> Snapshot[RawMessage]:
        """Read the state at one cursor, with the messages of `sessions`, or of all if None."""
        return await take_snapshot(self.store, self.messages, self.presence(), sessions)

    def _present(self, session: Session) -> Session:
        session.attached_clients = self.claims.attached_to(session.id)
        session.is_busy = self.runs.is_busy(session.id)
        return session

    def _check_open(self) -> None:
        if self.closing:
            raise WorkspaceClosing

    # --- events

    def _publish(self, events: tuple[StoredEvent, ...]) -> None:
        self.hub.publish(events)
        if self._agent_service is not None:
            self._agent_service.on_published(events)
        if events[-1].seq - self._trimmed_at > TRIM_EVERY:
            self._trimmed_at = events[-1].seq
            self._trim()

    def presence(self) -> Iterable[Present]:
        for client_id, claim in self.claims.by_client.items():
            if claim.streams:
                yield Present(client_id, claim.session_id)

    def _unlogged_state(self) -> Iterable[TransientEvent]:
        # An unnamed `deleted` event clears the presence list; the events below fill it again.
        nobody = Present("", "", attached=False)
        yield TransientEvent("presence_changed", "", encode(nobody), "deleted")
        for present in self.presence():
            yield TransientEvent("presence_changed", "", encode(present))
        yield TransientEvent("store_health", "", encode(self.store.health))
        for shown in self.runs.state_events():
            type_ = "run_changed" if isinstance(shown, RunChanged) else "queue_changed"
            yield TransientEvent(type_, shown.session_id, encode(shown))
        yield from self.gate.state_events()
        if self._agent_service is not None:
            yield from self._agent_service.state_events()

    def _publish_presence(self, before: Claims) -> None:
        for client_id in before.by_client.keys() | self.claims.by_client.keys():
            old, new = before.by_client.get(client_id), self.claims.by_client.get(client_id)
            was = old.session_id if old is not None and old.streams else None
            now = new.session_id if new is not None and new.streams else None
            if was != now:
                present = Present(client_id, now or "", attached=now is not None)
                self.hub.publish_transient(TransientEvent("presence_changed", "", encode(present)))

    def _publish_health(self, health: StoreHealth) -> None:
        self.hub.publish_transient(TransientEvent("store_health", "", encode(health)))
        if health.state == "failing":
            self.runs.on_store_failing()
        else:
            self.configuration.on_healthy_store()
        if health.state == "failing" and not self.store.damaged and self._heal_timer is None:
            self._heal_timer = self.clock.call_later(HEAL_EVERY_S, self._heal)

    def _heal(self) -> None:
        """Detect that the cause is gone, even if nothing is written."""
        self._heal_timer = None
        if self.store.health.state == "failing" and not self.closing:
            self._heal_timer = self.clock.call_later(HEAL_EVERY_S, self._heal)
            self.store.probe_write()

    # --- lifecycle

    async def start(self, alive_s: float | None) -> None:
        """Repair the state after an unclean end, before anything is published.

        `alive_s` is the last sign of life of a server here; waiting runs continue if it is recent.
        """
        await self.configuration.load()  # It determines which runs can continue.
        await self.toolbox.start()
        if self._agent_service is not None:
            await self._agent_service.mail.drop_late()
        away_s = 0.0 if alive_s is None else max(0.0, self.clock.now_s() - alive_s)
        unit = recover(away_s, self._settings.away_s_max, self._models.current.why_not, self._ids)
        recovered = await self.store.write(unit)
        if recovered.ended or recovered.held:
            text = "%s: recovery ended %d run(s), held %d and resumed %d"
            counts = (recovered.ended, len(recovered.held), len(recovered.resumed))
            log.warning(text, self.about.path, *counts)
        if self._agent_service is not None:
            await self._agent_service.prepare()
        self.runs.resume(recovered)
        if self._agent_service is not None:
            await self._agent_service.start()
        self._trim_in_time()

    def _trim_in_time(self) -> None:
        self._trim_timer = self.clock.call_later(TRIM_EVERY_S, self._trim_in_time)
        self._trim()

    def _trim(self) -> None:
        keep_s, keep = self._settings.retention_s, self._settings.retention_events

        def again(gone: int) -> None:
            if gone >= TRIM_MAX and not self.closing:
                self._trim()

        self.store.write(trim(keep_s, keep), again)

    async def stop(self) -> None:
        """Close all open state correctly, then end every stream. Bounded."""
        self.closing = True
        self.configuration.close()
        for timer in (*self._timers.values(), self._trim_timer, self._heal_timer):
            if timer is not None:
                timer.cancel()
        if self._agent_service is not None:
            self._agent_service.close()
        await self.runs.stop(for_good=self._is_abandoned)
        if self._agent_service is not None:
            await self._agent_service.stop()
        await self.toolbox.stop()
        waiting = {run.reenters for run in self.runs.live() if run.reenters is not None}
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self.messages.stop()
                # The next start closes the calls of a run that could not end here.
                if all(run.control.turn is None for run in self.runs.live()):
                    await self.store.write(partial(close_open_messages, but=waiting))
        except (TimeoutError, StoreBusy) as exc:
            log.error("%s: the last writes did not finish: %s", self.about.path, exc or "time-out")
        self.hub.close()


def _find_stamp(path: str) -> str:
    try:
        return stamp_of(Path(path).stat())
    except (OSError, ValueError):
        return ""


async def take_snapshot(
    store: Store, messages: Messages, presence: Iterable[Present], wanted: frozenset[str] | None
) -> Snapshot[RawMessage]:
    """Read the state at one cursor, with messages of the `wanted` sessions, or of all if None."""
    sessions: list[Session] = []
    runs: list[Run] = []
    agents: list[SubAgent] = []

    def query(connection: Connection) -> list[RawMessage]:
        sessions[:] = all_sessions(connection)
        runs[:] = open_runs(connection)
        agents[:] = agents_at_work(connection)
        if wanted is None:
            return all_messages(SNAPSHOT_MESSAGES_MAX + 1)(connection)
        return [m for s in sorted(wanted) for m in messages_of_session(s)(connection)]

    found, seq = await messages.read(query)
    if len(found) > SNAPSHOT_MESSAGES_MAX:
        raise TooLarge(
            f"more than {SNAPSHOT_MESSAGES_MAX} messages", hint="name the sessions you show"
        )
    return Snapshot(
        cursor=str(Cursor(store.epoch, seq)),
        sessions=sessions,
        messages=found,
        runs=runs,
        agents=agents,
        presence=list(presence),
        store=store.health,
    )


def _keep(fate: WorkspaceFate) -> None:
    pass


def _check_title(title: str) -> None:
    if len(title) > TITLE_CHARS_MAX:
        raise InvalidRequest(f"title may have at most {TITLE_CHARS_MAX} characters")


@asynccontextmanager
async def open_workspace(
    about: WorkspaceInfo,
    store: Store,
    origins: ConfigOrigins,
    services: ServerServices,
    clock: Clock,
    ids: Ids,
    settings: Settings,
    *,
    env: Mapping[str, str] | None = None,
    alive_s: float | None = None,
) -> AsyncGenerator[LiveWorkspace]:
    """Open a workspace, and stop it when the block ends; `alive_s` as in `start`."""
    async with asyncio.TaskGroup() as tasks:
        workspace = LiveWorkspace(about, store, origins, services, clock, ids, settings, tasks, env)
        await workspace.start(alive_s)
        watching = tasks.create_task(workspace.configuration.watch(clock), name="configuration")
        try:
            yield workspace
        finally:
            watching.cancel()
            await workspace.stop()
