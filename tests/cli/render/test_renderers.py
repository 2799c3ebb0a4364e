"""What a run prints: nothing that a terminal obeys, and JSON whatever the terminal speaks."""

import io
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import HELD_LINES_MAX, RunRenderer, TextRenderer
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, AskState
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run
from tests.support import contract

ESCAPE = "\x1b]0;pwned\x07"
SHOWN = r"\x1b]0;pwned\x07"


@pytest.mark.parametrize("make", [TextRenderer, JsonRenderer])
def test_a_notice_out_of_a_file_is_printed_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], make: type[TextRenderer | JsonRenderer]
) -> None:
    make().note(f"crush.json:1: x{ESCAPE}: unknown key\nhint: mend it")
    assert capsys.readouterr() == ("", f"crush.json:1: x{SHOWN}: unknown key\nhint: mend it\n")


@contract("CLI-4")
def test_names_and_reasons_of_strangers_are_printed_and_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    face = TextRenderer()
    face.call(ToolCall("c", f"ev{ESCAPE}il", "{}", finished=True))
    face.result(ToolResult("c", f"ev{ESCAPE}il", "no", is_error=True))
    run = Run(RunId("r"), SessionId("s"), outcome="error", title="No", details=f"bad {ESCAPE}")
    face.end(run, "")
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:3]) == (
        "",
        [rf"→ ev{SHOWN}il", rf"✗ ev{SHOWN}il: no", rf"culm: No: bad {SHOWN}"],
    )


def test_what_a_call_puts_out_is_shown_as_it_comes_and_its_result_adds_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    face = TextRenderer()
    face.call(ToolCall("c", "bash", '{"command":"make"}', finished=True))
    for text in ("one\ntw", "o\n", "\x1b[2J"):
        face.output("c", text)
    face.result(ToolResult("c", "bash", "one\ntwo\nthree\nExit code 2"))
    assert capsys.readouterr().err.splitlines() == [
        *("→ bash make", "  | one", "  | two", "  | three", "  | Exit code 2"),
        "← bash: 4 lines",
    ]
    face.output("d", "x\n" * 1000)
    assert capsys.readouterr().err == "  | x\n" * 12


def test_a_note_comes_below_a_prompt_that_nobody_has_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    face = TextRenderer()
    face.text(MessageId("m"), "so far")
    face.prompt(f"allow {ESCAPE}? ")
    face.note("allowed")
    face.prompt("more? ")
    face.typed()
    face.note("done")
    assert capsys.readouterr() == ("so far\n", f"allow {SHOWN}? \nallowed\nmore? done\n")


ASK = AskChanged(
    AskId("12345678-9"),
    SessionId("s"),
    RunId("r"),
    "c",
    "bash",
    "execute",
    f"Run {ESCAPE}",
    "",
    "open",
)


@pytest.mark.parametrize(
    ("state", "by_us", "words"),
    [
        ("allowed", True, "allowed: bash: by you"),
        ("denied", False, "denied: bash: by another client"),
        ("expired", False, "expired: bash: nobody answered in time"),
        ("withdrawn", False, "withdrawn: bash: it is not needed any more"),
    ],
)
def test_what_is_asked_is_told_with_its_fate(
    capsys: pytest.CaptureFixture[str], state: AskState, words: str, *, by_us: bool
) -> None:
    closed = replace(ASK, state=state, by="me")
    for face in (TextRenderer(), JsonRenderer()):
        face.ask(replace(ASK, deadline=9))
        face.answered(closed, by_us=by_us)
        face.allowed(ToolCall("d", "edit", "{}"))
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "? bash: Run ]0;pwned",
        "hint: `culm approve 12345678`, or `culm deny 12345678`, answers it",
        words,
        "allowed: edit: by an earlier answer, or a hook",
    ]
    asked, answered, allowed = map(json.loads, out.splitlines())
    assert asked == {
        **{"type": "ask", "id": "12345678-9", "call_id": "c", "tool": "bash"},
        **{"action": "execute", "description": f"Run {ESCAPE}", "deadline": 9, "agent_path": []},
    }
    assert answered == {
        **{"type": "answered", "id": "12345678-9", "call_id": "c", "state": state, "by": "me"}
    }
    assert allowed == {"type": "allowed", "call_id": "d"}


def agent(name: str, parent: str = "top") -> Agent:
    ids = (AgentId(f"{name[:8]:0<8}-1"), parent, SessionId(f"s-{name}"))
    return Agent(*ids, name=name, role="worker", depth=1)


def test_agents_talk_in_whole_lines_behind_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    face = TextRenderer()
    face.text(MessageId("m"), "So far.")
    one, two = agent("read README.md"), agent("read README.md and more")
    first = face.agent(one)
    below = face.agent(replace(two, parent_id=one.agent_id, agent_id="x", is_read_only=True))
    first.started(one)
    below.started(replace(two, is_read_only=True))
    first.text(MessageId("1"), "I loo")
    below.text(MessageId("1"), f"Begun{ESCAPE}\n\nen")
    first.text(MessageId("1"), "k.\n")
    below.call(ToolCall("c", "bash", '{"command":"ls"}', finished=True))
    below.output("c", "a\nb")
    below.ask(ASK)
    below.text(MessageId("2"), "x" * 201)
    below.text(MessageId("3"), "y")
    below.ended(replace(two, outcome="budget", reason="It is used up", tokens=1, cost=0.25))
    again = face.agent(agent("read README.md"))
    again.started(one)
    run = Run(RunId("r"), SessionId("s"), outcome="end_turn", tree_tokens=1234, tree_cost=0.0123)
    face.end(run, "", agents=2)
    out, err = capsys.readouterr()
    name = "[read README.md and…]"
    assert (out, err.splitlines()) == (
        "So far.\n",
        [
            "[read README.md] started: worker, read REA",
            f"{name} started: worker, read REA, only reads, for read README.md",
            f"{name} | Begun{SHOWN}",
            f"{name} |",
            "[read README.md] | I look.",
            f"{name} | en",
            f"{name} → bash ls",
            f"{name}   | a",
            f"{name} ? bash (read README.md > read README.md and…): Run ]0;pwned",
            f"{name} | {'x' * 200}",
            f"{name} | x",
            f"{name} | y",
            f"{name} budget: It is used up; 1 token, $0.2500",
            "[read README.md 2] started: worker, read REA",
            "tree: 3 agents, 1,234 tokens, $0.0123",
        ],
    )


def test_agents_wait_while_somebody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    face = TextRenderer()
    talking = face.agent(agent("a"))
    face.prompt("allow? ")
    for number in range(HELD_LINES_MAX + 5):
        talking.note(str(number))
    assert capsys.readouterr().err == "allow? "
    face.typed()
    face.close_prompt()
    talking.note("done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["(what agents have said before is left out)", "[a] 5"]
    assert (lines[-1], len(lines)) == ("[a] done", HELD_LINES_MAX + 2)


def test_programs_are_told_whose_each_line_is(capsys: pytest.CaptureFixture[str]) -> None:
    face = JsonRenderer()
    one = replace(agent("reader"), outcome="completed", tokens=7, cost=0.5, run_id="r1")
    telling = face.agent(one)
    telling.started(one)
    telling.text(MessageId("m"), "Hi.")
    telling.ask(replace(ASK, agent_path=["top", "reader"]))
    telling.ended(one)
    run = Run(RunId("r"), SessionId("s"), outcome="end_turn", tree_tokens=9, tree_cost=0.5)
    face.end(run, "", agents=1)
    started, text, ask, ended, end = map(json.loads, capsys.readouterr().out.splitlines())
    whose = {"agent_id": one.agent_id, "session_id": "s-reader"}
    assert started == {
        **{"type": "agent_started", **whose, "parent_id": "top", "name": "reader"},
        **{"role": "worker", "provider": "", "model": "", "depth": 1, "run_id": "r1"},
    }
    assert text == {"type": "agent_text", **whose, "text": "Hi.", "message_id": "m"}
    assert ask == {**ask, "type": "agent_ask", **whose, "agent_path": ["top", "reader"]}
    assert ended == {
        **{"type": "agent_ended", **whose, "outcome": "completed", "reason": ""},
        **{"run_id": "r1", "tokens": 7, "cost": 0.5},
    }
    assert end == {**end, "type": "end", "agents": 1, "tree_tokens": 9, "tree_cost": 0.5}


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_json_is_utf_8_whatever_stdout_speaks(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding=encoding))
    face: RunRenderer = JsonRenderer()
    for text in ("é €", "😀\n", "plain"):
        face.text(MessageId("m"), text)
    texts = [json.loads(line)["text"] for line in sink.getvalue().decode().splitlines()]
    assert texts == ["é €", "😀\n", "plain"]


def test_plain_text_that_stdout_cannot_spell_is_printed_in_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii"))
    TextRenderer().text(MessageId("m"), "é€")
    assert sink.getvalue() == rb"\xe9\u20ac"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("run hello >&-", 141, ""),
        ("run --json hello >&-", 141, ""),
        ("agent call x hello >&-", 141, ""),
        ("agent call x hello <&-", 2, "culm: no agent has the id or the role x"),
        ("run <&-", 2, "culm: there is no prompt"),
    ],
)
def test_streams_that_are_closed_are_an_end_and_no_traceback(
    command: str, status: int, said: str
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m culm {command}', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr.partition("\n")[0]) == (status, said)
