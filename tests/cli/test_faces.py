"""What a run prints: nothing that a terminal obeys, and JSON whatever the terminal speaks."""

import io
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from culm.cli.faces import Face, JsonLines, Plain
from culm.ids import AskId, MessageId, RunId, SessionId
from culm.wire.asks import AskChanged, AskState
from culm.wire.messages import ToolCall, ToolResult
from culm.wire.runs import Run

ESCAPE = "\x1b]0;pwned\x07"
SHOWN = r"\x1b]0;pwned\x07"


@pytest.mark.parametrize("make", [Plain, JsonLines])
def test_a_notice_out_of_a_file_is_printed_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], make: type[Plain | JsonLines]
) -> None:
    make().note(f"crush.json:1: x{ESCAPE}: unknown key\nhint: mend it")
    assert capsys.readouterr() == ("", f"crush.json:1: x{SHOWN}: unknown key\nhint: mend it\n")


def test_names_and_reasons_of_strangers_are_printed_and_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    face = Plain()
    face.call(ToolCall("c", f"ev{ESCAPE}il", "{}", finished=True))
    face.result(ToolResult("c", f"ev{ESCAPE}il", "no", is_error=True))
    run = Run(RunId("r"), SessionId("s"), outcome="error", title="No", details=f"bad {ESCAPE}")
    face.end(run, "")
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:3]) == (
        "",
        [rf"→ ev{SHOWN}il {{}}", rf"✗ ev{SHOWN}il: no", rf"culm: No: bad {SHOWN}"],
    )


def test_what_a_call_puts_out_is_shown_as_it_comes_and_its_result_adds_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    face = Plain()
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
    face = Plain()
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
    for face in (Plain(), JsonLines()):
        face.ask(replace(ASK, deadline=9))
        face.answered(closed, by_us=by_us)
        face.allowed(ToolCall("d", "edit", "{}"))
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "? bash: Run ]0;pwned",
        "hint: `culm answer 12345678 allow`, or deny, answers it",
        words,
        "allowed: edit: by an earlier answer, or a hook",
    ]
    asked, answered, allowed = map(json.loads, out.splitlines())
    assert asked == {
        **{"type": "ask", "id": "12345678-9", "call_id": "c", "tool": "bash"},
        **{"action": "execute", "description": f"Run {ESCAPE}", "deadline": 9},
    }
    assert answered == {
        **{"type": "answered", "id": "12345678-9", "call_id": "c", "state": state, "by": "me"}
    }
    assert allowed == {"type": "allowed", "call_id": "d"}


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_json_is_utf_8_whatever_stdout_speaks(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding=encoding))
    face: Face = JsonLines()
    for text in ("é €", "😀\n", "plain"):
        face.text(MessageId("m"), text)
    texts = [json.loads(line)["text"] for line in sink.getvalue().decode().splitlines()]
    assert texts == ["é €", "😀\n", "plain"]


def test_plain_text_that_stdout_cannot_spell_is_printed_in_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii"))
    Plain().text(MessageId("m"), "é€")
    assert sink.getvalue() == rb"\xe9\u20ac"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("run hello >&-", 141, ""),
        ("run --json hello >&-", 141, ""),
        ("agent call x hello >&-", 141, ""),
        ("agent call x hello <&-", 1, "culm: no agent has the id or the role x"),
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
