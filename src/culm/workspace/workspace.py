"""One directory's workspace: its store, its events, its messages, and who is attached.

Owns everything that ends with the workspace. When it ends is `claims.py`'s decision and
`registry.py`'s work.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

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
    WorkspaceClosing,
    WorkspaceNotFound,
)
from culm.events.hub import Hub, TransientEvent
from culm.ids import ClientId, Ids, SessionId
from culm.model.choice import Models
from culm.run.journal import TurnJournal
from culm.run.live_run import AgentDuty, LiveRun
from culm.run.messages import Messages
from culm.run.project_context import context_paths_of
from culm.run.recovery import recover
from culm.run.runs import Runs
from culm.run.system_prompt import ProjectContext
from culm.run.turn import World
from culm.settings import Settings
from culm.store import log as event_log
from culm.store.agents import StoredAgent
from culm.store.base import StoredEvent
from culm.store.messages import close_open_messages
from culm.store.sessions import (
    add_session,
    delete_session,
    find_session,
    rename_session,
    top_sessions,
)
from culm.store.store import Store
from culm.wire.agents import Agent as SubAgent
from culm.wire.codec import encode
from culm.wire.config import Config
from culm.wire.endings import Ending
from culm.wire.messages import RawMessage
from culm.wire.processes import Process
from culm.wire.runs import RunChanged
from culm.wire.sessions import Session
from culm.wire.state import Present, Snapshot, StoreHealth
from culm.workspace.about import WorkspaceInfo
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
from culm.workspace.run_service import RunService
from culm.workspace.session_files import SessionFiles
from culm.workspace.snapshots import take_snapshot
from culm.workspace.toolbox import Equipment, Toolbox

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # What a closing workspace spends on its last writes.
HEAL_EVERY_S = 5.0  # A store that failed is tried again this often.
TRIM_EVERY_S = 600.0  # The log is trimmed this often ...
TRIM_EVERY = 10_000  # ... and whenever it has grown by this many events.
TITLE_CHARS_MAX = 10_000  # A listing repeats the title of every session.
SESSION_ID_CHARS_MAX = 512  # A child's id is made of its parent's message and call.


class LiveWorkspace:
    """Made by `open_workspace`."""

    def __init__(
        self,
        about: WorkspaceInfo,
        store: Store,
        origins: ConfigOrigins,
        equipment: Equipment,
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
            base_env=equipment.env,
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
            lambda: self.configuration.present,
            equipment.make_model,
            self.configuration.run_command,
        )
        self.configuration.on_change = self._models.forget
        self.toolbox = Toolbox(
            about.id,
            about.path,
            about.root,
            store,
            self.messages,
            self.configuration,
            equipment,
            tasks,
            clock,
            ids,
            tell=self.hub.publish_transient,
            is_watched=lambda: self.claims.is_watched(),
            skip=about.yolo,
        )
        self.gate = self.toolbox.gate
        world = self._world(clock, ids, cfg, tasks)
        self.runs = Runs(world, lambda _: self._count_work())
        means = (self.toolbox, self.configuration, about, equipment)
        self._agent_service = make_agent_service(
            world, self.runs, *means, self._check_open, self._count_work
        )
        self.files = SessionFiles(store, self._check_open)
        self.agent = RunService(self.runs, store, self._models, self._find_duty, self._check_open)
        self.claims = Claims()
        self.closing = False
        self._is_abandoned = False  # Its runs were left alone too long: none goes on waiting.
        self.on_fate: Callable[[WorkspaceFate], None] = _keep
        self._look_at = equipment.read_project_context
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
        store.tell = self._publish
        store.on_health = self._publish_health

    def _world(self, clock: Clock, ids: Ids, cfg: Settings, tasks: asyncio.TaskGroup) -> World:
        return World(
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
        """Its agents; raises `NotBuilt` where there is nobody to do what they are given."""
        if self._agent_service is None:
            raise NotBuilt("agents: this server has no workers")
        return self._agent_service

    async def processes(self) -> list[Process]:
        """What runs for it now: processes of calls and jobs, and workers of agents."""
        workers = [] if self._agent_service is None else await self._agent_service.workers()
        return [*workers, *await self.toolbox.processes()]

    # --- who is attached

    @property
    def at_work(self) -> int:
        """How many runs and letters need it, though no client may be there."""
        return len(self.runs.live()) + (
            0 if self._agent_service is None else self._agent_service.mail.busy
        )

    def _count_work(self) -> None:
        self.claim(RunsChanged(self.at_work))

    def claim(self, what: Input) -> None:
        """Put one input through the claims and do what they ask for."""
        if self.closing:
            return  # Its fate is decided.
        before = self.claims
        step = on_claim(before, what, self._graces)
        self.claims = step.claims
        if step.arm is not None:
            self._arm(step.arm)
        self._publish_presence(before)
        if step.fate is not WorkspaceFate.KEEP:
            self._is_abandoned = step.fate is WorkspaceFate.INTERRUPT
            self.on_fate(step.fate)

    def open_stream(self, client_id: ClientId, *, interactive: bool = False) -> int:
        """Count a stream of this client; returns what `close_stream` wants back."""
        if self.closing:
            raise WorkspaceNotFound
        self.check_room(client_id)
        self.claim(StreamOpened(client_id, interactive))
        return self.claims.by_client[client_id].birth

    def check_room(self, client_id: ClientId) -> None:
        """Raises `LimitExceeded` if one more client would be one too many."""
        if client_id not in self.claims.by_client and (
            len(self.claims.by_client) >= self._settings.clients_max
        ):
            raise LimitExceeded("clients of this workspace", self._settings.clients_max)

    def close_stream(self, client_id: ClientId, birth: int, *, interactive: bool = False) -> None:
        self.claim(StreamClosed(client_id, birth, interactive))

    def select(self, client_id: ClientId, session_id: str) -> None:
        """Say which session a client looks at; needs a live stream."""
        claim = self.claims.by_client.get(client_id)
        if claim is None or not claim.streams:
            raise ClientNotAttached
        if len(session_id) > SESSION_ID_CHARS_MAX:
            raise InvalidRequest(f"session_id may have at most {SESSION_ID_CHARS_MAX} characters")
        self.claim(Selected(client_id, session_id))

    def _arm(self, arm: ArmTimer) -> None:
        """One timer per client is enough: a newer one makes the older one's report void."""
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
        """Nothing is waited for where a session has its own agent: prompts keep their order."""
        if self._agent_service is None or not self._agent_service.agents.has_session(session_id):
            return None
        return await self._agent_service.agents.find_duty(session_id)

    # --- configuration

    @property
    def config(self) -> Config:
        return self.configuration.shown

    async def change_config(self, scope: int, edit: Edit) -> None:
        """Change the document of a scope; raises `InvalidRequest` if no client could read it."""
        self._check_open()
        await self.configuration.change(scope, edit)

    async def _read_project_context(self) -> ProjectContext:
        try:
            paths = context_paths_of(self.configuration.shown.options)
            return await self._look_at(self.about.path, paths, self.clock.now_s())
        except Exception:  # boundary: a model can be asked without
            log.exception("cannot look around in %s", self.about.path)
            return ProjectContext(str(self.about.path))

    # --- the state at once

    async def snapshot(self, sessions: frozenset[str] | None) -> Snapshot[RawMessage]:
        """The stored state at one cursor; messages of `sessions`, or of all if None."""
        return await take_snapshot(self.store, self.messages, self.presence(), sessions)

    def _present(self, session: Session) -> Session:
        session.attached_clients = self.claims.attached_to(session.id)
        session.is_busy = self.runs.is_busy(session.id)
        return session

    def _check_open(self) -> None:
        if self.closing:
            raise WorkspaceClosing

    # --- telling

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
        # Without a name and `deleted`: whoever was there before is not, unless told again.
        nobody = Present("", "", attached=False)
        yield TransientEvent("presence_changed", "", encode(nobody), "deleted")
        for present in self.presence():
            yield TransientEvent("presence_changed", "", encode(present))
        yield TransientEvent("store_health", "", encode(self.store.health))
        for shown in self.runs.shown():
            type_ = "run_changed" if isinstance(shown, RunChanged) else "queue_changed"
            yield TransientEvent(type_, shown.session_id, encode(shown))
        yield from self.gate.shown()
        if self._agent_service is not None:
            yield from self._agent_service.shown()

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
        """Find out that the cause is gone, even if nobody writes."""
        self._heal_timer = None
        if self.store.health.state == "failing" and not self.closing:
            self._heal_timer = self.clock.call_later(HEAL_EVERY_S, self._heal)
            self.store.try_again()

    # --- life

    async def start(self, alive_s: float | None) -> None:
        """Repair what an unclean end left, before anybody is told anything.

        `alive_s` is when a server was last here; what waited goes on if that is not long ago.
        """
        await self.configuration.load()  # Whether a run can go on depends on it.
        await self.toolbox.start()
        if self._agent_service is not None:
            await self._agent_service.mail.drop_late()
        away_s = 0.0 if alive_s is None else max(0.0, self.clock.now_s() - alive_s)
        unit = recover(away_s, self._settings.away_s_max, self._models.why_not, self._ids)
        recovered = await self.store.write(unit)
        if recovered.ended or recovered.held:
            said = "%s: after the last end %d run(s) were ended, %d are held, %d go on"
            counts = (recovered.ended, len(recovered.held), len(recovered.resumed))
            log.warning(said, self.about.path, *counts)
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
            if gone >= event_log.TRIM_MAX and not self.closing:
                self._trim()

        self.store.write(event_log.trim(keep_s, keep), again)

    async def stop(self) -> None:
        """Close what is open truthfully, then end every stream. Bounded."""
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
                # Of a run that could not end here, the next start closes all that it called.
                if all(run.task is None for run in self.runs.live()):
                    await self.store.write(partial(close_open_messages, but=waiting))
        except (TimeoutError, StoreBusy) as exc:
            log.error("%s: the last writes did not finish: %s", self.about.path, exc or "time-out")
        self.hub.close()


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
    equipment: Equipment,
    clock: Clock,
    ids: Ids,
    settings: Settings,
    *,
    env: Mapping[str, str] | None = None,
    alive_s: float | None = None,
) -> AsyncGenerator[LiveWorkspace]:
    """When the block ends nothing of it runs any more; `alive_s` as for `Workspace.start`."""
    async with asyncio.TaskGroup() as tasks:
        workspace = LiveWorkspace(
            about, store, origins, equipment, clock, ids, settings, tasks, env
        )
        await workspace.start(alive_s)
        watching = tasks.create_task(workspace.configuration.watch(clock), name="configuration")
        try:
            yield workspace
        finally:
            watching.cancel()
            await workspace.stop()
