"""Actors of a server with agents: clients and faults."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from culm.clock import format_time
from culm.errors import AppError
from culm.ids import LetterId, RunId, SessionId
from culm.mail.letters import Letter, Sender, body_of
from culm.wire.agents import LETTER_KINDS, ChangeBudget, SendLetter, StartAgent
from culm.wire.asks import (
    PermissionGrant,
    PermissionRef,
    QuestionAnswer,
    QuestionRequest,
    QuestionResponse,
)
from culm.wire.codec import decode
from culm.wire.runs import Limits, Prompt
from culm.workspace.workspace import LiveWorkspace
from tests.sim.tree_server import Gone, TreeServer
from tests.sim.tree_workers import TreeWorker
from tests.sim.tree_world import TreeAnswer, TreeWorld

T = TypeVar("T")

PAUSES_S = (0, 0.0003, 0.02, 0.4, 2.0, 5.0)
# Busy sessions; sessions of parent agents occur more than once.
BUSY = """SELECT session_id FROM runs WHERE state = 'active' UNION ALL
    SELECT parent_session_id FROM agents WHERE state <> 'ended' AND parent_session_id <> ''"""
# A session and its descendants.
TREE = """WITH RECURSIVE tree (id) AS (
    SELECT ?1 UNION SELECT sessions.id FROM sessions JOIN tree ON parent_id = tree.id
) SELECT id FROM tree"""
LIMITS = (
    Limits(tokens=4_000),
    Limits(tokens=9_000),
    Limits(steps=5),
    Limits(wall_s=3),
    Limits(wall_s=10),
    Limits(wall_s=30),
)
CANCEL_S = 120.0  # A cancel is settled within this time, whatever the disk does.


class Client:
    """Performs random operations."""

    def __init__(self, server: TreeServer, operations: int) -> None:
        self.server = server
        self.world: TreeWorld = server.world
        self.dice = server.world.dice
        self.operations = operations

    async def run(self) -> None:
        for _ in range(self.operations):
            if self.dice.random() < 0.4:
                await self.world.file.after(self.dice.randint(1, 8), timeout_s=2.0)
            else:
                await asyncio.sleep(self.dice.choice(PAUSES_S))
            with contextlib.suppress(Gone, AppError):
                await self._operate()

    async def _operate(self) -> None:
        roll = self.dice.random()
        for share, operation in OPERATIONS:
            roll -= share
            if roll < 0:
                await operation(self)
                return

    async def _ask(self, serve: Callable[[LiveWorkspace], Awaitable[T]]) -> T:
        patience_s = self.dice.choice((None, None, None, 0.0001, 1.0))
        return await self.server.request(serve, patience_s=patience_s)

    def _session(self) -> SessionId:
        return self.dice.choice(self.world.sessions)

    def _some(self, sql: str) -> str:
        """Pick one result of a query; raises `Gone` if there is none."""
        rows = self.world.rows(sql)
        if not rows:
            raise Gone
        return self.dice.choice(rows)[0]

    def _child(self) -> SessionId:
        return SessionId(self._some("SELECT session_id FROM agents ORDER BY no DESC LIMIT 6"))

    # --- prompts

    async def prompt(self) -> None:
        await self._send_prompt(self._session())

    async def steer(self) -> None:
        """Send a prompt to the session of an agent."""
        await self._send_prompt(self._child())

    async def _send_prompt(self, session_id: SessionId) -> None:
        dice, token = self.dice, f"p{self.world.number()}."
        given = f"r{token}" if dice.random() < 0.4 else ""
        limits = Limits()
        if dice.random() < 0.5:
            limits = dice.choice(LIMITS)
        body = Prompt(
            session_id, f"{token} do it", given, limits=limits, interactive=dice.random() < 0.5
        )

        async def serve(workspace: LiveWorkspace) -> None:
            self.world.accepted[await workspace.agent.prompt(body)] = session_id

        await self._ask(serve)

    # --- stopping

    async def cancel(self) -> None:
        """Cancel a session tree and check that nothing of it continues."""
        session_id = SessionId(self._some(BUSY))

        async def serve(workspace: LiveWorkspace) -> None:
            tree = {row["id"] for row in self.world.rows(TREE, session_id)}
            covered = workspace.runs.of_session(
                session_id
            )  # Including runs that are not stored yet.
            covered += [run for run in workspace.runs.live() if run.session_id in tree]
            await workspace.agent.cancel(session_id)
            try:
                async with asyncio.timeout(CANCEL_S):
                    for run in covered:
                        await run.control.ended.wait()
            except TimeoutError:
                self.world.problems.append(f"a cancel of {session_id} is not settled")
            self._check_empty(workspace, session_id, {run.id for run in covered})

        await self.server.request(serve)

    def _check_empty(self, workspace: LiveWorkspace, session_id: str, covered: set[str]) -> None:
        """Check that no run or process works for a cancelled run."""
        if workspace.lifetime.closing:
            return
        for run in workspace.runs.live():
            works_for = run.duty.works_for if run.duty is not None else None
            is_left = works_for is not None and works_for.id in covered
            why = f"{session_id} was cancelled, and {run.id} works on for"
            self.world.expect(not is_left, why, works_for and works_for.id, run.stop)
        for worker in self.server.life.launcher.workers:
            is_left = worker.is_alive and worker.run_id in covered
            self.world.expect(not is_left, "cancelled, and at work:", worker.id, worker.run_id)

    async def cancel_run(self) -> None:
        run_id = self._some("SELECT id FROM runs ORDER BY seq DESC LIMIT 6")
        await self._ask(lambda workspace: workspace.agent.cancel_run(run_id))

    async def delete(self) -> None:
        session_id = self._child()

        async def serve(workspace: LiveWorkspace) -> None:
            if not workspace.runs.is_busy(session_id):
                self.world.deleted.add(session_id)
            await workspace.sessions.delete(session_id)

        await self._ask(serve)

    # --- answering

    async def answer(self) -> None:
        ask_id = self._some("SELECT id FROM asks WHERE state = 'open'")
        rows = self.world.rows("SELECT kind, request FROM asks WHERE id = ?", ask_id)
        text = f"a{self.world.number()}"
        given = TreeAnswer(self.dice.random() < 0.75, self.world.clock.now_s(), text)
        self.world.given[ask_id].append(given)
        if rows[0]["kind"] == "question":
            await self._answer_question(decode(rows[0]["request"], QuestionRequest), given)
            return
        body = PermissionGrant(PermissionRef(ask_id), "allow" if given.allows else "deny")
        await self._ask(lambda workspace: workspace.gate.answer(body, "a client"))

    async def _answer_question(self, asked: QuestionRequest, given: TreeAnswer) -> None:
        if not given.allows:
            await self._ask(lambda workspace: workspace.gate.cancel_questions(asked.id, "one"))
            return
        responses = [QuestionResponse(one.id, fill_in_text=given.text) for one in asked.questions]
        body = QuestionAnswer(asked.id, responses)
        await self._ask(lambda workspace: workspace.gate.answer_questions(body, "one"))

    async def start_held(self) -> None:
        run_id = RunId(self._some("SELECT id FROM runs WHERE state = 'held'"))
        await self._ask(lambda workspace: workspace.agent.start(run_id))

    async def change_budget(self) -> None:
        agent_id = self._agent()
        change = ChangeBudget(tokens=self.dice.choice((0, 1_500, 6_000)))

        async def serve(workspace: LiveWorkspace) -> None:
            live = (run for run in workspace.runs.live() if run.agent_id == agent_id)
            self.world.rebudgeted |= {run.id for run in live}
            await workspace.agents.set_budget(agent_id, change)

        await self._ask(serve)

    # --- agents and letters

    async def start_agent(self) -> None:
        body = StartAgent(f"w{self.world.number()}. do it")
        await self._ask(lambda workspace: workspace.agents.start_agent(body))

    async def steer_agent(self) -> None:
        agent_id, token = self._agent(), f"p{self.world.number()}."
        await self._ask(lambda workspace: workspace.agents.steer(agent_id, f"{token} and this"))

    async def cancel_agent(self) -> None:
        agent_id = self._agent()
        await self._ask(lambda workspace: workspace.agents.cancel(agent_id))

    def _agent(self) -> str:
        return self._some("SELECT id FROM agents ORDER BY no DESC LIMIT 6")

    async def write(self) -> None:
        """Send a letter through the server, or directly to the mailbox."""
        to = self._session() if self.dice.random() < 0.4 else self._agent()
        kind = self.dice.choice(LETTER_KINDS[:3])
        text = f"l{self.world.number()}. read this"
        expires_s = self.dice.choice((0, 0, 3.0))
        if self.dice.random() < 0.4:
            body = SendLetter(to, kind, text, expires_s=expires_s)
            sent = await self._ask(lambda workspace: workspace.agents.send_letter(body))
            self.world.letters[LetterId(sent.letter_id)] = to
            return
        now_s = self.world.clock.now_s()
        letter = Letter(
            id=LetterId(f"letter-{self.world.number()}"),
            from_=Sender(session_id="outside"),
            kind=kind,
            body=body_of(kind, text),
            created_at=format_time(now_s),
            expires_at=format_time(now_s + expires_s) if expires_s else None,
        )
        box = self.world.post.make(to)
        for _ in range(self.dice.choice((1, 1, 2))):  # A repeated delivery has no effect.
            box.deliver(letter)
        self.world.letters[letter.id] = to


OPERATIONS: tuple[tuple[float, Callable[[Client], Awaitable[None]]], ...] = (
    (0.24, Client.prompt),
    (0.04, Client.start_agent),
    (0.05, Client.steer),
    (0.04, Client.steer_agent),
    (0.25, Client.answer),
    (0.10, Client.cancel),
    (0.03, Client.cancel_agent),
    (0.05, Client.cancel_run),
    (0.04, Client.change_budget),
    (0.03, Client.delete),
    (0.05, Client.start_held),
    (0.08, Client.write),
)


async def answer_all(server: TreeServer) -> None:
    """Answer everything, until cancelled; some answers come too late."""
    person = Client(server, 0)
    await asyncio.sleep(server.world.dice.choice((0, 0, 0, 400)))
    while True:
        await asyncio.sleep(2.0)
        with contextlib.suppress(Gone, AppError):
            await person.answer()


# --- faults


async def trouble(server: TreeServer) -> None:
    """Break something, again and again, and rest in between."""
    world, file = server.world, server.world.file
    dice = world.dice

    def repair() -> None:
        file.is_full = file.is_busy = False

    while True:
        await asyncio.sleep(dice.choice((0.01, 0.5, 5.0, 15.0)) * dice.random())
        life = await server.until_up()
        file.group_max = dice.choice((1, 2, 1024))
        workers = [one for one in life.launcher.workers if one.is_alive]
        lines = [line for one in workers for line in one.listener.lines if line.is_open]
        roll = dice.random()
        if roll < 0.25 and workers:
            dice.choice(workers).process.end()
        elif roll < 0.35 and workers:
            _hold(world, dice.choice(workers))
        elif roll < 0.5 and lines:
            dice.choice(lines).cut("cut")
        elif roll < 0.6:
            life.kill()
        elif roll < 0.75:
            file.die = (file.commits + dice.randint(1, 12), dice.choice(("before", "after")))
        elif roll < 0.8:
            life.stop()
        elif roll < 0.85:
            world.store_failed = True
            file.bad.update(file.groups + dice.randint(1, 9) for _ in range(3))
        elif roll < 0.9:
            world.store_failed = file.is_full = True
            world.loop.call_later(dice.choice((0.0001, 0.5, 8.0)), repair)
        elif roll < 0.95:
            world.store_failed = file.is_busy = True
            world.loop.call_later(dice.choice((0, 0.0001, 0.3)), repair)


def _hold(world: TreeWorld, worker: TreeWorker) -> None:
    """Stop a worker for a while, as by SIGSTOP."""
    worker.process.stop()
    world.loop.call_later(world.dice.choice((0.01, 0.5, 4, 70)), worker.process.resume)
