"""Configuration documents: edits, the displayed configuration, and the stored file."""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config import jsonc
from culm.config.checking import Document
from culm.config.documents import (
    DOCUMENT_BYTES_MAX,
    RECENT_MAX,
    VALUE_DEPTH_MAX,
    open_document,
    remove_key,
    select_model,
    set_key,
    shown_config,
    step_of,
)
from culm.config.layers import merged
from culm.errors import ConfigDamaged, DataUnusable, InvalidRequest, TooLarge
from culm.wire.config import SelectedModel
from tests.support import WAIT_S

names = st.text(st.sampled_from("\\.ab") | st.characters(), min_size=1, max_size=8)


def accept(document: Document) -> None:
    pass


# --- edits


@given(st.lists(names, min_size=1, max_size=6), st.integers())
def test_a_key_of_any_names_can_be_set_and_removed(steps: list[str], value: int) -> None:
    key = ".".join(step_of(step) for step in steps)
    expected: object = value
    for step in reversed(steps):
        expected = {step: expected}
    document = set_key(key, value)({})
    assert document == expected
    left = remove_key(key)(document)
    assert set_key(key, value)(left) == expected
    assert remove_key(key)(left) == left


def test_an_edit_leaves_the_input_document_and_other_keys_unchanged() -> None:
    before: Document = {"options": {"debug": True, "tui": {"diff_mode": "split"}}}
    copy = json.loads(json.dumps(before))
    after = set_key("options.tui.compact_mode", value=True)(before)
    assert before == copy
    tui = {"diff_mode": "split", "compact_mode": True}
    assert after == {"options": {"debug": True, "tui": tui}}
    assert remove_key("options.tui.compact_mode")(after) == before
    assert remove_key("nothing.like.this")(before) == before
    assert remove_key("options.debug.deeper")(before) == before


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b", "a" * 513, ".".join("a" * 17)])
def test_an_invalid_dotted_path_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="key"):
        set_key(key, 1)
    with pytest.raises(InvalidRequest, match="key"):
        remove_key(key)


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    value: object = 1
    for _ in range(VALUE_DEPTH_MAX - 1):
        value = [value]
    assert set_key("a", value)({}) == {"a": value}
    with pytest.raises(InvalidRequest, match="nested"):
        set_key("a", {"b": value})


def test_a_key_below_a_value_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'debug' is not an object"):
        set_key("options.debug.deeper", 1)({"options": {"debug": True}})


def test_field_names_in_a_key_ignore_case_and_map_keys_do_not() -> None:
    document = set_key("OPTIONS.Tui.Compact_Mode", value=True)({})
    document = set_key("Providers.Demo.API_KEY", "k")(document)
    demo = {"API_KEY": "k"}  # Not a field of the displayed configuration.
    assert document == {"options": {"tui": {"compact_mode": True}}, "providers": {"Demo": demo}}
    assert remove_key("options.tui.COMPACT_MODE")(document)["options"] == {"tui": {}}


def test_a_selected_model_is_first_in_the_recent_models_and_only_once() -> None:
    document: Document = {}
    for number in (1, 2, 3, 4, 5, 6, 2):
        document = select_model("large", SelectedModel(f"m{number}", "p"))(document)
    assert document["models"] == {"large": {"model": "m2", "provider": "p"}}
    recent = [entry["model"] for entry in document["recent_models"]["large"]]
    assert recent == ["m2", "m6", "m5", "m4", "m3"]
    assert len(recent) == RECENT_MAX


def test_a_model_type_other_than_large_or_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model_type"):
        select_model("huge", SelectedModel())


# --- displayed configuration


def test_the_workspace_document_overrides_the_user_document() -> None:
    user: Document = {"options": {"notifications": "bell", "tui": {"compact_mode": True}}}
    own: Document = {"options": {"tui": {"compact_mode": False, "diff_mode": "split"}}}
    config = shown_config(merged([user, own]), data_directory="/d", debug=True)
    assert config.options.notifications == "bell"
    assert (config.options.tui.compact_mode, config.options.tui.diff_mode) == (False, "split")
    assert (config.options.data_directory, config.options.debug) == ("/d", True)


def test_a_document_that_clients_cannot_read_is_refused_with_its_path() -> None:
    with pytest.raises(InvalidRequest, match=r"\$\.options\.tui\.transparent"):
        shown_config({"options": {"tui": {"transparent": "yes"}}}, data_directory="", debug=False)


def test_displayed_configuration_is_bounded_and_has_no_url_credentials() -> None:
    providers: dict[str, Document] = {
        "p": {"base_url": "https://user:secret@host/v1", "models": [{}] * 10}
    }
    config = shown_config({"providers": providers}, data_directory="", debug=False)
    assert config.providers["p"].base_url == "https://host/v1"
    providers["p"]["models"] = [{}] * 5000
    with pytest.raises(TooLarge):
        shown_config({"providers": providers}, data_directory="", debug=False)


def test_client_metrics_cannot_be_enabled() -> None:
    document: Document = {"options": {"disable_metrics": False}}
    assert shown_config(document, data_directory="", debug=False).options.disable_metrics


# --- the file


async def test_a_change_is_written_privately_and_published(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "config.json"
    published: list[Document] = []
    async with asyncio.timeout(WAIT_S), open_document(file) as document:
        document.listen(lambda: published.append(document.value))
        await document.change(set_key("a.b", 1), accept)
    assert json.loads(file.read_text()) == {"a": {"b": 1}}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert published == [{"a": {"b": 1}}]
    async with asyncio.timeout(WAIT_S), open_document(file) as again:
        assert again.value == {"a": {"b": 1}}


async def test_concurrent_changes_are_applied_in_order_and_none_is_lost(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        changes = [document.change(set_key(f"n{n}", n), accept) for n in range(50)]
        for change in changes:
            await change
        assert document.value == {f"n{n}": n for n in range(50)}


async def test_a_change_is_made_even_if_its_caller_is_canceled(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        done = asyncio.Event()
        document.listen(done.set)
        waiting = asyncio.shield(document.change(set_key("a", 1), accept))
        waiting.cancel()
        await done.wait()
        assert document.value == {"a": 1}


async def test_a_refused_change_writes_and_publishes_nothing(tmp_path: Path) -> None:
    def refuse(document: Document) -> None:
        raise InvalidRequest("no")

    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        document.listen(lambda: pytest.fail("nothing changed"))
        with pytest.raises(InvalidRequest):
            await document.change(set_key("a", 1), refuse)
        with pytest.raises(TooLarge):
            await document.change(set_key("a", "x" * DOCUMENT_BYTES_MAX), accept)
        assert document.value == {}
    assert [file.name for file in tmp_path.iterdir()] == ["c.json.lock"]


async def test_a_failed_write_is_an_error_and_keeps_the_document(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    async with asyncio.timeout(WAIT_S), open_document(folder / "c.json") as document:
        folder.write_text("a file where the folder should be")
        with pytest.raises(DataUnusable):
            await document.change(set_key("a", 1), accept)
        assert document.value == {}
        folder.unlink()
        await document.change(set_key("a", 1), accept)
        assert document.value == {"a": 1}


async def test_changes_by_hand_or_by_another_server_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    async with (
        asyncio.timeout(WAIT_S),
        open_document(file) as one,
        open_document(file) as other,
    ):
        await one.change(set_key("one", 1), accept)
        await other.change(set_key("other", 2), accept)
        file.write_text(json.dumps({**json.loads(file.read_text()), "by hand": 3}))
        both = [d.change(set_key(f"n{n}", n), accept) for n in range(20) for d in (one, other)]
        for change in both:
            await change
        stored = json.loads(file.read_text())
        assert stored == {"one": 1, "other": 2, "by hand": 3, **{f"n{n}": n for n in range(20)}}
        file.write_text("{ // broken by hand")
        with pytest.raises(ConfigDamaged):
            await one.change(set_key("a", 1), accept)
        assert file.read_text() == "{ // broken by hand"


async def test_pending_changes_are_written_before_close(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        changes = [document.change(set_key(f"n{n}", n), accept) for n in range(20)]
    for change in changes:
        await change
    assert len(json.loads((tmp_path / "c.json").read_text())) == 20


async def test_a_symlink_is_kept(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "c.json").symlink_to(tmp_path / "dotfiles" / "culm.json")
    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        await document.change(set_key("a", 1), accept)
    assert (tmp_path / "c.json").is_symlink()
    assert json.loads((tmp_path / "dotfiles" / "culm.json").read_text()) == {"a": 1}


async def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.json")
    async with asyncio.timeout(WAIT_S), open_document(tmp_path / "c.json") as document:
        with pytest.raises(ConfigDamaged, match="not a regular file"):
            await document.change(set_key("a", 1), accept)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "\x00", '{"options": 7}', '{"models": {"large": {"max_tokens": 1.5}}}',
     '{"a": NaN}', '{"a": "' + "x" * DOCUMENT_BYTES_MAX + '"}'],
    ids=lambda text: text[:30],
)  # fmt: skip
async def test_a_broken_file_counts_as_empty_and_is_left_unchanged(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    async with asyncio.timeout(WAIT_S), open_document(file) as document:
        assert document.value == {}
        with pytest.raises(ConfigDamaged, match=r"c\.json"):
            await document.change(set_key("a", 1), accept)
    assert file.read_text() == text


async def test_an_edit_keeps_comments_order_and_formatting(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.json"
    file.write_text("""{
\t// Mine, since spring.
\t"permissions": {"allowed_tools": ["view"]}, // these only
\t"options": {
\t\t"notifications": "bell", /* loud */
\t\t"tui": {"compact_mode": true},
\t},
\t"models": {}, // none yet
}
""")
    async with asyncio.timeout(WAIT_S), open_document(file) as document:
        await document.change(set_key("options.notifications", "off"), accept)
        await document.change(remove_key("options.tui"), accept)
        await document.change(select_model("large", SelectedModel("m", "p")), accept)
        shown = document.value
    text = file.read_text()
    assert text.startswith("""{
\t// Mine, since spring.
\t"permissions": {"allowed_tools": ["view"]}, // these only
\t"options": {
\t\t"notifications": "off", /* loud */
\t},
\t"models": {""")
    assert "// none yet" in text
    chosen = {"model": "m", "provider": "p"}
    assert jsonc.parse(text) == shown
    assert shown == {
        "permissions": {"allowed_tools": ["view"]},
        "options": {"notifications": "off"},
        "models": {"large": chosen},
        "recent_models": {"large": [chosen]},
    }
    assert list(shown) == ["permissions", "options", "models", "recent_models"]


async def test_an_edit_that_changes_nothing_writes_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    text = '\ufeff{ "a" :\t1 , // one\r\n"b":{}}'
    file.write_bytes(text.encode())
    async with asyncio.timeout(WAIT_S), open_document(file) as document:
        await document.change(set_key("a", 1), accept)
        await document.change(remove_key("c"), accept)
    assert file.read_bytes() == text.encode()
