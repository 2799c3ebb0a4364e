"""`culm sessions`: list, show, rename, delete and export."""

import json
import stat
from pathlib import Path

import pytest

from culm.cli.commands.sessions import check_target, get_state, lines_of, rows_of, write_whole
from culm.cli.render.text import ago_text, cells_of, fit, fitted_table
from culm.errors import InvalidRequest
from culm.ids import SessionId
from culm.testing.script import Reply
from culm.wire.codec import encode
from culm.wire.messages import Session
from tests.cli.commands.test_asks import run_culm
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.agents_harness import calls, open_agents, talk
from tests.flow.probes import Probe, calling, script
from tests.flow.runs import open_runs

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def test_session_is_listed_shown_renamed_exported_and_deleted(
    tmp_path: Path, cli: CliHarness
) -> None:
    replies = script(calling("look", text="Let me \x1b[2Jlook."), Reply(text="Seen."))
    async with open_runs(tmp_path, play=replies, tools=[Probe("look")]) as harness:
        options = ("--host", harness.flow.url)
        await harness.talk("What is here?")
        short = harness.session_id[:8]
        renamed = await run_culm(cli, "sessions", "rename", *options, short, "The", " plums")
        assert renamed == CommandResult(0, f"renamed {short}: The plums\n")
        head, row = (await run_culm(cli, "sessions", *options)).out.splitlines()
        assert head.split() == ["session", "changed", "messages", "cost", "title"]
        assert row.split() == [short, "now", "4", "$0.0000", "The", "plums"]
        (listed,) = json.loads((await run_culm(cli, "sessions", "list", *options, "--json")).out)
        assert (listed["id"], listed["title"]) == (harness.session_id, "The plums")

        shown = (await run_culm(cli, "sessions", "show", *options, "the plums")).out.splitlines()
        assert shown[0] == "The plums"
        assert shown[2:] == [
            *("", "you:", "What is here?"),
            *("", "demo/demo-1:", "Let me [2Jlook.", "→ look", "← look: look 1"),
            *("", "demo/demo-1:", "Seen."),
        ]
        as_json = (await run_culm(cli, "sessions", "show", *options, short, "--json")).out
        state = await get_state(harness.remote, harness.session_id)
        assert json.loads(as_json) == json.loads(encode(state))
        assert list(json.loads(as_json)) == [
            *("session", "messages", "runs", "agents", "queue", "asks"),
        ]

        page = cli.project / "talk.md"
        to = ("sessions", "export", *options, short)
        assert await run_culm(cli, *to, "-o", "talk.md") == CommandResult(0, "")
        assert page.read_text() == (await run_culm(cli, *to)).out
        assert page.read_text() == (await run_culm(cli, *to, "-o", "-")).out
        assert page.read_text().startswith("# The plums\n\n- Session: ")
        assert (await run_culm(cli, *to, "--format", "json")).out == as_json
        again = await run_culm(cli, *to, "-o", "talk.md")
        assert again == CommandResult(
            2, "", "culm: talk.md already exists\nhint: use --force to overwrite it\n"
        )
        assert (await run_culm(cli, *to, "-o", "talk.md", "--force")).status == 0

        unconfirmed = await run_culm(cli, "sessions", "delete", *options, short)
        assert unconfirmed == CommandResult(
            2, "", "culm: cannot ask for confirmation without a terminal\nhint: use --yes\n"
        )
        unknown = await run_culm(cli, "sessions", "delete", *options, "--yes", short, "nope")
        assert (unknown.status, unknown.err.splitlines()[0]) == (
            2,
            "culm: no session is named nope",
        )
        gone = await run_culm(
            cli, "sessions", "delete", *options, "--yes", short, harness.session_id
        )
        assert gone == CommandResult(0, f"deleted {short}  The plums (4 messages)\n")
        empty = "no sessions here; `culm run` starts one\n"
        assert await run_culm(cli, "sessions", *options) == CommandResult(0, "", empty)


async def test_busy_session_is_kept_and_the_others_are_deleted(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        options = ("--host", harness.flow.url)
        other = await harness.remote.create_session("other")
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        busy = harness.session_id[:8]
        assert f"{busy}  *  " in (await run_culm(cli, "sessions", *options)).out
        ended = await run_culm(cli, "sessions", "delete", *options, "-y", busy, other.id)
        assert (ended.status, ended.out) == (1, f"deleted {other.id[:8]}  other (0 messages)\n")
        refused, hint = ended.err.splitlines()
        assert refused.startswith(f"culm: not deleted, because it is busy: {busy}")
        assert hint == "hint: wait for it, or cancel it"
        harness.model.release()
        await harness.received.complete(run_id)


async def test_export_includes_agents_on_request(tmp_path: Path, cli: CliHarness) -> None:
    top = talk("top", calls("agent", name="finder", prompt="below: find plums"))
    async with open_agents(tmp_path, top, talk("below", then="Found plums.")) as harness:
        options = ("--host", harness.flow.url)
        await harness.talk("top: go")
        session_id = harness.session_id
        alone = (await run_culm(cli, "sessions", "export", *options, session_id)).out
        whole = (await run_culm(cli, "sessions", "export", *options, "--agents", session_id)).out
        assert whole.startswith(alone)
        assert "\n## finder\n" in whole.removeprefix(alone)
        assert "\nFound plums.\n" in whole.removeprefix(alone)
        data = json.loads(
            (
                await run_culm(
                    cli, "sessions", "export", *options, "--agents", "--format", "json", session_id
                )
            ).out
        )
        (agent,) = data["agents"]
        assert [one["session"]["id"] for one in data["below"]] == [agent["session_id"]]
        named = await run_culm(cli, "sessions", "show", *options, agent["session_id"][:8])
        assert "Found plums." in named.out
        totals = json.loads((await run_culm(cli, "stats", *options, "--json")).out)
        assert [one["runs"] for one in totals["sessions"]] == [2]


# --- atomic files


def test_file_is_replaced_only_with_force_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    write_whole(file, ["a", "b"], force=False)
    assert file.read_text() == "ab"
    file.chmod(0o640)
    with pytest.raises(InvalidRequest, match="already exists"):
        write_whole(file, ["c"], force=False)
    link = tmp_path / "link.md"
    link.symlink_to(file)
    write_whole(link, ["c\ud800"], force=True)
    assert (file.read_text(), link.is_symlink()) == ("c\\ud800", True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def pieces() -> list[str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.md", (piece for _ in "a" for piece in pieces()), force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".", "it is a directory"),
        ("no/a.md", "there is no directory"),
        ("file/a.md", "Not a directory"),
        ("pipe", "it is not a regular file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_unwritable_target_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "pipe").symlink_to("/dev/null")
    with pytest.raises(InvalidRequest, match=expected):
        check_target(tmp_path / name, force=True)


# --- lines


def session(title: str, *, busy: bool = False) -> Session:
    return Session(
        SessionId(f"{len(title)}-abcdefgh"), title=title, message_count=1234, is_busy=busy
    )


@pytest.mark.parametrize("width", [0, 1, 10, 40, 60, 80])
def test_session_line_is_never_wider_than_the_terminal(width: int) -> None:
    rows = rows_of([session("a" * 300, busy=True), session("猫" * 100)], 0)
    lines = fitted_table(rows, width, right=(3, 4), spare=(4, 3))
    assert max(map(cells_of, lines)) <= width
    if width == 40:
        assert lines[1:] == [
            "300-abcd  *  now      aaaaaaaaaaaaaaaaa…",
            "100-abcd     now      猫猫猫猫猫猫猫猫…",
        ]


def test_piped_table_is_never_cut() -> None:
    long = "a" * 300
    assert fitted_table(rows_of([session(long)], 0))[1].endswith(f"  {long}")
    assert fitted_table([("a", "b\nc\x1b")]) == [r"a  b c\x1b"]


def test_text_is_cut_by_display_width() -> None:
    assert [fit("猫猫a", width) for width in (5, 4, 3, 2, 1, 0)] == [
        *("猫猫a", "猫…", "猫…", "…", "…", ""),
    ]


def test_time_is_shown_as_its_age() -> None:
    now = 1_800_000_000
    ages = (-5, 59, 60, 3599, 3600, 86_399, 86_400, 30 * 86_400)
    assert [ago_text(now - age, now) for age in ages] == [
        *("now", "now", "1 min ago", "59 min ago", "1 h ago", "23 h ago", "1 d ago"),
        "2026-12-16",
    ]


async def test_waiting_prompts_are_counted_below_the_conversation(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        await harness.prompt("And then?")
        state = await get_state(harness.remote, harness.session_id)
        assert list(lines_of(state, 0, {}))[-1] == "(1 prompt waits; busy)"
        harness.model.release()
        await harness.received.complete(run_id)
        await harness.until_idle()
