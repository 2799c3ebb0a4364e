"""Models that stand in for others: who is asked next, whose name is on the answer, what is told."""

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script
from culm.wire.messages import full_text
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import assert_paired, finish_of
from tests.flow.runs import Stage
from tests.flow.written import chosen, config_of, open_written, provider
from tests.support import contract

PAUSES = (5.0, 10.0, 20.0)
DOWN, REFUSED = Reply(status=503), Reply(status=401)


@contextmanager
def deaf_address() -> Generator[str]:
    """Where nobody answers while in the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening.
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


@asynccontextmanager
async def open_pair(
    folder: Path, first: str, second: ModelServer, *tools: Probe, **more: object
) -> AsyncGenerator[Stage]:
    """A server whose model is at `first`, and whose fallback is `second`."""
    config = config_of(
        {"first": provider(first), "second": provider(second.url)},
        fallbacks={"large": [chosen("second", "demo-2")]},
        **more,
    )
    async with open_written(folder, second, config, tools=tools) as stage:
        yield stage


def times_asked(model: ModelServer) -> int:
    """Titles aside."""
    return sum(b"Write a title" not in seen.raw for seen in model.requests)


async def assert_answered_by(stage: Stage, run_id: str, provider_id: str, model_id: str) -> None:
    """The run ended well, its last message names who spoke, and nobody was told of an error."""
    complete = await stage.heard.complete(run_id)
    assert (complete.text, complete.error) == ("Fine.", "")
    last = (await stage.messages())[-1]
    assert (last.provider, last.model) == (provider_id, model_id)
    assert finish_of(last).reason == "end_turn"
    assert (await stage.run(run_id)).outcome == "end_turn"
    await stage.catch_up()
    assert stage.heard.errors() == []
    assert stage.heard.completed().count(run_id) == 1


@contract("INV-38", "MODEL-5")
async def test_a_model_that_is_down_is_asked_four_times_and_then_the_next_one_answers(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(Script(otherwise=DOWN)) as down,
        open_model_server(script()) as spare,
        open_pair(tmp_path, down.url, spare) as stage,
    ):
        run_id = await stage.prompt("Hi.")
        for pause_s in PAUSES:
            await stage.clock.pass_retry(pause_s)
        await assert_answered_by(stage, run_id, "second", "demo-2")
        assert (times_asked(down), times_asked(spare)) == (4, 1)
        assert [row[0] for row in await stage.rows()] == ["user", "assistant"]


@contract("INV-38", "MODEL-5")
@pytest.mark.parametrize(
    "reply",
    [
        REFUSED,
        Reply(status=404),
        Reply(body="<html></html>"),
        Reply(text="Half", malformed_after=1),
    ],
    ids=["key", "model", "HTML", "half an answer"],
)
async def test_what_asking_again_would_not_mend_goes_to_the_next_one_at_once(
    tmp_path: Path, reply: Reply
) -> None:
    async with (
        open_model_server(Script(otherwise=reply)) as bad,
        open_model_server(script()) as spare,
        open_pair(tmp_path, bad.url, spare) as stage,
    ):
        await assert_answered_by(stage, await stage.prompt("Hi."), "second", "demo-2")
        assert times_asked(bad) == 1


@contract("INV-38")
async def test_a_model_that_cannot_be_reached_is_replaced(tmp_path: Path) -> None:
    with deaf_address() as url:
        async with open_model_server(script()) as spare, open_pair(tmp_path, url, spare) as stage:
            run_id = await stage.prompt("Hi.")
            for pause_s in PAUSES:
                await stage.clock.pass_retry(pause_s)
            await assert_answered_by(stage, run_id, "second", "demo-2")


@pytest.mark.parametrize("key", ["$NOT_SET_ANYWHERE", "$(exit 3)"])
async def test_a_model_that_cannot_even_be_asked_is_passed_over(tmp_path: Path, key: str) -> None:
    async with open_model_server(script()) as spare:
        config = config_of(
            {"first": provider(spare.url, key), "second": provider(spare.url)},
            fallbacks={"large": [chosen("nobody"), chosen("second", "demo-2")]},
        )
        async with open_written(tmp_path, spare, config) as stage:
            await assert_answered_by(stage, await stage.prompt("Hi."), "second", "demo-2")


@contract("INV-38", "INV-82")
async def test_who_fell_back_stays_with_it_for_the_turn_and_the_next_turn_begins_anew(
    tmp_path: Path,
) -> None:
    tool = Probe("probe")
    async with (
        open_model_server(script(REFUSED)) as first,
        open_model_server(script(calling("probe"))) as spare,
        open_pair(tmp_path, first.url, spare, tool) as stage,
    ):
        await assert_answered_by(stage, await stage.prompt("Hi."), "second", "demo-2")
        assert len(stage.seen()) == 2
        assert_paired(stage.sent(2))
        await assert_answered_by(stage, await stage.prompt("Again."), "first", "demo-1")
        assert len(stage.seen()) == 2


@contract("INV-82")
async def test_a_model_that_fails_between_two_steps_is_replaced_with_all_that_was_done(
    tmp_path: Path,
) -> None:
    tool = Probe("probe")
    async with (
        open_model_server(script(calling("probe"), REFUSED)) as first,
        open_model_server(script()) as spare,
        open_pair(tmp_path, first.url, spare, tool) as stage,
    ):
        await assert_answered_by(stage, await stage.prompt("Hi."), "second", "demo-2")
        assert len(tool.calls) == 1
        assert_paired(stage.sent(1))
        assert [sent.role for sent in stage.sent(1)] == ["user", "assistant", "tool"]
        models = [m.provider for m in await stage.messages() if m.role == "assistant"]
        assert models == ["first", "second"]


async def test_a_summary_is_written_by_the_next_one_if_the_first_cannot(tmp_path: Path) -> None:
    async with (
        open_model_server(script(Reply(text="Plums are blue."))) as first,
        open_model_server(script(Reply(text="It was about plums."))) as spare,
        open_pair(tmp_path, first.url, spare) as stage,
    ):
        await stage.talk("Tell me about plums.")
        first.play(Script(otherwise=REFUSED))
        assert (await stage.of_session("summarize")).status == 200
        summary = (await stage.messages())[-1]
        assert (full_text(summary.parts), summary.provider) == ("It was about plums.", "second")
        assert (await stage.session()).summary_message_id == summary.id


@contract("INV-39")
async def test_when_all_fail_the_error_of_the_last_is_told_once(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=REFUSED)) as first,
        open_model_server(Script(otherwise=Reply(status=400))) as spare,
        open_pair(tmp_path, first.url, spare) as stage,
    ):
        run_id = await stage.prompt("Hi.")
        complete = await stage.heard.complete(run_id)
        assert complete.error.startswith("The provider refused: second refused (400)")
        run = await stage.run(run_id)
        assert (run.outcome, run.title) == ("error", "The provider refused")
        await stage.catch_up()
        assert [error.run_id for error in stage.heard.errors()] == [run_id]
        assert stage.heard.completed() == [run_id]
        assert [row[2] for row in await stage.rows()] == ["stop", "error"]


async def test_a_cancel_in_the_pause_before_asking_again_asks_nobody_else(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=DOWN)) as down,
        open_model_server(script()) as spare,
        open_pair(tmp_path, down.url, spare) as stage,
    ):
        run_id = await stage.prompt("Hi.")
        await until(lambda: stage.clock.is_armed(PAUSES[0]))
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        stage.clock.advance(sum(PAUSES) * 2)
        await stage.catch_up()
        assert (times_asked(down), times_asked(spare)) == (1, 0)


async def test_who_asks_for_one_model_by_name_gets_that_one_or_its_error(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=REFUSED)) as bad,
        open_model_server(script()) as spare,
        open_pair(tmp_path, bad.url, spare) as stage,
    ):
        run_id = await stage.prompt("Hi.", model=chosen("first", "another"))
        assert (await stage.heard.complete(run_id)).error.startswith("Authentication problem")
        assert times_asked(spare) == 0


@contract("CFG-3")
async def test_a_fallback_that_was_taken_away_while_the_turn_ran_still_answers_in_it(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script(calling("wait"), REFUSED)) as first,
        open_model_server(script()) as spare,
        open_pair(tmp_path, first.url, spare, Probe("wait", gate.pass_through)) as stage,
    ):
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        change = {"scope": 0, "key": "providers.second.disable", "value": True}
        assert (await stage.request("POST", "/config/set", change)).status == 200
        gate.release()
        complete = await stage.heard.complete(run_id)
        assert (complete.error, times_asked(spare)) == ("", 1)
