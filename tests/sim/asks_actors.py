"""A server that asks, and people who answer late, twice, concurrently or wrongly."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

from culm.client.stream import ServerEvent
from culm.errors import AppError
from culm.ids import Ids
from culm.store.memory import MemoryDatabase
from culm.tools.base import Tool
from culm.wire.asks import (
    AskChanged,
    AskState,
    PermissionGrant,
    PermissionRef,
    PermissionRequest,
    QuestionAnswer,
    QuestionChanged,
    QuestionRequest,
    QuestionResponse,
)
from culm.wire.codec import decode
from culm.workspace.workspace import LiveWorkspace
from tests.sim.asks_outside import Answer, AnswerAttempt, AskerTool, AskTool, AskWorld, Skip
from tests.sim.loop import SimLoop
from tests.sim.runs_actors import Client, Observer
from tests.sim.runs_disk import Life
from tests.sim.runs_outside import Sent
from tests.sim.runs_world import Gone, RunServer

GRANTING: Sequence[Answer] = ("allow", "allow", "allow", "allow_session", "allow_workspace", "deny")


class AskServer(RunServer):
    """A server whose tools need permission."""

    def __init__(self, loop: SimLoop, world: AskWorld) -> None:
        super().__init__(loop, world)
        self.asks = world
        self.outages = (0.01, 0.5, 5.0, 60.0, 700.0)

    async def _stop(self, life: Life, database: MemoryDatabase) -> None:
        """SIGTERM leaves open asks to the next server."""
        asked = self._asked_alone(life)
        await super()._stop(life, database)
        for ask_id, run_id in asked.items():
            rows = self.file.rows(
                """SELECT 1 FROM asks JOIN runs ON runs.id = run_id
                WHERE asks.id = ? AND asks.state = 'withdrawn' AND outcome = 'interrupted'""",
                ask_id,
            )
            answered = any(given.fits for given in self.asks.given[ask_id])
            lost = rows and not answered and not life.abandoned
            self.world.expect(not lost, "a stop withdrew what was asked", ask_id, run_id)

    def _asked_alone(self, life: Life) -> dict[str, str]:
        """Open asks of this server that belong to the only call of a step."""
        rows = self.file.rows(
            "SELECT message_id FROM calls GROUP BY message_id HAVING count(*) = 1"
        )
        alone = {row[0] for row in rows}
        asks = self.file.rows("SELECT id, run_id, message_id FROM asks WHERE state = 'open'")
        return {
            row["id"]: row["run_id"]
            for row in asks
            if row["message_id"] in alone and life.number not in self.world.reentered[row["run_id"]]
        }

    def _tools(self, life: Life) -> list[Tool]:
        self.asks.version += (
            self.loop.random.random() < 0.3
        )  # The world may change while the server is down.
        about = (self.world, self, life)
        asking: list[Tool] = [
            AskTool(*about, "edit"),
            AskTool(*about, "fetch", "again", parallel=True),
            AskTool(*about, "drift", parallel=True, has_grains=False, drifts=True),
            AskerTool(*about, "question", "again", parallel=True),
        ]
        if self.world.faulty and self.loop.random.random() < 0.1:
            asking.pop(self.loop.random.randrange(len(asking)))  # The tool was removed.
        return [*super()._tools(life), *asking]


class AskObserver(Observer):
    """Records published ask states, in the order of the log."""

    def __init__(self, server: RunServer, ids: Ids) -> None:
        super().__init__(server, ids)
        self.states: dict[str, list[AskState]] = defaultdict(list)
        self.shown: dict[str, AskState] = {}  # The current state of each ask, as a dialog shows it.

    async def _apply(self, event: ServerEvent) -> None:
        await super()._apply(event)
        if event.type == "ask_changed":
            changed = event.read(AskChanged)
            self._note(event, changed.ask_id, changed.state)
        elif event.type == "question_changed":
            asked = event.read(QuestionChanged)
            self._note(event, asked.batch_id, asked.state)

    def _note(self, event: ServerEvent, ask_id: str, state: AskState) -> None:
        self.shown[ask_id] = state
        if event.cursor:  # Without a cursor it is an open ask replayed to a new listener.
            self.states[ask_id].append(state)


class AskClient(Client):
    """A client that also answers asks."""

    def __init__(self, server: AskServer, operations: int = 0, *, patient: bool = False) -> None:
        super().__init__(server, operations, patient=patient)
        self.asks = server.asks
        self.name = f"client {server.world.number()}"

    def operations_of(self) -> Iterator[tuple[float, Callable[[], Awaitable[None]]]]:
        yield 0.16, self.prompt
        yield 0.50, self.answer_some
        yield 0.08, self.answer_at_once
        yield 0.04, self.flip_skip
        yield 0.04, self.revoke
        yield 0.04, self.change_the_world
        for share, operation in super().operations_of():
            yield share * 0.14, operation  # The other operations, less often.

    async def prompt(self) -> None:
        token = f"p{self.world.number()}."
        sent = Sent(token, self._session(), "", f"{token} do it")
        if self.random.random() < 0.5:
            sent.given = f"r{token}"
            sent.interactive = self.random.random() < 0.6
            sent.approve = self.random.choice((None, None, None, None, "allow", "deny"))
        await self.send(sent, limits=self._limits())

    # --- answering

    async def answer_some(self) -> None:
        await self.answer(*await self._pick())

    async def answer_at_once(self) -> None:
        """Several answers to one ask, each by another person."""
        ask_id, kind = await self._pick()

        async def answer() -> None:
            with contextlib.suppress(Gone, AppError):
                await AskClient(self.asks_server).answer(ask_id, kind)

        async with asyncio.TaskGroup() as people:
            for _ in range(self.random.randint(2, 4)):
                people.create_task(answer())

    @property
    def asks_server(self) -> AskServer:
        assert isinstance(self.server, AskServer)
        return self.server

    async def _pick(self) -> tuple[str, str]:
        """Pick an ask: listed as open, stored, or unknown."""
        roll = self.random.random()
        if roll < 0.05:
            return f"nothing {self.world.number()}", self.random.choice(("permission", "question"))
        if roll < 0.4:
            listed: list[tuple[str, str]] = []

            async def serve(workspace: LiveWorkspace) -> None:
                toolbox = workspace.toolbox
                for ask in await toolbox.list_asks(PermissionRequest, "", "open"):
                    listed.append((ask.request.id, "permission"))
                for ask in await toolbox.list_asks(QuestionRequest, "", "open"):
                    listed.append((ask.request.id, "question"))

            await self._ask(serve)
        else:
            which = "" if roll < 0.55 else "WHERE state = 'open'"
            query = f"SELECT id, kind FROM asks {which} ORDER BY no DESC LIMIT 6"
            listed = [(row[0], row[1]) for row in self.server.file.rows(query)]
        if not listed:
            await self.prompt()
            raise Gone
        return self.random.choice(listed)

    async def answer(self, ask_id: str, kind: str) -> None:
        if kind == "permission":
            await self.permit(ask_id, self.random.choice(GRANTING))
        elif self.random.random() < 0.8:
            await self.reply(ask_id)
        else:
            await self.decline(ask_id)

    async def permit(self, ask_id: str, answer: Answer) -> None:
        stored = self.server.file.rows("SELECT digest FROM asks WHERE id = ?", ask_id)
        digest = stored[0][0] if stored and self.random.random() < 0.5 else ""
        fits = self.random.random() < 0.9
        if not fits:
            digest = "of something else"
        body = PermissionGrant(PermissionRef(ask_id), answer, digest)
        given = AnswerAttempt(ask_id, answer, self.name, fits)
        await self._give(given, lambda workspace: workspace.gate.answer(body, self.name))

    async def reply(self, ask_id: str) -> None:
        stored = self.server.file.rows("SELECT request FROM asks WHERE id = ?", ask_id)
        text = f"because {self.world.number()}"
        responses = [QuestionResponse("no such question", fill_in_text=text)]
        fits = bool(stored) and self.random.random() < 0.9
        if fits:
            questions = decode(stored[0][0], QuestionRequest).questions
            responses = [QuestionResponse(questions[0].id, ["a"], text)]
        named = ask_id if self.random.random() < 0.5 else ""
        body = QuestionAnswer(named, responses)
        given = AnswerAttempt(ask_id, "answer", self.name, fits, text)
        await self._give(given, lambda workspace: workspace.gate.answer_questions(body, self.name))

    async def decline(self, ask_id: str) -> None:
        given = AnswerAttempt(ask_id, "cancel", self.name)
        await self._give(
            given, lambda workspace: workspace.gate.cancel_questions(ask_id, self.name)
        )

    async def _give(
        self, given: AnswerAttempt, act: Callable[[LiveWorkspace], Awaitable[bool]]
    ) -> None:
        """Check that a resolved answer is stored and an open ask accepts its answer."""
        world, ask_id = self.asks, given.ask_id

        async def serve(workspace: LiveWorkspace) -> None:
            world.given[ask_id].append(given)
            given.resolved = await act(workspace)
            rows = self.server.file.rows("SELECT * FROM asks WHERE id = ?", ask_id)
            state = rows[0]["state"] if rows else ""
            if given.resolved:
                gone = not rows  # With its session.
                won = gone or (state, rows[0]["answered_by"]) == (given.state, given.by)
                world.expect(won and given.fits, "resolved by another", given, state)
            elif state == "open" and given.fits:
                run = workspace.runs.find(rows[0]["run_id"])
                ends = run is None or run.stop is not None
                world.expect(ends, "an open ask was refused its answer", given)

        await self._ask(serve)

    # --- grants and skip mode

    async def flip_skip(self) -> None:
        session_id = "" if self.random.random() < 0.3 else self._session()
        on, world, life = self.random.random() < 0.4, self.asks, self.server.life
        assert life is not None

        async def serve(workspace: LiveWorkspace) -> None:
            if on:
                world.skips.append(Skip(session_id, life.number))
            before = [skip for skip in world.skips if skip.session_id == session_id]
            await workspace.gate.set_skip(session_id, self.name, on=on)
            if not on:
                for skip in before:
                    skip.ended_s = skip.ended_s or world.loop.time()

        await self._ask(serve)

    async def revoke(self) -> None:
        rows = self.server.file.rows("SELECT id FROM grants")
        if not rows:
            return
        grant_id = self.random.choice(rows)[0]
        self.asks.revoked.add(grant_id)

        async def serve(workspace: LiveWorkspace) -> None:
            await workspace.gate.grants.revoke(grant_id)
            rows = self.server.file.rows("SELECT 1 FROM grants WHERE id = ?", grant_id)
            self.world.expect(not rows, "revoked, and still stored", grant_id)

        await self._ask(serve)

    async def change_the_world(self) -> None:
        self.asks.version += 1


async def trouble_while_asked(server: AskServer) -> None:
    """End the server while it waits for a person, or right when somebody answers."""
    dice, file = server.loop.random, server.file
    while True:
        await file.after(dice.randint(1, 12), timeout_s=5.0)
        await asyncio.sleep(dice.choice((0, 0, 0.0003, 0.01, 1.0)))
        await server.up.wait()
        if not file.rows("SELECT 1 FROM asks WHERE state = 'open'") or dice.random() < 0.6:
            continue
        server.outage_s = dice.choice((0.01, 0.5, 5.0))
        match dice.randrange(4):
            case 0:
                server.kill()
            case 1 | 2:
                server.stop(server.outage_s)
            case _:
                file.die = (file.commits + dice.randint(1, 4), dice.choice(("before", "after")))


async def answer_open_asks(server: AskServer) -> None:
    """Answer every open ask, until cancelled."""
    person = AskClient(server, patient=True)
    while True:
        await asyncio.sleep(2)
        await server.up.wait()
        for row in server.file.rows("SELECT id, kind FROM asks WHERE state = 'open'"):
            with contextlib.suppress(Gone, AppError):
                await person.answer(row["id"], row["kind"])
