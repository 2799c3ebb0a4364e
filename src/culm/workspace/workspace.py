"""One workspace: the store, events, messages, runs and attached clients of a directory.

Owns everything that ends with the workspace. `claims.py` decides when that is, and `registry.py`
carries it out.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from culm.clock import Timer
from culm.config.documents import Edit
from culm.errors import (
    StoreBusy,
    TooLarge,
)
from culm.events.hub import Hub, TransientEvent
from culm.events.views import Cursor
from culm.model.choice import Models
from culm.run.messages import Messages
from culm.run.project_context import ProjectContext, context_paths_of
from culm.run.recovery import RecoveryReport, recover
from culm.run.runs import Runs
from culm.run.turn import TurnContext, current_price
from culm.services import ServerServices
from culm.store.agents import agents_at_work
from culm.store.base import Connection, StoredEvent, Tx
from culm.store.messages import (
    all_messages,
    close_open_messages,
    messages_of_session,
    restore_text,
)
from culm.store.runs import open_runs
from culm.store.sessions import (
    all_sessions,
)
from culm.store.store import TRIM_MAX, Store, trim
from culm.store.text_tail import shown_outputs
from culm.wire.agents import Agent as SubAgent
from culm.wire.codec import encode
from culm.wire.messages import RawMessage, Session
from culm.wire.runs import Run, RunChanged
from culm.wire.workspaces import Present, Process, Snapshot, StoreHealth
from culm.workspace.agent_service import AgentService
from culm.workspace.claims import RunsChanged, WorkspaceFate, WorkspaceLifetime
from culm.workspace.config import ConfigOrigins, WorkspaceConfig
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.run_service import RunService
from culm.workspace.services import WorkspaceServices
from culm.workspace.session_service import SessionService
from culm.workspace.toolbox import Toolbox

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # The time limit for the last writes of a closing workspace.
HEAL_EVERY_S = 5.0  # The retry interval of a failed store.
TRIM_EVERY_S = 600.0  # The interval for trimming the event log.
TRIM_EVERY = 10_000  # It is also trimmed after this many new events.
SNAPSHOT_MESSAGES_MAX = 50_000


class LiveWorkspace:
    """An open workspace. Created by `open_workspace`. Implements `StreamState`."""

    def __init__(
        self,
        about: WorkspaceInfo,
        store: Store,
        origins: ConfigOrigins,
        server: ServerServices,
        tasks: asyncio.TaskGroup,
        on_fate: Callable[[WorkspaceFate], None],
        env: Mapping[str, str],
    ) -> None:
        """Build the parts of a workspace; `on_fate` is called when it is no longer needed.

        Parts that need each other get this workspace or a method of it, which they use only after
        all of them are built: the hub shows the state of the others, tools start agents, whose runs
        use the tools, and the turn of an agent's run belongs to the agents.
        """
        clock, ids, settings = server.clock, server.ids, server.settings
        self.about = about
        self.store = store
        self.clock = clock
        self.configuration = WorkspaceConfig(about, origins, store, base_env=server.env, env=env)
        self.hub = Hub(
            store.epoch,
            store.seq,
            clock,
            self,
            streams_max=settings.streams_max,
            buffer_bytes_max=settings.stream_buffer_bytes,
        )
        self.messages = Messages(store, clock, ids, self.hub.publish_delta)
        self.lifetime = WorkspaceLifetime(clock, settings, self.hub.publish_transient, on_fate)
        self._server = server
        self._models = Models(self.configuration, server.make_model, self.configuration.run_command)
        services = WorkspaceServices(
            about=about,
            server=server,
            tasks=tasks,
            store=store,
            configuration=self.configuration,
            hub=self.hub,
            messages=self.messages,
            models=self._models,
            lifetime=self.lifetime,
        )
        self.toolbox = Toolbox(services, lambda tooling: self.agents.make_tools(tooling))
        self.gate = self.toolbox.gate
        context = TurnContext(
            path=str(about.path),
            store=store,
            messages=self.messages,
            models=self._models,
            tools=self.toolbox.tools,
            gate=self.gate,
            read_project_context=self._read_project_context,
            publish=self.hub.publish_transient,
            find_left=self.toolbox.find_left,
            run_elsewhere=lambda run, journal: self.agents.turns.run_turn(run, journal),
            clock=clock,
            ids=ids,
            settings=settings,
            tasks=tasks,
        )
        self.runs = Runs(context, self._count_work)
        self.agents = AgentService(services, context, self.runs, self.toolbox, self._count_work)
        self.agent = RunService(services, self.runs, self.toolbox, self.agents.agents)
        self.sessions = SessionService(services, self.runs, self.toolbox, self.agents)
        self._trim_timer: Timer | None = None
        self._heal_timer: Timer | None = None
        self._trimmed_at = store.seq
        # The store is older than its workspace, whose hub continues at its last event.
        store.publish = self._publish
        store.on_health = self._publish_health

    async def processes(self) -> list[Process]:
        """Return its running processes: of calls and jobs, and the workers of agents."""
        return [*await self.agents.workers(), *await self.toolbox.processes()]

    @property
    def at_work(self) -> int:
        """The number of runs and letters that keep it open without a client."""
        return len(self.runs.live()) + self.agents.mail.busy

    def _count_work(self) -> None:
        self.lifetime.apply(RunsChanged(self.at_work))

    async def change_config(self, scope: int, edit: Edit) -> None:
        """Change the document of a scope; raises `InvalidRequest` if the result is invalid."""
        self.lifetime.check_open()
        await self.configuration.change(scope, edit)

    async def _read_project_context(self) -> ProjectContext:
        try:
            paths = context_paths_of(self.configuration.shown.options)
            return await self._server.read_project_context(
                self.about.path, paths, self.clock.now_s()
            )
        except Exception:  # boundary: a model works without the context
            log.exception("cannot read the project context of %s", self.about.path)
            return ProjectContext(str(self.about.path))

    async def snapshot(self, wanted: frozenset[str] | None) -> Snapshot[RawMessage]:
        """Read the state at one cursor, with messages of the `wanted` sessions, or of all if None.

        Raises `TooLarge`.
        """
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

        found, seq = await self.messages.read(query)
        if len(found) > SNAPSHOT_MESSAGES_MAX:
            raise TooLarge(
                f"more than {SNAPSHOT_MESSAGES_MAX} messages", hint="name the sessions you show"
            )
        return Snapshot(
            cursor=str(Cursor(self.store.epoch, seq)),
            sessions=sessions,
            messages=found,
            runs=runs,
            agents=agents,
            presence=list(self.lifetime.presence()),
            store=self.store.health,
        )

    # --- events

    def _publish(self, events: tuple[StoredEvent, ...]) -> None:
        self.hub.publish(events)
        self.agents.on_published(events)
        if events[-1].seq - self._trimmed_at > TRIM_EVERY:
            self._trimmed_at = events[-1].seq
            self._trim()

    def state_events(self) -> Iterable[TransientEvent]:
        # An unnamed `deleted` event clears the presence list; the events below fill it again.
        nobody = Present("", "", attached=False)
        yield TransientEvent("presence_changed", "", encode(nobody), "deleted")
        for present in self.lifetime.presence():
            yield TransientEvent("presence_changed", "", encode(present))
        yield TransientEvent("store_health", "", encode(self.store.health))
        for shown in self.runs.state_events():
            type_ = "run_changed" if isinstance(shown, RunChanged) else "queue_changed"
            yield TransientEvent(type_, shown.session_id, encode(shown))
        yield from self.gate.state_events()
        yield from self.agents.state_events()

    def _publish_health(self, health: StoreHealth) -> None:
        self.hub.publish_transient(TransientEvent("store_health", "", encode(health)))
        if health.state != "failing":
            self.configuration.on_healthy_store()
        elif self.store.is_failing:
            self.runs.on_store_failing()
        if health.state == "failing" and not self.store.damaged and self._heal_timer is None:
            self._heal_timer = self.clock.call_later(HEAL_EVERY_S, self._heal)

    def _heal(self) -> None:
        """Detect that the cause is gone, even if nothing is written."""
        self._heal_timer = None
        if self.store.health.state == "failing" and not self.lifetime.closing:
            self._heal_timer = self.clock.call_later(HEAL_EVERY_S, self._heal)
            self.store.probe_write()

    # --- lifecycle

    async def start(self, alive_s: float | None) -> None:
        """Repair the state after an unclean end, before anything is published.

        `alive_s` is the last sign of life of a server here; waiting runs continue if it is recent.
        """
        await self.configuration.load()  # It determines which runs can continue.
        await self.toolbox.start()
        await self.agents.mail.drop_late()
        away_s = 0.0 if alive_s is None else max(0.0, self.clock.now_s() - alive_s)
        records = self.store.tail.recovered
        unit = recover(
            away_s,
            self._server.settings.away_s_max,
            self._models.current.why_not,
            partial(current_price, self._models.current),
            self._server.ids,
            shown_outputs(records),
        )

        def restore_and_recover(tx: Tx) -> RecoveryReport:
            restore_text(records)(tx)
            return unit(tx)

        recovered = await self.store.write(restore_and_recover)
        await self.store.tail.clear()
        if recovered.ended or recovered.held:
            text = "%s: recovery ended %d run(s), held %d and resumed %d"
            counts = (recovered.ended, len(recovered.held), len(recovered.resumed))
            log.warning(text, self.about.path, *counts)
        await self.agents.prepare()
        self.runs.resume(recovered)

    def trim_in_time(self) -> None:
        """Trim the event log now and at every interval."""
        self._trim_timer = self.clock.call_later(TRIM_EVERY_S, self.trim_in_time)
        self._trim()

    def _trim(self) -> None:
        keep_s, keep = self._server.settings.retention_s, self._server.settings.retention_events

        def again(gone: int) -> None:
            if gone >= TRIM_MAX and not self.lifetime.closing:
                self._trim()

        self.store.write(trim(keep_s, keep), again)

    async def stop(self) -> None:
        """Close all open state correctly, then end every stream. Bounded."""
        self.lifetime.close()
        self.configuration.close()
        for timer in (self._trim_timer, self._heal_timer):
            if timer is not None:
                timer.cancel()
        self.agents.close()
        await self.runs.stop(for_good=self.lifetime.is_abandoned)
        await self.agents.stop()
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


@asynccontextmanager
async def open_workspace(
    about: WorkspaceInfo,
    store: Store,
    origins: ConfigOrigins,
    server: ServerServices,
    on_fate: Callable[[WorkspaceFate], None],
    *,
    env: Mapping[str, str] | None = None,
    alive_s: float | None = None,
) -> AsyncGenerator[LiveWorkspace]:
    """Open a workspace, and stop it when the block ends; `alive_s` as in `start`."""
    async with asyncio.TaskGroup() as tasks:
        workspace = LiveWorkspace(about, store, origins, server, tasks, on_fate, env or {})
        await workspace.start(alive_s)
        await workspace.agents.start()
        workspace.trim_in_time()
        watching = tasks.create_task(
            workspace.configuration.watch(server.clock), name="configuration"
        )
        try:
            yield workspace
        finally:
            watching.cancel()
            await workspace.stop()
