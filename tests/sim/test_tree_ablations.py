"""Each safeguard of agents, switched off: the simulation must detect it."""

import asyncio
import gc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import pytest

from culm.fleet.host.pool import WorkerRoster
from culm.permission.gate import PermissionGate
from culm.run import recovery, rules, runs
from culm.run.budget import Account
from culm.run.limits import UsageEstimate
from culm.run.live_run import LiveRun
from culm.run.runs import Runs
from culm.store import runs as store_runs
from culm.store import sessions as store_sessions
from culm.store.base import Tx
from culm.subagents import mail_room, worker_turn
from culm.subagents.mail_room import MailRoom
from culm.subagents.replay import WorkerReplay
from tests.sim.ablations import Ablation, do_nothing, is_found, name_of, searches
from tests.sim.loop import simulate
from tests.sim.test_tree import NO_WARNING, one_world

NUMBERS = count()
fate_after_crash = rules.fate_after_crash


# --- parents and sub-agents


def nobody_is_orphaned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runs, "orphan", do_nothing)


def cancel_skips_sub_agents(patch: pytest.MonkeyPatch) -> None:
    def only(named: Iterable[LiveRun], live: Iterable[LiveRun]) -> list[LiveRun]:
        return list(named)

    def nobody(session_id: str, live: Iterable[LiveRun]) -> list[LiveRun]:
        return []

    patch.setattr(runs, "with_below", only)
    patch.setattr(runs, "below_session", nobody)


def stopped_run_leaves_its_worker(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_nothing(*_: object) -> None:
        pass

    patch.setattr(WorkerRoster, "end", wait_for_nothing)


def awaited_run_is_restarted_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    def careless(run: rules.CrashedRun) -> object:
        return fate_after_crash(run._replace(state="accepted", is_waited_for=False))

    patch.setattr(recovery, "fate_after_crash", careless)


def end_does_not_end_the_agent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_runs, "end_agent", do_nothing)


# --- asks


def asks_outlive_their_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_runs, "close_asks_of_run", do_nothing)


def every_answer_approves(patch: pytest.MonkeyPatch) -> None:
    allow_agent = PermissionGate.allow_agent

    async def careless(self: PermissionGate, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
        await allow_agent(self, *args, **kwargs)
        return True

    patch.setattr(PermissionGate, "allow_agent", careless)


# --- budgets


def nothing_is_reserved(patch: pytest.MonkeyPatch) -> None:
    async def careless(self: Account, estimate: UsageEstimate) -> str:
        return "anything"

    patch.setattr(Account, "reserve", careless)


def parent_budgets_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def alone(self: Account) -> list[Account]:
        return [self]

    patch.setattr(Account, "_up_to_root", alone)


def interrupted_answer_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(WorkerReplay):
        def count(self) -> None:
            if self.ending is not None or self._calls_are_coming:
                super().count()

        _calls_are_coming = False

        async def _record_calls(self, message: Any) -> None:  # noqa: ANN401
            self._calls_are_coming = True
            await super()._record_calls(message)
            self._calls_are_coming = False

    patch.setattr(worker_turn, "WorkerReplay", Forgetful)


def costs_are_not_rolled_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_sessions, "_count_above", do_nothing)


# --- letters


def a_letter_is_acknowledged_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    accept = MailRoom._accept  # pyright: ignore[reportPrivateUsage]

    async def hasty(self: MailRoom, letter: Any, recipient: Any) -> LiveRun | None:  # noqa: ANN401
        post = self._post  # pyright: ignore[reportPrivateUsage]
        for address in post.addresses(claimed=True):
            box = post.open(address)
            for claim in box.recover():
                if claim.letter.id == letter.id:
                    box.ack(claim)
        await asyncio.sleep(0.01)
        return await accept(self, letter, recipient)

    patch.setattr(MailRoom, "_accept", hasty)


def letter_is_admitted_repeatedly(patch: pytest.MonkeyPatch) -> None:
    def another(letter_id: str) -> str:
        return f"{letter_id}-{next(NUMBERS)}"

    patch.setattr(mail_room, "RunId", another)


def unread_letter_has_no_receipt(patch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> Callable[[Tx], bool]:
        return lambda tx: True

    patch.setattr(mail_room, "close_letter", nothing)


# Each with a seed that detects it.
DRAWN: tuple[tuple[Ablation, int], ...] = (
    (nobody_is_orphaned, 15),
    (cancel_skips_sub_agents, 2),
    (stopped_run_leaves_its_worker, 2),
    (awaited_run_is_restarted_after_a_crash, 0),
    (end_does_not_end_the_agent, 1),
    (asks_outlive_their_run, 2),
    (every_answer_approves, 5),
    (nothing_is_reserved, 3),
    (parent_budgets_are_ignored, 16),
    (interrupted_answer_costs_nothing, 7),
    (costs_are_not_rolled_up, 1),
    (a_letter_is_acknowledged_before_it_is_read, 20),
    (letter_is_admitted_repeatedly, 0),
    (unread_letter_has_no_receipt, 6),
)


@NO_WARNING
@searches
@pytest.mark.parametrize(("ablation", "seed"), DRAWN, ids=name_of)
def test_simulation_detects_a_disabled_safeguard(
    ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)
    try:
        assert is_found(partial(simulate, scenario=one_world), seed)
    finally:
        gc.collect()  # Collect killed servers now, so that their warnings do not reach other tests.
