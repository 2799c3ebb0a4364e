"""Fallback models: the order, the model named on the answer, and errors."""

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script
from culm.wire.messages import full_text
from tests.flow.config_files import chosen, config_of, open_configured, provider
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import assert_paired, finish_of
from tests.flow.runs import Harness
from tests.support import contract

PAUSES = (5.0, 10.0, 20.0)
DOWN, REFUSED = Reply(status=503), Reply(status=401)


@contextmanager
def unreachable_url() -> Generator[str]:
    """A URL that refuses connections while in the block."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening.
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


@asynccontextmanager
async def open_pair(
    folder: Path, first: str, second: ModelServer, *tools: Probe, **more: object
) -> AsyncGenerator[Harness]:
    """A server whose model is at `first`, and whose fallback is `second`."""
    config = config_of(
        {"first": provider(first), "second": provider(second.url)},
        fallbacks={"large": [chosen("second", "demo-2")]},
        **more,
    )
    async with open_configured(folder, second, config, tools=tools) as harness:
        yield harness


def times_asked(model: ModelServer) -> int:
    """The number of requests without those for titles."""
    return sum(b"Write a title" not in seen.raw for seen in model.requests)


async def assert_answered_by(
    harness: Harness, run_id: str, provider_id: str, model_id: str
) -> None:
    """The run ended normally, its last message names this model, and no error was published."""
    complete = await harness.received.complete(run_id)
    assert (complete.text, complete.error) == ("Fine.", "")
    last = (await harness.messages())[-1]
    assert (last.provider, last.model) == (provider_id, model_id)
    assert finish_of(last).reason == "end_turn"
    assert (await harness.run(run_id)).outcome == "end_turn"
    await harness.catch_up()
    assert harness.received.errors() == []
    assert harness.received.completed().count(run_id) == 1


@contract("INV-38", "MODEL-5")
async def test_unavailable_model_is_tried_four_times_before_the_fallback(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(Script(otherwise=DOWN)) as down,
        open_model_server(script()) as spare,
        open_pair(tmp_path, down.url, spare) as harness,
    ):
        run_id = await harness.prompt("Hi.")
        for pause_s in PAUSES:
            await harness.clock.pass_retry(pause_s)
        await assert_answered_by(harness, run_id, "second", "demo-2")
        assert (times_asked(down), times_asked(spare)) == (4, 1)
        assert [row[0] for row in await harness.rows()] == ["user", "assistant"]


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
async def test_permanent_model_error_uses_the_fallback_at_once(
    tmp_path: Path, reply: Reply
) -> None:
    async with (
        open_model_server(Script(otherwise=reply)) as bad,
        open_model_server(script()) as spare,
        open_pair(tmp_path, bad.url, spare) as harness,
    ):
        await assert_answered_by(harness, await harness.prompt("Hi."), "second", "demo-2")
        assert times_asked(bad) == 1


@contract("INV-38")
async def test_unreachable_model_is_replaced_by_the_fallback(tmp_path: Path) -> None:
    with unreachable_url() as url:
        async with open_model_server(script()) as spare, open_pair(tmp_path, url, spare) as harness:
            run_id = await harness.prompt("Hi.")
            for pause_s in PAUSES:
                await harness.clock.pass_retry(pause_s)
            await assert_answered_by(harness, run_id, "second", "demo-2")


@pytest.mark.parametrize("key", ["$NOT_SET_ANYWHERE", "$(exit 3)"])
async def test_unusable_models_are_skipped(tmp_path: Path, key: str) -> None:
    async with open_model_server(script()) as spare:
        config = config_of(
            {"first": provider(spare.url, key), "second": provider(spare.url)},
            fallbacks={"large": [chosen("nobody"), chosen("second", "demo-2")]},
        )
        async with open_configured(tmp_path, spare, config) as harness:
            await assert_answered_by(harness, await harness.prompt("Hi."), "second", "demo-2")


@contract("INV-38", "INV-82")
async def test_turn_stays_with_its_fallback_and_the_next_turn_starts_over(
    tmp_path: Path,
) -> None:
    tool = Probe("probe")
    async with (
        open_model_server(script(REFUSED)) as first,
        open_model_server(script(calling("probe"))) as spare,
        open_pair(tmp_path, first.url, spare, tool) as harness,
    ):
        await assert_answered_by(harness, await harness.prompt("Hi."), "second", "demo-2")
        assert len(harness.seen()) == 2
        assert_paired(harness.sent(2))
        await assert_answered_by(harness, await harness.prompt("Again."), "first", "demo-1")
        assert len(harness.seen()) == 2


@contract("INV-82")
async def test_fallback_between_two_steps_gets_the_whole_conversation(
    tmp_path: Path,
) -> None:
    tool = Probe("probe")
    async with (
        open_model_server(script(calling("probe"), REFUSED)) as first,
        open_model_server(script()) as spare,
        open_pair(tmp_path, first.url, spare, tool) as harness,
    ):
        await assert_answered_by(harness, await harness.prompt("Hi."), "second", "demo-2")
        assert len(tool.calls) == 1
        assert_paired(harness.sent(1))
        assert [sent.role for sent in harness.sent(1)] == ["user", "assistant", "tool"]
        models = [m.provider for m in await harness.messages() if m.role == "assistant"]
        assert models == ["first", "second"]


async def test_summary_is_written_by_the_fallback(tmp_path: Path) -> None:
    async with (
        open_model_server(script(Reply(text="Plums are blue."))) as first,
        open_model_server(script(Reply(text="It was about plums."))) as spare,
        open_pair(tmp_path, first.url, spare) as harness,
    ):
        await harness.talk("Tell me about plums.")
        first.play(Script(otherwise=REFUSED))
        assert (await harness.of_session("summarize")).status == 200
        summary = (await harness.messages())[-1]
        assert (full_text(summary.parts), summary.provider) == ("It was about plums.", "second")
        assert (await harness.session()).summary_message_id == summary.id


@contract("INV-39")
async def test_error_of_the_last_fallback_is_reported_once(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=REFUSED)) as first,
        open_model_server(Script(otherwise=Reply(status=400))) as spare,
        open_pair(tmp_path, first.url, spare) as harness,
    ):
        run_id = await harness.prompt("Hi.")
        complete = await harness.received.complete(run_id)
        assert complete.error.startswith("The provider refused: second refused (400)")
        run = await harness.run(run_id)
        assert (run.outcome, run.title) == ("error", "The provider refused")
        await harness.catch_up()
        assert [error.run_id for error in harness.received.errors()] == [run_id]
        assert harness.received.completed() == [run_id]
        assert [row[2] for row in await harness.rows()] == ["stop", "error"]


async def test_cancel_during_a_retry_pause_asks_no_other_model(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=DOWN)) as down,
        open_model_server(script()) as spare,
        open_pair(tmp_path, down.url, spare) as harness,
    ):
        run_id = await harness.prompt("Hi.")
        await until(lambda: harness.clock.is_armed(PAUSES[0]))
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        harness.clock.advance(sum(PAUSES) * 2)
        await harness.catch_up()
        assert (times_asked(down), times_asked(spare)) == (1, 0)


async def test_prompt_with_an_explicit_model_does_not_use_fallbacks(tmp_path: Path) -> None:
    async with (
        open_model_server(Script(otherwise=REFUSED)) as bad,
        open_model_server(script()) as spare,
        open_pair(tmp_path, bad.url, spare) as harness,
    ):
        run_id = await harness.prompt("Hi.", model=chosen("first", "another"))
        assert (await harness.received.complete(run_id)).error.startswith("Authentication problem")
        assert times_asked(spare) == 0


@contract("CFG-3")
async def test_fallback_removed_during_a_turn_still_answers_in_it(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script(calling("wait"), REFUSED)) as first,
        open_model_server(script()) as spare,
        open_pair(tmp_path, first.url, spare, Probe("wait", gate.pass_through)) as harness,
    ):
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        change = {"scope": 0, "key": "providers.second.disable", "value": True}
        assert (await harness.request("POST", "/config/set", change)).status == 200
        gate.release()
        complete = await harness.received.complete(run_id)
        assert (complete.error, times_asked(spare)) == ("", 1)
