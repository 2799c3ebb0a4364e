"""Files that people write while the server runs: seen, told and shown; a mistake is kept out."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from tests.flow.conftest import open_flow
from tests.flow.drive import closed
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import Heard, open_heard
from tests.flow.written import (
    Watched,
    changes,
    config_of,
    notices,
    open_written,
    provider,
    shown,
    write,
)
from tests.support import contract

GLASS: Mapping[str, object] = {"options": {"tui": {"transparent": True}}}
WALL: Mapping[str, object] = {"options": {"tui": {"transparent": False, "diff_mode": "split"}}}


async def told_of_change(heard: Heard, times: int) -> None:
    """Wait until a client was told so often; it knows no more than that."""

    def is_it(told: ServerEvent) -> bool:
        return changes(heard) >= times

    await heard.until(is_it)


# --- the project's


@contract("INV-68")
async def test_a_project_file_that_comes_changes_and_goes_is_told_to_every_client_and_shown(
    tmp_path: Path,
) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, None, clock=clock) as stage,
    ):
        other = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        file = stage.flow.directory() / "culm.json"
        async with open_heard(other, view="crush") as theirs:
            looks: list[tuple[bool, str]] = []
            for n, content in enumerate((GLASS, WALL, None), start=1):
                file.unlink() if content is None else write(file, content)
                await clock.look()
                await told_of_change(stage.heard, n)
                await told_of_change(theirs, n)
                tui = (await shown(stage)).options.tui
                looks.append((tui.transparent, tui.diff_mode))
            assert looks == [(True, ""), (False, "split"), (False, "")]
            await stage.catch_up(theirs)
            assert (changes(stage.heard), changes(theirs)) == (3, 3)


@contract("INV-68")
async def test_a_client_that_was_away_while_a_file_changed_is_told_when_it_is_back(
    tmp_path: Path,
) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, None, clock=clock) as stage,
    ):
        cursor = (await stage.remote.snapshot()).cursor
        write(stage.flow.directory() / "culm.json", GLASS)
        await clock.look()
        await told_of_change(stage.heard, 1)
        async with open_heard(stage.remote, cursor=cursor) as back:
            await told_of_change(back, 1)


async def test_a_file_that_says_the_same_in_other_words_is_told_to_nobody(tmp_path: Path) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, None, clock=clock) as stage,
    ):
        file = stage.flow.directory() / "culm.json"
        for content in (json.dumps(GLASS), f"// Mine.\n{json.dumps(GLASS)}"):
            write(file, content)
            await clock.look()
        await stage.catch_up()
        assert changes(stage.heard) == 1


async def test_of_the_files_in_a_project_culm_json_has_the_last_word(tmp_path: Path) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, None, clock=clock) as stage,
    ):
        modes: list[str] = []
        for name in (".crush.json", "crush.json", ".culm.json", "culm.json"):
            write(stage.flow.directory() / name, {"options": {"tui": {"diff_mode": name}}})
            await clock.look()
            modes.append((await shown(stage)).options.tui.diff_mode)
        assert modes == [".crush.json", "crush.json", ".culm.json", "culm.json"]


# --- the user's


@contract("INV-68")
async def test_a_change_of_the_users_file_counts_in_every_workspace(tmp_path: Path) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, {}, clock=clock) as stage,
    ):
        there = await (await stage.flow.client()).open_workspace(stage.flow.directory("other"))
        async with open_heard(there) as theirs:
            write(tmp_path / "culm.json", GLASS)
            await clock.look(workspaces=2)
            await told_of_change(stage.heard, 1)
            await told_of_change(theirs, 1)
        assert (await shown(stage)).options.tui.transparent is True


@contract("CFG-3")
async def test_a_running_turn_keeps_the_model_it_began_with_and_the_next_prompt_has_the_new_one(
    tmp_path: Path,
) -> None:
    clock, gate = Watched(), Gate()
    first = Reply(deltas=["Let ", "me ", "look."], hold_after=1, calls=calling("wait").calls)
    async with (
        open_model_server(script(first, then="From the old.")) as old,
        open_model_server(script(then="From the new.")) as new,
        open_written(
            tmp_path,
            old,
            config_of({"old": provider(old.url)}),
            clock=clock,
            tools=[Probe("wait", gate.pass_through)],
        ) as stage,
    ):
        begun = await stage.prompt("One.")
        await stage.heard.text("Let")
        write(tmp_path / "culm.json", config_of({"new": provider(new.url)}))
        await clock.look()
        await told_of_change(stage.heard, 1)
        assert (await shown(stage)).models["large"].provider == "new"
        old.release()
        gate.release()
        assert (await stage.heard.complete(begun)).text == "From the old."
        assert (await stage.heard.complete(await stage.prompt("Two."))).text == "From the new."
        assert len(stage.seen()) == 2
        answers = [m for m in await stage.messages() if m.role == "assistant"]
        assert [m.provider for m in answers] == ["old", "old", "new"]


# --- mistakes


MISTAKES = {
    "not JSON": ('{\n  "options": {,}\n}', ":2: not valid JSON"),
    "no object": ("[1]", ":1: a JSON object is wanted"),
    "an unknown key": (
        '{\n\n  "modles": {}\n}',
        ":3: modles: unknown key (did you mean 'models'?)",
    ),
    "a wrong type": (
        '{"options": {\n"tui": {"transparent": "yes"}}}',
        ":2: options.tui.transparent: true or false is wanted, not a string",
    ),
    "not UTF-8": ("\ud800", "not UTF-8"),
}


@contract("CFG-2")
@pytest.mark.parametrize("place", ["project", "."], ids=["the project's", "the user's"])
@pytest.mark.parametrize(("broken", "words"), MISTAKES.values(), ids=list(MISTAKES))
async def test_a_mistake_is_named_with_file_line_and_key_and_the_last_good_content_counts(
    tmp_path: Path, place: str, broken: str, words: str
) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, {}, clock=clock) as stage,
    ):
        file = tmp_path / place / "culm.json"
        write(file, GLASS)
        await clock.look()
        file.write_bytes(broken.encode(errors="surrogatepass"))
        await clock.look()
        assert (await shown(stage)).options.tui.transparent is True
        what, advice = await notices(stage)
        assert what.startswith(f"{file}:")
        assert words in what
        assert advice == f"{file} is to be mended; until then it counts as it was before"
        await stage.catch_up()
        assert changes(stage.heard) == 1
        write(file, WALL)
        await clock.look()
        assert (await shown(stage)).options.tui.diff_mode == "split"
        assert await notices(stage) == []


async def test_of_a_file_that_never_was_good_nothing_counts_and_everything_works(
    tmp_path: Path,
) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path / "project" / "culm.json", '{"options": {"tui": {"transparent": true}}')
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url)})
        async with open_written(tmp_path, model, config) as stage:
            assert (await shown(stage)).options.tui.transparent is False
            assert "until then nothing in it counts" in (await notices(stage))[-1]
            assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."


async def test_a_mistake_in_the_users_file_takes_the_model_from_nobody(tmp_path: Path) -> None:
    clock = Watched()
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url)})
        async with open_written(tmp_path, model, config, clock=clock) as stage:
            write(tmp_path / "culm.json", '{"models": {')
            await clock.look()
            assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."


async def test_a_file_that_is_not_one_is_named_and_nothing_else_happens(tmp_path: Path) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, None, clock=clock) as stage,
    ):
        (stage.flow.directory() / "culm.json").mkdir()
        await clock.look()
        assert "cannot be read" in (await notices(stage))[0]
        assert (await shown(stage)).models["large"].provider == "offline"


@pytest.mark.parametrize("whose", ["the project", "the user"])
async def test_a_file_that_says_more_than_can_be_shown_is_ignored_and_told(
    tmp_path: Path, whose: str
) -> None:
    clock = Watched()
    async with (
        open_model_server() as model,
        open_written(tmp_path, model, GLASS, clock=clock) as stage,
    ):
        directory = tmp_path if whose == "the user" else stage.flow.directory()
        write(directory / "culm.json", {"options": {"tui": {"diff_mode": "x" * 262_080}}})
        await clock.look()
        tui = (await shown(stage)).options.tui
        assert (tui.transparent, tui.diff_mode) == (True, "")
        assert any("bytes" in notice for notice in await notices(stage))
        again = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        assert again.id == stage.remote.id


@contract("CFG-2")
async def test_a_mistake_in_the_users_file_sends_nobody_elsewhere_when_the_workspace_opens_anew(
    tmp_path: Path,
) -> None:
    config = config_of({"demo": provider("http://127.0.0.1:1/v1")})
    async with open_flow(tmp_path, "unix", config=config) as flow:
        client = await flow.client()
        await client.open_workspace(flow.directory("elsewhere"))  # So that the server stays.
        before = await client.open_workspace(flow.directory())
        write(tmp_path / "culm.json", {**config, "optoins": {}})
        await before.release()
        await closed(flow, before)
        after = (await client.open_workspace(flow.directory())).info
        assert after.config.models["large"].provider == "demo"
        what, advice = after.notices
        assert "optoins: unknown key (did you mean 'options'?)" in what
        assert advice.endswith("is to be mended; until then it counts as it was before")
