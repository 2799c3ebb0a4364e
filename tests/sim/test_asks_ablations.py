"""Each safeguard of asks, switched off: the simulation must detect it."""

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest

from culm.errors import GrantNotFound
from culm.ids import AskId, GrantId
from culm.permission.asks import Asks, ClosedAsk
from culm.permission.gate import PermissionGate
from culm.permission.grants import Grants
from culm.run import recovery
from culm.run.runs import Runs
from culm.store import asks as store_asks
from culm.store import runs as store_runs
from culm.store.asks import AnyAsk, delete_grant
from culm.store.base import Op, Tx
from culm.store.sql import QUERIES
from culm.wire.asks import PermissionGrant
from tests.sim.ablations import Ablation, do_nothing, is_found, name_of, searches
from tests.sim.loop import simulate
from tests.sim.test_asks import one_world

# --- ablations


def an_end_leaves_its_asks_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_runs, "close_asks_of_run", do_nothing)


def two_answers_go_to_the_store_at_once(patch: pytest.MonkeyPatch) -> None:
    """Neither the pending answer nor the store holds back the next one."""
    patch.setitem(QUERIES, "close_ask", QUERIES["close_ask"].replace("AND state = 'open'", ""))

    async def hasty(self: Asks[Any], ask_id: str, closed: ClosedAsk) -> bool:
        waiting = self._open.get(AskId(ask_id))  # pyright: ignore[reportPrivateUsage]
        if waiting is None:
            return False
        return await asyncio.shield(self._close(waiting, closed))  # pyright: ignore[reportPrivateUsage]

    patch.setattr(Asks, "close", hasty)


def an_answer_counts_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    close = Asks[Any]._close  # pyright: ignore[reportPrivateUsage]

    def hasty(self: Asks[Any], waiting: Any, closed: ClosedAsk) -> asyncio.Future[bool]:  # noqa: ANN401
        if not waiting.closed.done():
            waiting.closed.set_result(closed)
        return close(self, waiting, closed)

    patch.setattr(Asks, "_close", hasty)


def a_call_that_changed_keeps_its_ask(patch: pytest.MonkeyPatch) -> None:
    put = Asks[Any].put

    async def careless(self: Asks[Any], ask: Any) -> Any:  # noqa: ANN401
        before = self._leftover.get((ask.message_id, ask.request.tool_call_id))  # pyright: ignore[reportPrivateUsage]
        digest = ask.digest if before is None else before.ask.digest
        return await put(self, msgspec.structs.replace(ask, digest=digest))

    patch.setattr(Asks, "put", careless)


def a_call_asks_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    put = Asks[Any].put

    async def careless(self: Asks[Any], ask: Any) -> Any:  # noqa: ANN401
        self._leftover.pop((ask.message_id, ask.request.tool_call_id), None)  # pyright: ignore[reportPrivateUsage]
        return await put(self, ask)

    patch.setattr(Asks, "put", careless)


def a_restart_forgets_what_was_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PermissionGate, "restore", do_nothing)


def restart_ends_waiting_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_find_waiting", do_nothing)


def restart_ignores_decided_asks(patch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bool:
        return False

    patch.setattr(recovery, "has_decided_ask", never)


def restart_ignores_started_calls(patch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> dict[str, object]:
        return {}

    find = recovery._find_waiting  # pyright: ignore[reportPrivateUsage]
    calls_of_message = recovery.calls_of_message

    def careless(tx: Tx, run: Any) -> Any:  # noqa: ANN401
        patch.setattr(recovery, "calls_of_message", nothing)
        try:
            return find(tx, run)
        finally:
            patch.setattr(recovery, "calls_of_message", calls_of_message)

    patch.setattr(recovery, "_find_waiting", careless)


def stop_ends_waiting_runs(patch: pytest.MonkeyPatch) -> None:
    stop = Runs.stop

    async def harsh(self: Runs, *, for_good: bool) -> None:
        await stop(self, for_good=True)

    patch.setattr(Runs, "stop", harsh)


def an_answer_to_something_else_counts(patch: pytest.MonkeyPatch) -> None:
    answer = PermissionGate.answer

    async def careless(self: PermissionGate, body: PermissionGrant, by: str) -> bool:
        return await answer(self, msgspec.structs.replace(body, digest=""), by)

    patch.setattr(PermissionGate, "answer", careless)


def revoked_grant_still_applies(patch: pytest.MonkeyPatch) -> None:
    async def careless(self: Grants, grant_id: str) -> None:
        if GrantId(grant_id) not in self._grants:  # pyright: ignore[reportPrivateUsage]
            raise GrantNotFound(grant_id)
        await asyncio.shield(self.store.write(delete_grant(GrantId(grant_id))))

    patch.setattr(Grants, "revoke", careless)


def a_grant_covers_everything(patch: pytest.MonkeyPatch) -> None:
    def careless(self: Grants, *_: object) -> frozenset[str]:
        return frozenset(grain for grant in self.all() for grain in grant.grains)

    patch.setattr(Grants, "covering", careless)


def skip_mode_does_not_end(patch: pytest.MonkeyPatch) -> None:
    set_skip = PermissionGate.set_skip

    async def careless(self: PermissionGate, session_id: str, by: str, *, on: bool) -> None:
        if on:
            await set_skip(self, session_id, by, on=on)

    patch.setattr(PermissionGate, "set_skip", careless)


def closed_ask_is_not_published(patch: pytest.MonkeyPatch) -> None:
    publish = store_asks._publish  # pyright: ignore[reportPrivateUsage]

    def silent(tx: Tx, ask: AnyAsk, op: Op) -> None:
        if op == "created":
            publish(tx, ask, op)

    patch.setattr(store_asks, "_publish", silent)


def ended_run_keeps_its_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Asks, "forget_run", do_nothing)


# Each with a seed that detects it.
DRAWN: tuple[tuple[Ablation, int], ...] = (
    (an_end_leaves_its_asks_open, 6),
    (two_answers_go_to_the_store_at_once, 1),
    (an_answer_counts_before_it_is_stored, 2),
    (a_call_that_changed_keeps_its_ask, 8),
    (a_call_asks_again_after_a_restart, 0),
    (a_restart_forgets_what_was_asked, 6),
    (restart_ends_waiting_runs, 6),
    (restart_ignores_decided_asks, 109),
    (restart_ignores_started_calls, 59),
    (stop_ends_waiting_runs, 0),
    (an_answer_to_something_else_counts, 3),
    (revoked_grant_still_applies, 78),
    (a_grant_covers_everything, 14),
    (skip_mode_does_not_end, 145),
    (closed_ask_is_not_published, 0),
    (ended_run_keeps_its_asks, 8),
)


@searches
@pytest.mark.parametrize(("ablation", "seed"), DRAWN, ids=name_of)
def test_simulation_detects_a_disabled_safeguard(
    ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)
    assert is_found(partial(simulate, scenario=one_world), seed)
