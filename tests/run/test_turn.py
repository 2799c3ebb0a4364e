"""Fallback models: order, attribution, and the reported failure."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from culm.config.checking import Document
from culm.config.references import UnresolvedReference
from culm.errors import ModelFailed
from culm.model.base import LanguageModel
from culm.model.choice import ChosenModel, ModelConfig, Models
from culm.model.scripted import ScriptedModel
from culm.run.project_context import ProjectContext, system_prompt
from culm.run.turn import ConfiguredModelChain, open_model_chain
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply
from culm.wire.config import SelectedModel
from tests.flow.probes import script
from tests.flow.runs import Harness, open_harness
from tests.support import WAIT_S, contract

CONTEXT = ProjectContext("/p")
FAILURE = ModelFailed("Authentication problem", "the key was refused")


def config_of(**providers: Document) -> Document:
    """Providers in fallback order, each with one model."""
    first, *others = [{"model": f"{name}-1", "provider": name} for name in providers]
    return {"providers": providers, "models": {"large": first}, "fallbacks": {"large": others}}


OWN: Document = {"base_url": "http://h/v1"}
UNSET: Document = {**OWN, "api_key": "$NONE"}
FAILING_KEY: Document = {**OWN, "api_key": "$(fail)"}
BROKEN: Document = {"type": "offline", "name": "cannot be made"}


@dataclass(frozen=True)
class FixedSource:
    models: ModelConfig


class ChainHarness:
    """The models of a configuration, and the recorded hand-overs."""

    def __init__(self, **providers: Document) -> None:
        source = FixedSource(ModelConfig(config_of(**providers), {}))
        self.models = Models(source, self._make, self._run)
        self.handed: list[str] = []

    async def open(self, name: str = "one") -> ConfiguredModelChain:
        async with asyncio.timeout(WAIT_S):
            return await open_model_chain(self.models, CONTEXT, (name, f"{name}-1"), self.hand_over)

    def _make(self, chosen: ChosenModel) -> LanguageModel:
        if chosen.access.type == "offline":
            raise ModelFailed("Model not available", f"{chosen.provider_id} cannot be made")
        return ScriptedModel([])

    async def _run(self, command: str) -> str:
        raise UnresolvedReference("a command failed with status 1")

    async def hand_over(self, chosen: ChosenModel) -> None:
        self.handed.append(chosen.provider_id)


async def test_configured_model_is_used_without_a_hand_over() -> None:
    harness = ChainHarness(one={**OWN, "system_prompt_prefix": "Quack."}, two=OWN)
    chain = await harness.open()
    assert chain.current.settings == SelectedModel("one-1", "one")
    assert chain.current.system == system_prompt(CONTEXT, "Quack.")
    assert harness.handed == []


async def test_fallbacks_are_used_in_order_until_none_is_left() -> None:
    harness = ChainHarness(one=OWN, two=UNSET, three=BROKEN, four=OWN, five=FAILING_KEY)
    chain = await harness.open()
    assert await chain.fall_back(FAILURE)
    assert chain.current.settings == SelectedModel("four-1", "four")
    assert not await chain.fall_back(FAILURE)
    assert chain.current.settings.provider == "four"  # The last model stays.
    assert harness.handed == ["four"]


async def test_model_that_cannot_be_opened_is_replaced_by_a_fallback() -> None:
    for bad in (FAILING_KEY, BROKEN, UNSET):
        harness = ChainHarness(one=bad, two=BROKEN, three=OWN)
        chain = await harness.open()
        assert (chain.current.settings.provider, harness.handed) == ("three", ["three"])


async def test_first_failure_is_reported_when_no_model_opens() -> None:
    harness = ChainHarness(one=FAILING_KEY, two=BROKEN, three=UNSET)
    with pytest.raises(ModelFailed) as caught:
        await harness.open()
    failure = (caught.value.title, caught.value.message)
    why = "providers.one.api_key: a command failed with status 1"
    assert failure == ("Unresolved reference", why)
    assert harness.handed == []


async def test_explicitly_requested_model_has_no_fallback() -> None:
    harness = ChainHarness(one=OWN, two=OWN)
    async with asyncio.timeout(WAIT_S):
        chain = await open_model_chain(
            harness.models, CONTEXT, ("two", "special"), harness.hand_over
        )
    assert not await chain.fall_back(FAILURE)


# --- in a run


def at(server: ModelServer, **more: object) -> Document:
    return {"base_url": server.url, "api_key": "k", **more}


@asynccontextmanager
async def open_pair(
    folder: Path, one: Reply, *others: Reply, first: Mapping[str, object] | None = None
) -> AsyncGenerator[tuple[Harness, ModelServer]]:
    """A run's own model, which answers `one`, and its fallback."""
    async with (
        open_model_server(script(one)) as own,
        open_model_server(script(*others)) as other,
        open_harness(
            folder,
            "unix",
            other,
            config=config_of(one=at(own, **(first or {})), two=at(other)),
        ) as stage,
    ):
        yield stage, own


async def assert_answered_by_fallback(stage: Harness) -> None:
    run_id = await stage.prompt("Hi.")
    complete = await stage.received.complete(run_id)
    assert (complete.text, complete.error) == ("Fine.", "")
    run = await stage.run(run_id)
    assert (run.outcome, run.title, run.details) == ("end_turn", "", "")
    question, answer = await stage.messages()
    assert question.role == "user"
    assert (answer.provider, answer.model) == ("two", "two-1")
    assert await stage.rows() == [("user", "Hi.", "stop"), ("assistant", "Fine.", "end_turn")]
    await stage.catch_up()
    assert stage.received.errors() == []
    assert stage.received.completed() == [run_id]


@contract("INV-38")
@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=401),
        Reply(status=404),
        Reply(body="<html>"),
        Reply(deltas=["Half "], malformed_after=1),
    ],
    ids=["key", "model", "page", "half an answer"],
)
async def test_fallback_answers_in_its_own_name_without_an_error_event(
    tmp_path: Path, reply: Reply
) -> None:
    async with open_pair(tmp_path, reply) as (stage, own):
        await assert_answered_by_fallback(stage)
        asked = [seen for seen in own.requests if b"Write a title" not in seen.raw]
        assert len(asked) == 1


async def test_fallback_answers_when_the_first_key_cannot_be_read(tmp_path: Path) -> None:
    failing = {"api_key": "$(exit 3)"}
    async with open_pair(tmp_path, Reply(text="never"), first=failing) as (stage, own):
        await assert_answered_by_fallback(stage)
        assert own.requests == []


async def test_run_ends_with_one_error_when_all_models_fail(tmp_path: Path) -> None:
    async with open_pair(tmp_path, Reply(status=401), Reply(status=404)) as (stage, _):
        run_id = await stage.prompt("Hi.")
        complete = await stage.received.complete(run_id)
        run = await stage.run(run_id)
        assert run.outcome == "error"
        assert complete.error == f"{run.title}: {run.details}"
        await stage.catch_up()
        assert [error.run_id for error in stage.received.errors()] == [run_id]
