"""Output of a run: no control characters, and UTF-8 JSON in any locale."""

import io
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import HELD_LINES_MAX, RunRenderer, TextRenderer
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.tools.bash import SPEC
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, AskState
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run
from tests.support import contract

ESCAPE = "\x1b]0;pwned\x07"
SHOWN = r"\x1b]0;pwned\x07"


@pytest.mark.parametrize("make", [TextRenderer, JsonRenderer])
def test_control_characters_in_a_config_notice_are_escaped(
    capsys: pytest.CaptureFixture[str], make: type[TextRenderer | JsonRenderer]
) -> None:
    make().note(f"crush.json:1: x{ESCAPE}: unknown key\nhint: mend it")
    assert capsys.readouterr() == ("", f"crush.json:1: x{SHOWN}: unknown key\nhint: mend it\n")


@contract("CLI-4")
def test_control_characters_in_tool_names_and_errors_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer = TextRenderer()
    renderer.call(ToolCall("c", f"ev{ESCAPE}il", "{}", finished=True))
    renderer.result(ToolResult("c", f"ev{ESCAPE}il", "no", is_error=True))
    run = Run(RunId("r"), SessionId("s"), outcome="error", title="No", details=f"bad {ESCAPE}")
    renderer.end(run, "")
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:3]) == (
        "",
        [rf"→ ev{SHOWN}il", rf"✗ ev{SHOWN}il: no", rf"culm: No: bad {SHOWN}"],
    )


def test_call_output_is_streamed_and_the_result_adds_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer = TextRenderer({SPEC.name: SPEC.info()})
    renderer.call(ToolCall("c", "bash", '{"command":"make"}', finished=True))
    for text in ("one\ntw", "o\n", "\x1b[2J"):
        renderer.output("c", text)
    renderer.result(ToolResult("c", "bash", "one\ntwo\nthree\nExit code 2"))
    assert capsys.readouterr().err.splitlines() == [
        *("→ bash make", "  | one", "  | two", "  | three", "  | Exit code 2"),
        "← bash: 4 lines",
    ]
    renderer.output("d", "x\n" * 1000)
    assert capsys.readouterr().err == "  | x\n" * 12


def test_note_starts_a_new_line_below_an_unanswered_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer = TextRenderer()
    renderer.text(MessageId("m"), "so far")
    renderer.prompt(f"allow {ESCAPE}? ")
    renderer.note("allowed")
    renderer.prompt("more? ")
    renderer.typed()
    renderer.note("done")
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
    ("state", "by_us", "expected"),
    [
        ("allowed", True, "allowed: bash: by you"),
        ("denied", False, "denied: bash: by another client"),
        ("expired", False, "expired: bash: nobody answered in time"),
        ("withdrawn", False, "withdrawn: bash: no longer needed"),
    ],
)
def test_ask_and_its_outcome_are_printed(
    capsys: pytest.CaptureFixture[str], state: AskState, expected: str, *, by_us: bool
) -> None:
    closed = replace(ASK, state=state, by="me")
    for renderer in (TextRenderer(), JsonRenderer()):
        renderer.ask(replace(ASK, deadline=9))
        renderer.answered(closed, by_us=by_us)
        renderer.allowed(ToolCall("d", "edit", "{}"))
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "? bash: Run ]0;pwned",
        "hint: answer with `culm approve 12345678` or `culm deny 12345678`",
        expected,
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


def test_agent_output_is_whole_lines_prefixed_with_the_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer = TextRenderer({SPEC.name: SPEC.info()})
    renderer.text(MessageId("m"), "So far.")
    one, two = agent("read README.md"), agent("read README.md and more")
    first = renderer.agent(one)
    below = renderer.agent(replace(two, parent_id=one.agent_id, agent_id="x", is_read_only=True))
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
    again = renderer.agent(agent("read README.md"))
    again.started(one)
    run = Run(RunId("r"), SessionId("s"), outcome="end_turn", tree_tokens=1234, tree_cost=0.0123)
    renderer.end(run, "", agents=2)
    out, err = capsys.readouterr()
    name = "[read README.md and…]"
    assert (out, err.splitlines()) == (
        "So far.\n",
        [
            "[read README.md] started: worker, read REA",
            f"{name} started: worker, read REA, read-only, for read README.md",
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


def test_agent_output_is_held_while_a_prompt_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    renderer = TextRenderer()
    agent_renderer = renderer.agent(agent("a"))
    renderer.prompt("allow? ")
    for number in range(HELD_LINES_MAX + 5):
        agent_renderer.note(str(number))
    assert capsys.readouterr().err == "allow? "
    renderer.typed()
    renderer.close_prompt()
    agent_renderer.note("done")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["(earlier lines of agents are left out)", "[a] 5"]
    assert (lines[-1], len(lines)) == ("[a] done", HELD_LINES_MAX + 2)


def test_json_lines_name_the_agent_they_belong_to(capsys: pytest.CaptureFixture[str]) -> None:
    renderer = JsonRenderer()
    one = replace(agent("reader"), outcome="completed", tokens=7, cost=0.5, run_id="r1")
    agent_renderer = renderer.agent(one)
    agent_renderer.started(one)
    agent_renderer.text(MessageId("m"), "Hi.")
    agent_renderer.ask(replace(ASK, agent_path=["top", "reader"]))
    agent_renderer.ended(one)
    run = Run(RunId("r"), SessionId("s"), outcome="end_turn", tree_tokens=9, tree_cost=0.5)
    renderer.end(run, "", agents=1)
    started, text, ask, ended, end = map(json.loads, capsys.readouterr().out.splitlines())
    owner = {"agent_id": one.agent_id, "session_id": "s-reader"}
    assert started == {
        **{"type": "agent_started", **owner, "parent_id": "top", "name": "reader"},
        **{"role": "worker", "provider": "", "model": "", "depth": 1, "run_id": "r1"},
    }
    assert text == {"type": "agent_text", **owner, "text": "Hi.", "message_id": "m"}
    assert ask == {**ask, "type": "agent_ask", **owner, "agent_path": ["top", "reader"]}
    assert ended == {
        **{"type": "agent_ended", **owner, "outcome": "completed", "reason": ""},
        **{"run_id": "r1", "tokens": 7, "cost": 0.5},
    }
    assert end == {**end, "type": "end", "agents": 1, "tree_tokens": 9, "tree_cost": 0.5}


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_json_is_utf_8_in_any_stdout_encoding(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding=encoding))
    renderer: RunRenderer = JsonRenderer()
    for text in ("é €", "😀\n", "plain"):
        renderer.text(MessageId("m"), text)
    texts = [json.loads(line)["text"] for line in sink.getvalue().decode().splitlines()]
    assert texts == ["é €", "😀\n", "plain"]


def test_text_that_stdout_cannot_encode_is_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii"))
    TextRenderer().text(MessageId("m"), "é€")
    assert sink.getvalue() == rb"\xe9\u20ac"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("run hello >&-", 141, ""),
        ("run --json hello >&-", 141, ""),
        ("agent call x hello >&-", 141, ""),
        ("agent call x hello <&-", 2, "culm: no agent has the id or role x"),
        ("run <&-", 2, "culm: no prompt given"),
    ],
)
def test_closed_streams_end_the_command_without_a_traceback(
    command: str, status: int, message: str
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m culm {command}', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr.partition("\n")[0]) == (status, message)
