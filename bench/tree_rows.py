"""A project with many agents for `tree.py`, written by the store itself."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from culm.clock import LoopClock
from culm.ids import AgentId, Ids, RunId, SessionId
from culm.store.agents import NewAgent, add_agent, assign_agent, begin_agent, end_agent
from culm.store.base import Tx, together
from culm.store.sessions import add_session
from culm.store.store import open_store
from culm.wire.runs import Ending
from culm.workspace.roots import project_folder

TOP = SessionId("11111111-1111-4111-8111-111111111111")  # The session at the top of the tree.
WIDTH = 10  # Children of an agent, except at the end.
GROUP = 500  # Agents in one transaction.
TERMS = '{"prompt":"You work on a part of a larger task, for another agent."}'


def agent_name(number: int) -> AgentId:
    return AgentId(f"22222222-2222-4222-8222-{number:012d}")


def session_name(number: int) -> SessionId:
    return SessionId(f"33333333-3333-4333-8333-{number:012d}$$call_1_0")


def path_to(number: int) -> list[int]:
    """Return the numbers of all parents from the top. Numbers go level by level."""
    above: list[int] = []
    while number >= WIDTH:
        number = number // WIDTH - 1
        above.append(number)
    return above[::-1]


def below(number: int, agents: int) -> int:
    """Return the number of agents below one of them."""
    first, last, found = number, number, 0
    while (first := WIDTH * (first + 1)) < agents:
        last = WIDTH * (last + 1) + WIDTH - 1
        found += min(last, agents - 1) - first + 1
    return found


def _new_agent(number: int) -> NewAgent:
    above = path_to(number)
    return NewAgent(
        id=agent_name(number),
        session_id=session_name(number),
        parent_id=agent_name(above[-1]) if above else TOP,
        parent_session_id=session_name(above[-1]) if above else TOP,
        name=f"Look at part {number}",
        role="worker",
        provider="demo",
        model="demo-1",
        terms=TERMS,
        depth=len(above) + 1,
        path=(TOP, *map(agent_name, above)),
    )


def _life(tx: Tx, number: int) -> None:
    """Write the assignment, the start and the end of an agent."""
    agent_id, run_id = agent_name(number), RunId(f"44444444-4444-4444-8444-{number:012d}")
    assign_agent(tx, agent_id, run_id)
    begin_agent(tx, agent_id, run_id)
    end_agent(tx, agent_id, run_id, Ending("end_turn"))


def _groups(agents: int) -> Iterator[Sequence[int]]:
    for first in range(0, agents, GROUP):
        yield range(first, min(agents, first + GROUP))


async def fill(data_dir: Path, directory: Path, agents: int) -> None:
    """Write the rows into the data directory of a stopped server."""
    folder = project_folder(data_dir, directory)
    folder.mkdir(parents=True)
    async with open_store(folder / "culm.db", LoopClock(), Ids()) as store:
        await store.write(together(add_session(TOP, "A large task", sessions_max=agents + 1)))
        for numbers in _groups(agents):
            await store.write(_units(numbers, agents + 1))


def _units(numbers: Sequence[int], sessions_max: int) -> Callable[[Tx], None]:
    def unit(tx: Tx) -> None:
        for number in numbers:
            new = _new_agent(number)
            title, above = new.name, new.parent_session_id
            add_session(new.session_id, title, parent_id=above, sessions_max=sessions_max)(tx)
            add_agent(new)(tx)
            _life(tx, number)

    return unit
