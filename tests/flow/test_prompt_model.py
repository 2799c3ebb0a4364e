"""Prompts for an explicit model: no other model reads them, for a turn or for a title."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.config_files import chosen, config_of, open_configured, provider
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import Harness
from tests.support import contract

PRIVATE = "For the second one alone."


@asynccontextmanager
async def open_two(
    folder: Path, first: ModelServer, second: ModelServer, *tools: Probe, **more: object
) -> AsyncGenerator[Harness]:
    """A server with two providers; the first is selected for all models."""
    config = config_of({"first": provider(first.url), "second": provider(second.url)}, **more)
    async with open_configured(folder, first, config, tools=tools) as harness:
        yield harness


def has_read(model: ModelServer, text: str) -> bool:
    return any(text.encode() in seen.raw for seen in model.requests)


async def select(harness: Harness, provider_id: str) -> None:
    """Select this provider, as a client does."""
    change = {"scope": 1, "key": "models.large", "value": chosen(provider_id)}
    assert (await harness.request("POST", "/config/set", change)).status == 200


# --- a running turn


@contract("MODEL-3")
@pytest.mark.parametrize("how", ["it names its model", "another was selected meanwhile"])
async def test_queued_prompt_for_another_model_gets_its_own_turn(tmp_path: Path, how: str) -> None:
    gate = Gate()
    async with (
        open_model_server(script(calling("held"))) as first,
        open_model_server(script(then="By the second.")) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as harness,
    ):
        host = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        if how == "it names its model":
            waits = await harness.prompt(PRIVATE, model=chosen("second"))
        else:
            await select(harness, "second")
            waits = await harness.prompt(PRIVATE)
        gate.release()
        assert (await harness.received.complete(host)).text == "Fine."
        assert (await harness.received.complete(waits)).text == "By the second."
        assert (await harness.run(waits)).host_run_id == ""
        assert (has_read(first, PRIVATE), has_read(second, PRIVATE)) == (False, True)


async def test_queued_prompt_for_the_running_model_joins_its_turn(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script()) as first,
        open_model_server(script(calling("held"))) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as harness,
    ):
        host = await harness.prompt("Hi.", model=chosen("second"))
        await until(lambda: gate.inside == 1)
        joins = await harness.prompt(PRIVATE, model=chosen("second"))
        gate.release()
        await harness.received.complete(joins)
        assert (await harness.run(joins)).host_run_id == host
        assert first.requests == []


async def test_steering_goes_to_the_running_model_not_the_selected_one(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script()) as first,
        open_model_server(script(calling("held"))) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as harness,
    ):
        host = await harness.prompt("Hi.", model=chosen("second"))
        await until(lambda: gate.inside == 1)
        steering = decode((await harness.of_session("steer", prompt=PRIVATE)).body, Run)
        gate.release()
        await harness.received.complete(steering.id)
        assert (await harness.run(steering.id)).host_run_id == host
        assert (has_read(first, PRIVATE), has_read(second, PRIVATE)) == (False, True)


# --- the title


async def test_title_of_a_prompt_with_an_explicit_model_comes_from_that_model(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(script()) as first,
        open_model_server(script()) as second,
        open_two(tmp_path, first, second) as harness,
    ):
        run_id = await harness.prompt(PRIVATE, model=chosen("second"))
        await harness.received.complete(run_id)
        await harness.received.event_with("session", '"A title"')
        assert first.requests == []


async def test_session_stays_untitled_when_the_explicit_model_fails(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(script()) as first,
        open_model_server(Script(otherwise=Reply(status=401))) as second,
        open_two(tmp_path, first, second) as harness,
    ):
        run_id = await harness.prompt(PRIVATE, model=chosen("second"))
        assert (await harness.received.complete(run_id)).error
        await harness.received.event_with("session", '"Untitled Session"')
        assert first.requests == []


# --- the model of a run


@contract("INV-38")
async def test_run_names_the_fallback_model_that_answered(tmp_path: Path) -> None:
    fallbacks = {"large": [chosen("second", "demo-2")]}
    async with (
        open_model_server(script(Reply(status=401))) as first,
        open_model_server(script()) as second,
        open_two(tmp_path, first, second, fallbacks=fallbacks) as harness,
    ):
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        assert (run.outcome, run.provider, run.model) == ("end_turn", "second", "demo-2")
        (listed,) = await harness.runs()
        assert (listed.provider, listed.model) == ("second", "demo-2")
