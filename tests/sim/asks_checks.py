"""Invariants of asks at the end of a world: one function per promise."""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from culm.wire.asks import AskChanged, AskState, QuestionChanged
from culm.wire.codec import decode
from culm.wire.messages import Message, ToolCallPart, ToolResult
from tests.sim.asks_actors import AskObserver, AskServer
from tests.sim.asks_outside import AnswerAttempt, AskWorld
from tests.sim.runs_checks import results_in
from tests.sim.runs_final import Final


@dataclass(frozen=True)
class AskEvent:
    seq: int
    ask_id: str
    state: AskState
    run_id: str


class FinalAsks:
    """The final state of a world, as far as asks are concerned."""

    def __init__(self, server: AskServer) -> None:
        self.world: AskWorld = server.asks
        self.final = Final(server)
        rows = server.file.rows("SELECT * FROM asks ORDER BY no")
        self.rows: dict[str, sqlite3.Row] = {row["id"]: row for row in rows}
        self.grants = server.file.rows("SELECT * FROM grants")
        self.events: dict[str, list[AskEvent]] = defaultdict(list)
        for row in server.file.rows("SELECT * FROM events ORDER BY seq"):
            kind = {"ask_changed": AskChanged, "question_changed": QuestionChanged}.get(row["type"])
            if kind is not None:
                changed = decode(row["fields"], kind)
                event = AskEvent(row["seq"], row["entity_id"], changed.state, changed.run_id)
                self.events[event.ask_id].append(event)
        self.tokens = self._read_tokens()

    def _read_tokens(self) -> dict[tuple[str, str], str]:
        """The token of each call, by its message and its id."""
        return {
            (message.id, part.data.id): part.data.input.partition('"token":"')[2].rstrip('"}')
            for messages in self.final.messages.values()
            for message in messages
            for part in message.parts
            if isinstance(part, ToolCallPart)
        }


def every_ask_is_closed(asks: FinalAsks) -> None:
    """Nothing runs any more, so no ask is open."""
    left = [tuple(row) for row in asks.rows.values() if row["state"] == "open"]
    assert left == [], f"still asked: {left}"


def asks_are_published_once(asks: FinalAsks) -> None:
    """Each ask is published as open and then as closed, before its run completes."""
    completed = {e.run_id: e.seq for e in asks.final.log if e.complete is not None}
    for ask_id, events in asks.events.items():
        states = [one.state for one in events]
        assert states[0] == "open", f"{ask_id}: {states}"
        assert len(states) == 2, f"{ask_id}: {states}"
        assert states[1] != "open", f"{ask_id}: {states}"
        assert events[1].seq < completed[events[0].run_id], f"{ask_id} outlived its run"
        if ask_id in asks.rows:
            assert states[1] == asks.rows[ask_id]["state"], f"{ask_id}: {states}"
    assert set(asks.rows) <= set(asks.events), "an ask was not published"


def the_first_answer_counts(asks: FinalAsks) -> None:
    """At most one answer was reported as accepted, and it is the stored one."""
    for ask_id, given in asks.world.given.items():
        won = [one for one in given if one.resolved]
        assert len(won) <= 1, f"answered twice: {won}"
        row = asks.rows.get(ask_id)
        if row is None:
            continue
        for one in won:
            assert (row["state"], row["answered_by"]) == (one.state, one.by), tuple(row)
    for row in asks.rows.values():
        if row["state"] in ("withdrawn", "expired"):
            assert row["answered_by"] == "", tuple(row)
            continue
        gave = {(g.state, g.by) for g in asks.world.given[row["id"]] if g.fits}
        assert (row["state"], row["answered_by"]) in gave, f"by nobody: {tuple(row)}"


def no_call_is_asked_twice(asks: FinalAsks) -> None:
    """A call asks again only if it would do something else, or if it need not have asked."""
    calls: dict[tuple[str, str], list[sqlite3.Row]] = defaultdict(list)
    for row in asks.rows.values():
        calls[row["message_id"], row["call_id"]].append(row)
    for call, rows in calls.items():
        for before, after in pairwise(rows):
            is_let_through = asks.tokens[call] in asks.world.let_through
            other = before["digest"] != after["digest"]
            asked = f"{call} is asked twice: {before['state']}, {after['state']}"
            assert other or (is_let_through and before["state"] == "withdrawn"), asked


def refused_calls_have_no_effect(asks: FinalAsks) -> None:
    """A denied or expired call has no effect, whatever came after."""
    acted = {effect.token for effect in asks.world.effects}
    for row in asks.rows.values():
        token = asks.tokens[row["message_id"], row["call_id"]]
        refused = row["state"] in ("denied", "expired")
        assert not (refused and token in acted), f"{token} acted: {tuple(row)}"


def a_refusal_ends_the_turn(asks: FinalAsks) -> None:
    """INV-77: after a denial the model is not asked again, not even by the next server."""
    for row in asks.rows.values():
        if row["state"] not in ("denied", "expired", "canceled"):
            continue
        run = asks.final.runs[row["run_id"]]
        later = asks.final.messages[run.session_id]
        place = [message.id for message in later].index(row["message_id"])
        for message in later[place + 1 :]:
            if message.role == "user":
                break
            assert message.role == "tool" or message.is_summary_message, f"{tuple(row)}: {message}"


def answers_reach_the_model(asks: FinalAsks) -> None:
    """The model reads the answer of a person; a refusal is an error."""
    results = {
        (message.id, result.tool_call_id): result
        for messages in asks.final.messages.values()
        for message, result in _results_of(messages)
    }
    for row in asks.rows.values():
        result = results[row["message_id"], row["call_id"]]
        if row["state"] == "answered" and not result.is_error:
            texts = {f"answered: {g.text}" for g in asks.world.given[row["id"]] if _won(g, row)}
            assert result.content in texts, f"{tuple(row)}: {result}"
        if row["state"] in ("denied", "expired", "canceled"):
            assert result.is_error, f"{tuple(row)}: {result}"


def _won(given: AnswerAttempt, row: sqlite3.Row) -> bool:
    return given.fits and (given.state, given.by) == (row["state"], row["answered_by"])


def _results_of(messages: Sequence[Message]) -> Iterator[tuple[Message, ToolResult]]:
    """Each result with the message that contains its call."""
    answer: Message | None = None
    for message in messages:
        if message.role == "assistant":
            answer = message
        for result in results_in(message):
            assert answer is not None
            yield answer, result


def grants_were_given(asks: FinalAsks) -> None:
    """Every grant comes from an answer and stays until it is revoked."""
    world = asks.world
    for row in asks.grants:
        gave = {(g.answer, g.by) for g in world.given[row["ask_id"]] if g.fits}
        answer = f"allow_{row['scope']}"
        assert (answer, row["granted_by"]) in gave, f"granted by nobody: {tuple(row)}"
        ask = asks.rows.get(row["ask_id"])
        assert ask is None or (ask["state"], ask["grains"]) == ("allowed", row["grains"])
    stored = {row["ask_id"] for row in asks.grants}
    for given in (one for some in world.given.values() for one in some if one.resolved):
        row = asks.rows.get(given.ask_id)
        lasts = given.answer in ("allow_session", "allow_workspace")
        if lasts and row is not None and row["grains"] != "[]" and not world.revoked:
            assert given.ask_id in stored, f"{given} is lost"


def effects_happen_once(asks: FinalAsks) -> None:
    acted = Counter(effect.token for effect in asks.world.effects)
    assert max(acted.values(), default=0) <= 1, f"acted twice: {acted}"


def observers_received_every_ask(asks: FinalAsks, observers: list[AskObserver]) -> None:
    """An observer that resumed by cursor received each state once and shows no closed ask."""
    for observer in observers:
        expected = {i: [one.state for one in events] for i, events in asks.events.items()}
        assert observer.states == expected, "an ask state was missed or repeated"
        assert "open" not in observer.shown.values(), f"a dialog stays: {observer.shown}"


CHECKS = (
    every_ask_is_closed,
    asks_are_published_once,
    the_first_answer_counts,
    no_call_is_asked_twice,
    refused_calls_have_no_effect,
    a_refusal_ends_the_turn,
    answers_reach_the_model,
    grants_were_given,
    effects_happen_once,
)


def check_asks(server: AskServer, observers: list[AskObserver]) -> None:
    asks = FinalAsks(server)
    for check in CHECKS:
        check(asks)
    observers_received_every_ask(asks, observers)
