"""`culm sessions`: listed, shown, renamed, removed and exported, as a server has them."""

import json
import stat
from pathlib import Path

import pytest

from culm.cli.export import check_target, write_whole
from culm.cli.render.ages import ago_text
from culm.cli.render.cells import cells_of, fit
from culm.cli.render.tables import table
from culm.cli.session_state import get_state
from culm.cli.sessions import lines_of, rows_of
from culm.errors import InvalidRequest
from culm.ids import SessionId
from culm.testing.script import Reply
from culm.wire.codec import encode
from culm.wire.sessions import Session
from tests.cli.conftest import Desk, Said
from tests.cli.test_asks import say
from tests.flow.agents_stage import calls, open_agents, talk
from tests.flow.probes import Probe, calling, script
from tests.flow.runs import open_runs

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def test_a_session_is_listed_shown_renamed_exported_and_removed(
    tmp_path: Path, desk: Desk
) -> None:
    replies = script(calling("look", text="Let me \x1b[2Jlook."), Reply(text="Seen."))
    async with open_runs(tmp_path, play=replies, tools=[Probe("look")]) as stage:
        where = ("--host", stage.flow.url)
        await stage.talk("What is here?")
        short = stage.session_id[:8]
        renamed = await say(desk, "sessions", "rename", *where, short, "The", " plums")
        assert renamed == Said(0, f"renamed {short}: The plums\n")
        head, row = (await say(desk, "sessions", *where)).out.splitlines()
        assert head.split() == ["session", "changed", "messages", "cost", "title"]
        assert row.split() == [short, "now", "4", "$0.0000", "The", "plums"]
        (listed,) = json.loads((await say(desk, "sessions", "list", *where, "--json")).out)
        assert (listed["id"], listed["title"]) == (stage.session_id, "The plums")

        shown = (await say(desk, "sessions", "show", *where, "the plums")).out.splitlines()
        assert shown[0] == "The plums"
        assert shown[2:] == [
            *("", "you:", "What is here?"),
            *("", "demo/demo-1:", "Let me [2Jlook.", "→ look", "← look: look 1"),
            *("", "demo/demo-1:", "Seen."),
        ]
        as_json = (await say(desk, "sessions", "show", *where, short, "--json")).out
        state = await get_state(stage.remote, stage.session_id)
        assert json.loads(as_json) == json.loads(encode(state))
        assert list(json.loads(as_json)) == [
            *("session", "messages", "runs", "agents", "queue", "asks"),
        ]

        page = desk.project / "talk.md"
        to = ("sessions", "export", *where, short)
        assert await say(desk, *to, "-o", "talk.md") == Said(0, "")
        assert page.read_text() == (await say(desk, *to)).out
        assert page.read_text() == (await say(desk, *to, "-o", "-")).out
        assert page.read_text().startswith("# The plums\n\n- Session: ")
        assert (await say(desk, *to, "--format", "json")).out == as_json
        again = await say(desk, *to, "-o", "talk.md")
        assert again == Said(2, "", "culm: talk.md is there already\nhint: --force replaces it\n")
        assert (await say(desk, *to, "-o", "talk.md", "--force")).status == 0

        nobody = await say(desk, "sessions", "delete", *where, short)
        assert nobody == Said(
            2, "", "culm: there is nobody to ask\nhint: say --yes if you mean it\n"
        )
        unknown = await say(desk, "sessions", "delete", *where, "--yes", short, "nope")
        assert (unknown.status, unknown.err.splitlines()[0]) == (
            2,
            "culm: no session is called nope",
        )
        gone = await say(desk, "sessions", "delete", *where, "--yes", short, stage.session_id)
        assert gone == Said(0, f"removed {short}  The plums (4 messages)\n")
        empty = "there is no session here; `culm run` begins one\n"
        assert await say(desk, "sessions", *where) == Said(0, "", empty)


async def test_a_session_at_work_stays_and_the_others_go(tmp_path: Path, desk: Desk) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        where = ("--host", stage.flow.url)
        other = await stage.remote.create_session("other")
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        busy = stage.session_id[:8]
        assert f"{busy}  *  " in (await say(desk, "sessions", *where)).out
        ended = await say(desk, "sessions", "delete", *where, "-y", busy, other.id)
        assert (ended.status, ended.out) == (1, f"removed {other.id[:8]}  other (0 messages)\n")
        refused, hint = ended.err.splitlines()
        assert refused.startswith(f"culm: not removed, as it is at work: {busy}")
        assert hint == "hint: wait for it, or cancel it"
        stage.model.release()
        await stage.heard.complete(run_id)


async def test_an_export_has_the_agents_below_if_wanted(tmp_path: Path, desk: Desk) -> None:
    top = talk("top", calls("agent", name="finder", prompt="below: find plums"))
    async with open_agents(tmp_path, top, talk("below", then="Found plums.")) as stage:
        where = ("--host", stage.flow.url)
        await stage.talk("top: go")
        session_id = stage.session_id
        alone = (await say(desk, "sessions", "export", *where, session_id)).out
        whole = (await say(desk, "sessions", "export", *where, "--agents", session_id)).out
        assert whole.startswith(alone)
        assert "\n## finder\n" in whole.removeprefix(alone)
        assert "\nFound plums.\n" in whole.removeprefix(alone)
        data = json.loads(
            (
                await say(
                    desk, "sessions", "export", *where, "--agents", "--format", "json", session_id
                )
            ).out
        )
        (agent,) = data["agents"]
        assert [one["session"]["id"] for one in data["below"]] == [agent["session_id"]]
        named = await say(desk, "sessions", "show", *where, agent["session_id"][:8])
        assert "Found plums." in named.out
        totals = json.loads((await say(desk, "stats", *where, "--json")).out)
        assert [one["runs"] for one in totals["sessions"]] == [2]


# --- a file, whole or not at all


def test_a_file_is_replaced_only_if_that_is_wanted_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    write_whole(file, ["a", "b"], force=False)
    assert file.read_text() == "ab"
    file.chmod(0o640)
    with pytest.raises(InvalidRequest, match="is there already"):
        write_whole(file, ["c"], force=False)
    link = tmp_path / "link.md"
    link.symlink_to(file)
    write_whole(link, ["c\ud800"], force=True)
    assert (file.read_text(), link.is_symlink()) == ("c\\ud800", True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_what_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.md", (piece for _ in "a" for piece in pieces()), force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "it is a directory"),
        ("no/a.md", "there is no directory"),
        ("file/a.md", "Not a directory"),
        ("pipe", "it is no file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "pipe").symlink_to("/dev/null")
    with pytest.raises(InvalidRequest, match=words):
        check_target(tmp_path / name, force=True)


# --- lines


def session(title: str, *, busy: bool = False) -> Session:
    return Session(
        SessionId(f"{len(title)}-abcdefgh"), title=title, message_count=1234, is_busy=busy
    )


@pytest.mark.parametrize("width", [0, 1, 10, 40, 60, 80])
def test_no_line_is_wider_than_its_terminal(width: int) -> None:
    rows = rows_of([session("a" * 300, busy=True), session("猫" * 100)], 0)
    lines = table(rows, width, right=(3, 4), spare=(4, 3))
    assert max(map(cells_of, lines)) <= width
    if width == 40:
        assert lines[1:] == [
            "300-abcd  *  now      aaaaaaaaaaaaaaaaa…",
            "100-abcd     now      猫猫猫猫猫猫猫猫…",
        ]


def test_what_is_piped_is_never_cut() -> None:
    long = "a" * 300
    assert table(rows_of([session(long)], 0))[1].endswith(f"  {long}")
    assert table([("a", "b\nc\x1b")]) == [r"a  b c\x1b"]


def test_a_text_is_cut_to_columns_and_not_to_characters() -> None:
    assert [fit("猫猫a", width) for width in (5, 4, 3, 2, 1, 0)] == [
        *("猫猫a", "猫…", "猫…", "…", "…", ""),
    ]


def test_a_moment_is_told_by_how_long_ago_it_was() -> None:
    now = 1_800_000_000
    ages = (-5, 59, 60, 3599, 3600, 86_399, 86_400, 30 * 86_400)
    assert [ago_text(now - age, now) for age in ages] == [
        *("now", "now", "1 min ago", "59 min ago", "1 h ago", "23 h ago", "1 d ago"),
        "2026-12-16",
    ]


async def test_what_is_open_is_told_below_the_conversation(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        await stage.prompt("And then?")
        state = await get_state(stage.remote, stage.session_id)
        assert list(lines_of(state, 0))[-1] == "(1 prompt waits; busy)"
        stage.model.release()
        await stage.heard.complete(run_id)
        await stage.until_idle()
