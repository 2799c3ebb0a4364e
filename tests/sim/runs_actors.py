"""Actors of the simulated server: clients, observers and faults."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from culm.client.stream import ServerEvent
from culm.errors import AgentNotReady, AppError, Conflict, NotFound, RunIdReused, Unavailable
from culm.ids import Ids, RunId, SessionId
from culm.run.live_run import LiveRun
from culm.wire.runs import Attachment, Limits, Prompt, QueueChanged, RunChanged, RunComplete
from culm.workspace.workspace import LiveWorkspace
from tests.sim.runs_outside import Sent, World
from tests.sim.runs_world import Gone, RunServer
from tests.sim.world import SimClient, SimSocket

T = TypeVar("T")

SESSIONS = 2


class Observer(SimClient):
    """Follows by cursor through every cut and crash, and records the events of runs."""

    def __init__(self, server: RunServer, ids: Ids) -> None:
        super().__init__(server, ids)
        self.runs: dict[RunId, RunChanged] = {}
        self.queues: dict[SessionId, QueueChanged] = {}
        self.completed: list[RunComplete] = []
        self.away_s = 0.0  # The delay before its next reconnect.
        self.interactive = False  # A person who could answer is present.

    async def _connection(self) -> None:
        away_s, self.away_s = self.away_s, 0.0
        await asyncio.sleep(away_s)
        await super()._connection()

    async def _serve(self, workspace: LiveWorkspace, socket: SimSocket) -> None:
        try:
            birth = workspace.lifetime.open_stream(self.id, interactive=self.interactive)
        except AppError:
            socket.abort()
            return
        try:
            await super()._serve(workspace, socket)
        finally:
            workspace.lifetime.close_stream(self.id, birth)

    async def _apply(self, event: ServerEvent) -> None:
        await super()._apply(event)
        match event.type:
            case "run_changed":
                changed = event.read(RunChanged)
                self.runs[changed.run_id] = changed
            case "queue_changed":
                queue = event.read(QueueChanged)
                self.queues[queue.session_id] = queue
            case "run_complete":
                self.completed.append(event.read(RunComplete))
            case _:
                pass

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(5):  # A killed server answers nobody.
                await super()._load()
        except TimeoutError:
            raise ConnectionError from None


class Client:
    """Performs random operations and records the answers in the world."""

    def __init__(self, server: RunServer, operations: int = 0, *, patient: bool = False) -> None:
        self.server = server
        self.patient = patient  # It waits for every answer.
        self.world: World = server.world
        self.random = server.loop.random
        self.operations = operations

    async def run(self) -> None:
        for _ in range(self.operations):
            if self.random.random() < 0.5:
                await self.server.file.after(self.random.randint(1, 5), timeout_s=2.0)
            else:
                await asyncio.sleep(self.random.choice((0, 0, 0.0003, 0.02, 0.4, 3.0)))
            await self.server.up.wait()
            with contextlib.suppress(Gone, AgentNotReady, Conflict, NotFound, Unavailable):
                await self.operate()

    async def operate(self) -> None:
        if not self.world.sessions:
            await self.create()
        roll = self.random.random()
        for share, operation in self.operations_of():
            roll -= share
            if roll < 0:
                await operation()
                return

    def operations_of(self) -> Iterator[tuple[float, Callable[[], Awaitable[None]]]]:
        """Operations with their shares."""
        for share, operation in OPERATIONS:
            yield share, partial(operation, self)

    async def _ask(self, serve: Callable[[LiveWorkspace], Awaitable[T]]) -> T:
        patience_s = None
        if not self.patient:
            patience_s = self.random.choice((None, None, None, None, 0, 0.0001, 0.01, 1.0))
        return await self.server.request(serve, patience_s=patience_s)

    def _session(self) -> SessionId:
        if not self.world.sessions:
            raise Gone  # The last one was deleted.
        return self.random.choice(self.world.sessions)

    async def create(self) -> None:
        async def serve(workspace: LiveWorkspace) -> None:
            session = await workspace.sessions.create("Untitled")
            self.world.sessions.append(session.id)

        await self._ask(serve)

    # --- prompts

    async def prompt(self) -> None:
        token = f"p{self.world.number()}."
        given = f"r{token}" if self.random.random() < 0.5 else ""
        sent = Sent(token, self._session(), given, f"{token} do it")
        await self.send(sent, limits=self._limits())

    async def repeat(self) -> None:
        """Repeat a prompt under its id, or send another one under a used id."""
        known = [sent for sent in self.world.sent.values() if sent.given]
        if not known:
            return
        first = self.random.choice(known)
        if self.random.random() < 0.6:
            await self.send(first)
            return
        token = f"p{self.world.number()}."
        await self.send(Sent(token, first.session_id, first.given, f"{token} something else"))

    async def send(self, sent: Sent, limits: Limits | None = None) -> None:
        world = self.world
        world.sent[sent.token] = sent
        sent.limits = sent.limits or limits or Limits()
        files = [Attachment("/f", "f", "text/plain", b"x")] if has_file(sent.token) else []
        body = Prompt(
            *(sent.session_id, sent.text, sent.given, files, sent.limits),
            interactive=sent.interactive,
            approve=sent.approve,
        )

        async def serve(workspace: LiveWorkspace) -> None:
            try:
                run_id = await workspace.agent.prompt(body)
            except RunIdReused:
                others = [s for s in world.sent.values() if s.given == sent.given and s is not sent]
                world.expect(bool(others), "a fresh id is taken", sent)
                raise
            self.answered(sent, run_id)

        await self._ask(serve)

    def answered(self, sent: Sent, run_id: str) -> None:
        """INV-29, EXC-16: an answered prompt is durable, and one id is one run."""
        world = self.world
        world.expect(sent.answered in ("", run_id), "one prompt, two runs", sent, run_id)
        same = {s.token for s in world.sent.values() if s.given and s.answered == run_id}
        world.expect(same <= {sent.token}, "one id, two prompts", sent, same)
        stored = self.server.file.rows("SELECT 1 FROM runs WHERE id = ?", run_id)
        gone = sent.session_id in world.deleted
        world.expect(bool(stored) or gone, "answered before it was stored", sent)
        sent.answered = run_id

    def _limits(self) -> Limits | None:
        if self.random.random() < 0.85:
            return None
        return self.random.choice(
            (
                Limits(steps=1),
                Limits(wall_s=0.5),
                Limits(wall_s=4),
                Limits(tokens=90),
                Limits(cost=1),
            )
        )

    async def steer(self) -> None:
        token = f"s{self.world.number()}."
        sent = Sent(token, self._session(), "", f"{token} and this")
        self.world.sent[token] = sent

        async def serve(workspace: LiveWorkspace) -> None:
            run = await workspace.agent.steer(sent.session_id, sent.text)
            self.answered(sent, run.id)

        await self._ask(serve)

    async def summarize(self) -> None:
        await self.summarize_session(self._session())

    async def summarize_session(self, session_id: SessionId) -> None:
        if self.random.random() < 0.5:
            await self.accept_summary(session_id)
        else:
            with contextlib.suppress(AppError):  # A failure is reported to the caller.
                await self._ask(lambda workspace: workspace.agent.summarize(session_id))

    async def accept_summary(self, session_id: SessionId) -> None:
        await self._ask(lambda workspace: workspace.agent.accept_summary(session_id))

    # --- stopping

    async def cancel(self) -> None:
        await self.cancel_session(self._session())

    async def cancel_session(self, session_id: SessionId) -> None:
        world = self.world

        async def serve(workspace: LiveWorkspace) -> None:
            line = list(workspace.runs.line(session_id))
            fresh = [run for run in line if not run.cancelled]
            going = [run for run in fresh if run.stop is None]
            world.tried |= {run.id for run in fresh}
            world.cancels[session_id] += bool(fresh)
            await workspace.agent.cancel(session_id)
            world.covered |= {run.id for run in line if _is_accepted(run)}
            world.sealed |= {run.id for run in going if _is_accepted(run)}

        await self._ask(serve)

    async def clear(self) -> None:
        session_id, world = self._session(), self.world

        async def serve(workspace: LiveWorkspace) -> None:
            waiting = workspace.runs.queued(session_id)
            world.tried |= {run.id for run in waiting}
            world.cancels[session_id] += bool(waiting)
            await workspace.agent.clear(session_id)
            accepted = {run.id for run in waiting if _is_accepted(run)}
            world.covered |= accepted
            world.sealed |= accepted

        await self._ask(serve)

    async def cancel_run(self) -> None:
        run_id = self._some_run("state <> 'x'")
        world = self.world
        query = "SELECT session_id FROM runs WHERE id = ?"
        session_id = self.server.file.rows(query, run_id)[0][0]

        async def serve(workspace: LiveWorkspace) -> None:
            live = workspace.runs.find(run_id)
            world.tried.add(run_id)
            if live is None or not (live.cancelled or live.control.host):
                world.cancels[session_id] += 1  # Or it is held and being started just now.
            answer = await workspace.agent.cancel_run(run_id)
            if live is not None and _is_accepted(live):
                world.covered.add(run_id)
                known = world.cancel_results.setdefault(run_id, answer.result)
                late = "already_ended" in (known, answer.result)
                world.expect(known == answer.result or late, "two results", run_id, known, answer)

        await self._ask(serve)

    # --- the queue and held runs

    async def edit(self) -> None:
        run_id = self._some_run("state = 'queued'")

        async def serve(workspace: LiveWorkspace) -> None:
            live = workspace.runs.find(run_id)
            if live is not None and live.kind == "prompt":
                text = f"{live.asked.prompt.split()[0]} edited {self.world.number()}"
                await workspace.agent.edit(run_id, text)

        await self._ask(serve)

    async def order(self) -> None:
        session_id = self._session()

        async def serve(workspace: LiveWorkspace) -> None:
            run_ids = [item.run_id for item in workspace.agent.queue(session_id)]
            self.random.shuffle(run_ids)
            if run_ids:
                self.world.ordered.add(session_id)
                await workspace.agent.order(session_id, run_ids)

        await self._ask(serve)

    async def start(self) -> None:
        await self.start_run(self._some_run("state = 'held'"))

    async def start_run(self, run_id: str) -> None:
        await self._ask(lambda workspace: workspace.agent.start(run_id))

    async def drop(self) -> None:
        await self.drop_run(self._some_run("state IN ('held', 'queued')"))

    async def drop_run(self, run_id: RunId) -> None:
        async def serve(workspace: LiveWorkspace) -> None:
            live = workspace.runs.find(run_id)
            if live is not None:
                self.world.cancels[live.session_id] += live.is_waiting
            self.world.tried.add(run_id)
            await workspace.agent.drop(run_id)

        await self._ask(serve)

    async def delete(self) -> None:
        session_id = self._session()

        async def serve(workspace: LiveWorkspace) -> None:
            if not workspace.runs.is_busy(session_id):
                self.world.deleted.add(session_id)
                if session_id in self.world.sessions:
                    self.world.sessions.remove(session_id)
            await workspace.sessions.delete(session_id)

        await self._ask(serve)

    def _some_run(self, where: str) -> RunId:
        rows = self.server.file.rows(f"SELECT id FROM runs WHERE {where} ORDER BY seq DESC LIMIT 4")
        if not rows:
            raise Gone
        return RunId(self.random.choice(rows)[0])


def has_file(token: str) -> bool:
    """Return True if the prompt with this token has an attachment."""
    return token.startswith("p") and token.endswith("3.")


def _is_accepted(run: LiveRun) -> bool:
    """Return False for a run whose acceptance was refused."""
    return run.control.accepted.done() and run.control.accepted.exception() is None


OPERATIONS: tuple[tuple[float, Callable[[Client], Awaitable[None]]], ...] = (
    (0.46, Client.prompt),
    (0.06, Client.repeat),
    (0.06, Client.steer),
    (0.05, Client.summarize),
    (0.10, Client.cancel),
    (0.02, Client.clear),
    (0.06, Client.cancel_run),
    (0.04, Client.edit),
    (0.04, Client.order),
    (0.04, Client.start),
    (0.03, Client.drop),
    (0.02, Client.delete),
    (0.02, Client.create),
)


async def trouble(server: RunServer, observers: Sequence[Observer], *, rest: float = 1.0) -> None:
    """Break something, again and again, and rest in between."""
    dice, file = server.loop.random, server.file

    def repair() -> None:
        file.is_full = file.is_busy = False

    while True:
        await asyncio.sleep(dice.choice((0.001, 0.1, 1.0, 4.0)) * dice.random() * rest)
        await server.up.wait()
        file.group_max = dice.choice((1, 2, 1024))
        roll = dice.random()
        server.world.store_failed |= 0.42 <= roll < 0.7
        if roll < 0.15:
            server.kill()
        elif roll < 0.2:
            file.die_in_text = dice.randint(1, 20)
        elif roll < 0.35:
            file.die = (file.commits + dice.randint(1, 12), dice.choice(("before", "after")))
        elif roll < 0.42:
            server.stop()
        elif roll < 0.52:
            file.bad.update(file.groups + dice.randint(1, 9) for _ in range(3))
        elif roll < 0.6:
            file.is_full = True
            server.loop.call_later(dice.choice((0.0001, 0.001, 0.5, 8.0)), repair)
        elif roll < 0.7:
            file.is_busy = True
            server.loop.call_later(dice.choice((0, 0.0001, 0.3)), repair)
        elif roll < 0.8:
            dice.choice(observers).cut()
        elif roll < 0.85:
            for observer in observers:
                observer.away_s = dice.choice((5.0, 30.0, 100.0))
                observer.cut()
        else:
            dice.choice(observers).sleepy = dice.choice((0.0, 0.5, 3.0))
