"""Configuration files that change while the server runs; files with errors are ignored."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from tests.flow.config_files import (
    ConfigClock,
    changes,
    config_of,
    notices,
    open_configured,
    provider,
    shown,
    write,
)
from tests.flow.conftest import open_flow
from tests.flow.drive import closed
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import ReceivedEvents, open_received
from tests.support import contract

TRANSPARENT: Mapping[str, object] = {"options": {"tui": {"transparent": True}}}
SPLIT: Mapping[str, object] = {"options": {"tui": {"transparent": False, "diff_mode": "split"}}}


async def until_config_changes(received: ReceivedEvents, times: int) -> None:
    """Wait until a client has received this many `config_changed` events."""

    def is_it(_: ServerEvent) -> bool:
        return changes(received) >= times

    await received.until(is_it)


# --- the project file


@contract("INV-68")
async def test_changes_of_the_project_file_are_published_to_every_client(
    tmp_path: Path,
) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, None, clock=clock) as harness,
    ):
        other = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        file = harness.flow.directory() / "culm.json"
        async with open_received(other, view="crush") as theirs:
            looks: list[tuple[bool, str]] = []
            for n, content in enumerate((TRANSPARENT, SPLIT, None), start=1):
                file.unlink() if content is None else write(file, content)
                await clock.check_files()
                await until_config_changes(harness.received, n)
                await until_config_changes(theirs, n)
                tui = (await shown(harness)).options.tui
                looks.append((tui.transparent, tui.diff_mode))
            assert looks == [(True, ""), (False, "split"), (False, "")]
            await harness.catch_up(theirs)
            assert (changes(harness.received), changes(theirs)) == (3, 3)


@contract("INV-68")
async def test_client_that_reconnects_receives_a_missed_config_change(
    tmp_path: Path,
) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, None, clock=clock) as harness,
    ):
        cursor = (await harness.remote.snapshot()).cursor
        write(harness.flow.directory() / "culm.json", TRANSPARENT)
        await clock.check_files()
        await until_config_changes(harness.received, 1)
        async with open_received(harness.remote, cursor=cursor) as back:
            await until_config_changes(back, 1)


async def test_file_with_equal_content_in_another_form_publishes_no_change(tmp_path: Path) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, None, clock=clock) as harness,
    ):
        file = harness.flow.directory() / "culm.json"
        for content in (json.dumps(TRANSPARENT), f"// Mine.\n{json.dumps(TRANSPARENT)}"):
            write(file, content)
            await clock.check_files()
        await harness.catch_up()
        assert changes(harness.received) == 1


async def test_culm_json_overrides_the_other_project_files(tmp_path: Path) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, None, clock=clock) as harness,
    ):
        modes: list[str] = []
        for name in (".crush.json", "crush.json", ".culm.json", "culm.json"):
            write(harness.flow.directory() / name, {"options": {"tui": {"diff_mode": name}}})
            await clock.check_files()
            modes.append((await shown(harness)).options.tui.diff_mode)
        assert modes == [".crush.json", "crush.json", ".culm.json", "culm.json"]


# --- the user file


@contract("INV-68")
async def test_change_of_the_user_file_applies_to_every_workspace(tmp_path: Path) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, {}, clock=clock) as harness,
    ):
        there = await (await harness.flow.client()).open_workspace(harness.flow.directory("other"))
        async with open_received(there) as theirs:
            write(tmp_path / "culm.json", TRANSPARENT)
            await clock.check_files(workspaces=2)
            await until_config_changes(harness.received, 1)
            await until_config_changes(theirs, 1)
        assert (await shown(harness)).options.tui.transparent is True


@contract("CFG-3")
async def test_running_turn_keeps_its_model_and_the_next_prompt_uses_the_new_one(
    tmp_path: Path,
) -> None:
    clock, gate = ConfigClock(), Gate()
    first = Reply(deltas=["Let ", "me ", "look."], hold_after=1, calls=calling("wait").calls)
    async with (
        open_model_server(script(first, then="From the old.")) as old,
        open_model_server(script(then="From the new.")) as new,
        open_configured(
            tmp_path,
            old,
            config_of({"old": provider(old.url)}),
            clock=clock,
            tools=[Probe("wait", gate.pass_through)],
        ) as harness,
    ):
        run_id = await harness.prompt("One.")
        await harness.received.text("Let")
        write(tmp_path / "culm.json", config_of({"new": provider(new.url)}))
        await clock.check_files()
        await until_config_changes(harness.received, 1)
        assert (await shown(harness)).models["large"].provider == "new"
        old.release()
        gate.release()
        assert (await harness.received.complete(run_id)).text == "From the old."
        assert (
            await harness.received.complete(await harness.prompt("Two."))
        ).text == "From the new."
        assert len(harness.seen()) == 2
        answers = [m for m in await harness.messages() if m.role == "assistant"]
        assert [m.provider for m in answers] == ["old", "old", "new"]


# --- errors


ERRORS = {
    "not JSON": ('{\n  "options": {,}\n}', ":2: not valid JSON"),
    "no object": ("[1]", ":1: expected a JSON object"),
    "an unknown key": (
        '{\n\n  "modles": {}\n}',
        ":3: modles: unknown key (did you mean 'models'?)",
    ),
    "a wrong type": (
        '{"options": {\n"tui": {"transparent": "yes"}}}',
        ":2: options.tui.transparent: expected true or false, got a string",
    ),
    "not UTF-8": ("\ud800", "not UTF-8"),
}


@contract("CFG-2")
@pytest.mark.parametrize("folder", ["project", "."], ids=["the project's", "the user's"])
@pytest.mark.parametrize(("broken", "text"), ERRORS.values(), ids=list(ERRORS))
async def test_config_error_names_file_line_key_and_the_last_good_content_is_used(
    tmp_path: Path, folder: str, broken: str, text: str
) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, {}, clock=clock) as harness,
    ):
        file = tmp_path / folder / "culm.json"
        write(file, TRANSPARENT)
        await clock.check_files()
        file.write_bytes(broken.encode(errors="surrogatepass"))
        await clock.check_files()
        assert (await shown(harness)).options.tui.transparent is True
        what, advice = await notices(harness)
        assert what.startswith(f"{file}:")
        assert text in what
        assert advice == f"{file} has errors; until they are fixed, its last valid content is used"
        await harness.catch_up()
        assert changes(harness.received) == 1
        write(file, SPLIT)
        await clock.check_files()
        assert (await shown(harness)).options.tui.diff_mode == "split"
        assert await notices(harness) == []


async def test_file_that_was_never_valid_is_ignored(
    tmp_path: Path,
) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path / "project" / "culm.json", '{"options": {"tui": {"transparent": true}}')
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url)})
        async with open_configured(tmp_path, model, config) as harness:
            assert (await shown(harness)).options.tui.transparent is False
            assert "until they are fixed, it is ignored" in (await notices(harness))[-1]
            assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."


async def test_error_in_the_user_file_keeps_the_last_valid_model(tmp_path: Path) -> None:
    clock = ConfigClock()
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url)})
        async with open_configured(tmp_path, model, config, clock=clock) as harness:
            write(tmp_path / "culm.json", '{"models": {')
            await clock.check_files()
            assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."


async def test_config_path_that_is_a_directory_is_reported_and_ignored(tmp_path: Path) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, None, clock=clock) as harness,
    ):
        (harness.flow.directory() / "culm.json").mkdir()
        await clock.check_files()
        assert "cannot be read" in (await notices(harness))[0]
        assert (await shown(harness)).models["large"].provider == "offline"


@pytest.mark.parametrize("whose", ["the project", "the user"])
async def test_too_large_config_file_is_ignored_and_reported(tmp_path: Path, whose: str) -> None:
    clock = ConfigClock()
    async with (
        open_model_server() as model,
        open_configured(tmp_path, model, TRANSPARENT, clock=clock) as harness,
    ):
        directory = tmp_path if whose == "the user" else harness.flow.directory()
        write(directory / "culm.json", {"options": {"tui": {"diff_mode": "x" * 262_080}}})
        await clock.check_files()
        tui = (await shown(harness)).options.tui
        assert (tui.transparent, tui.diff_mode) == (True, "")
        assert any("bytes" in notice for notice in await notices(harness))
        again = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        assert again.id == harness.remote.id


@contract("CFG-2")
async def test_error_in_the_user_file_keeps_the_model_when_reopening(
    tmp_path: Path,
) -> None:
    config = config_of({"demo": provider("http://127.0.0.1:1/v1")})
    async with open_flow(tmp_path, "unix", config=config) as flow:
        client = await flow.client()
        await client.open_workspace(flow.directory("elsewhere"))  # Keeps the server running.
        before = await client.open_workspace(flow.directory())
        write(tmp_path / "culm.json", {**config, "optoins": {}})
        await before.release()
        await closed(flow, before)
        after = (await client.open_workspace(flow.directory())).info
        assert after.config.models["large"].provider == "demo"
        what, advice = after.notices
        assert "optoins: unknown key (did you mean 'options'?)" in what
        assert advice.endswith("has errors; until they are fixed, its last valid content is used")
