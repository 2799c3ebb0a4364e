"""A prompt that is for one model: no other reads its words, to join a turn or to find a title."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import Stage
from tests.flow.written import chosen, config_of, open_written, provider
from tests.support import contract

PRIVATE = "For the second one alone."


@asynccontextmanager
async def open_two(
    folder: Path, first: ModelServer, second: ModelServer, *tools: Probe, **more: object
) -> AsyncGenerator[Stage]:
    """A server with two providers, of which the first is selected for everything."""
    config = config_of({"first": provider(first.url), "second": provider(second.url)}, **more)
    async with open_written(folder, first, config, tools=tools) as stage:
        yield stage


def has_read(model: ModelServer, words: str) -> bool:
    return any(words.encode() in seen.raw for seen in model.requests)


async def select(stage: Stage, provider_id: str) -> None:
    """Let what comes from now on be for this provider, as a client does that switches."""
    change = {"scope": 1, "key": "models.large", "value": chosen(provider_id)}
    assert (await stage.request("POST", "/config/set", change)).status == 200


# --- a turn that runs already


@contract("MODEL-3")
@pytest.mark.parametrize("how", ["it names its model", "another was selected meanwhile"])
async def test_a_waiting_prompt_for_another_model_has_a_turn_of_its_own_which_alone_reads_it(
    tmp_path: Path, how: str
) -> None:
    gate = Gate()
    async with (
        open_model_server(script(calling("held"))) as first,
        open_model_server(script(then="By the second.")) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as stage,
    ):
        host = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        if how == "it names its model":
            waits = await stage.prompt(PRIVATE, model=chosen("second"))
        else:
            await select(stage, "second")
            waits = await stage.prompt(PRIVATE)
        gate.release()
        assert (await stage.heard.complete(host)).text == "Fine."
        assert (await stage.heard.complete(waits)).text == "By the second."
        assert (await stage.run(waits)).host_run_id == ""
        assert (has_read(first, PRIVATE), has_read(second, PRIVATE)) == (False, True)


async def test_a_waiting_prompt_that_names_the_model_which_runs_joins_its_turn(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script()) as first,
        open_model_server(script(calling("held"))) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as stage,
    ):
        host = await stage.prompt("Hi.", model=chosen("second"))
        await until(lambda: gate.inside == 1)
        joins = await stage.prompt(PRIVATE, model=chosen("second"))
        gate.release()
        await stage.heard.complete(joins)
        assert (await stage.run(joins)).host_run_id == host
        assert first.requests == []


async def test_steering_is_for_whoever_runs_and_not_for_the_model_that_is_selected(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with (
        open_model_server(script()) as first,
        open_model_server(script(calling("held"))) as second,
        open_two(tmp_path, first, second, Probe("held", gate.pass_through)) as stage,
    ):
        host = await stage.prompt("Hi.", model=chosen("second"))
        await until(lambda: gate.inside == 1)
        steering = decode((await stage.of_session("steer", prompt=PRIVATE)).body, Run)
        gate.release()
        await stage.heard.complete(steering.id)
        assert (await stage.run(steering.id)).host_run_id == host
        assert (has_read(first, PRIVATE), has_read(second, PRIVATE)) == (False, True)


# --- the title


async def test_a_prompt_that_names_its_model_is_titled_by_that_one_and_read_by_no_other(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(script()) as first,
        open_model_server(script()) as second,
        open_two(tmp_path, first, second) as stage,
    ):
        run_id = await stage.prompt(PRIVATE, model=chosen("second"))
        await stage.heard.complete(run_id)
        await stage.heard.saying("session", '"A title"')
        assert first.requests == []


async def test_a_model_that_was_named_and_gives_no_title_leaves_the_session_without(
    tmp_path: Path,
) -> None:
    async with (
        open_model_server(script()) as first,
        open_model_server(Script(otherwise=Reply(status=401))) as second,
        open_two(tmp_path, first, second) as stage,
    ):
        run_id = await stage.prompt(PRIVATE, model=chosen("second"))
        assert (await stage.heard.complete(run_id)).error
        await stage.heard.saying("session", '"Untitled Session"')
        assert first.requests == []


# --- who it was


@contract("INV-38")
async def test_after_a_fallback_the_run_names_the_model_that_answered(tmp_path: Path) -> None:
    fallbacks = {"large": [chosen("second", "demo-2")]}
    async with (
        open_model_server(script(Reply(status=401))) as first,
        open_model_server(script()) as second,
        open_two(tmp_path, first, second, fallbacks=fallbacks) as stage,
    ):
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, run.provider, run.model) == ("end_turn", "second", "demo-2")
        (listed,) = await stage.runs()
        assert (listed.provider, listed.model) == ("second", "demo-2")
