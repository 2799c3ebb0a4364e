"""What a run prints: nothing that a terminal obeys, and JSON whatever the terminal speaks."""

import io
import json
import subprocess
import sys

import pytest

from culm.cli.faces import Face, JsonLines, Plain
from culm.ids import MessageId, RunId, SessionId
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
