"""Properties of all commands, however they are composed."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from culm.shell.judge import judge
from culm.shell.words import names
from tests.shell.cases import ASKED, FREE
from tests.shell.conftest import Judge

FEW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# A here-document or a comment swallows what is put behind it.
PLAIN = [text for text in FREE if "<<" not in text and "#" not in text and not text.endswith("&")]
free = st.sampled_from([text.rstrip("; ") for text in PLAIN])

# `@` stands for the command; `^` is the end of a line.
CHANGING = """\
@; rm x|@ && rm x|@ & rm x|@^rm x|rm x; @|rm x^@|! rm x && @
@ > new|@ >> new|@ &> new|@ 2> new|@ < /etc/passwd
@ $(rm x)|@ `rm x`|@ <(rm x)|@ "$(rm x)"|X=$(rm x) @|PATH=. @
if rm x; then @; fi|for i in $(rm x); do @; done|while @; do rm x; done
(@; rm x)|{ rm x; @; }|f() { rm x; }; @; f|sudo @|eval '@'
@; bash -c 'rm x'|cat <<EOF^$(rm x)^EOF^@
case $(rm x) in a) @;; esac|[[ -f $(rm x) ]] && @|echo $(( $(rm x) )); @
"""
PIPED = ["@ | sh", "@ || rm x", "@ |& tee x", "@ | xargs rm"]
HARMLESS = """\
@|@^true|true && @|@ | head -5|@ 2>/dev/null|( @ )|{ @; }
if true; then @; fi|for i in 1 2; do ( @ ); done|@ || echo none|@ &|! @
^@^|@ # why|# why^@|echo "$( @ )"
"""


def _forms(text: str) -> list[str]:
    return [form.replace("^", "\n") for line in text.splitlines() for form in line.split("|")]


changing = st.sampled_from([*_forms(CHANGING.replace("||", "")), *PIPED])
harmless = st.sampled_from(
    [form for form in _forms(HARMLESS) if "@" in form] + ["@ | head -5", "@ || echo none"]
)


@FEW
@given(command=free, form=changing)
def test_free_command_combined_with_another_is_never_free(
    judge_command: Judge, command: str, form: str
) -> None:
    assert not judge_command(form.replace("@", command)).is_free


@FEW
@given(command=free, forms=st.lists(harmless, min_size=1, max_size=3))
def test_free_command_stays_free_in_harmless_forms(
    judge_command: Judge, command: str, forms: list[str]
) -> None:
    whole = command
    for form in forms:
        # A subshell: a change of directory does not affect what follows.
        whole = "(\n" + form.replace("@", f"( {whole} )") + "\n)"
    assert judge_command(whole).why == ""


FRAGMENTS = st.sampled_from(
    [
        *names("ls rm x a.txt ; & && || | |& ( ) { } [ ] [[ ]] (( )) $( ` $(( ${ ' \" $x $' ~ * ?"),
        *names("# ! < > << EOF >& <( <<< = += if then fi for in do done case esac ;; while time"),
        *names("function -o .. / {a,b} cd eval echo cat git log"),
        "\n",
        "\\",
    ]
)


@settings(FEW, max_examples=300)
@given(text=st.one_of(st.text(), st.lists(FRAGMENTS, max_size=14).map(" ".join)))
def test_no_text_makes_the_judge_fail(judge_command: Judge, text: str) -> None:
    judgement = judge_command(text)
    assert judgement.is_free == (judgement.why == "")
    assert judgement.is_free or bool(judgement.coverage) == (judgement.commands is not None)


@FEW
@given(text=st.sampled_from(ASKED), cut=st.integers(0, 40), form=harmless)
def test_truncated_command_does_not_make_the_judge_fail(
    judge_command: Judge, text: str, cut: int, form: str
) -> None:
    judge_command(form.replace("@", text[:cut]) + text[cut:])


def _state(root: Path) -> list[tuple[str, bytes]]:
    def entries() -> Iterator[tuple[str, bytes]]:
        for path in sorted(root.rglob("*")):
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            yield str(path), content

    return list(entries())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_changes_nothing_when_running_free_commands(tmp_path: Path) -> None:
    """Run random free commands in bash and check that nothing changes."""
    root = tmp_path.resolve()
    (root / "sub").mkdir()
    (root / "a.txt").write_text("x\n")
    (root / "x").write_text("keep\n")
    (root / "sub" / "b.py").write_text("y\n")
    before = _state(root)
    tried: set[str] = set()

    pieces = st.lists(FRAGMENTS | free, min_size=1, max_size=7)

    @settings(max_examples=400, deadline=None, database=None)
    @given(pieces=pieces, joint=st.sampled_from([" ", "", "\n", "; "]))
    def collect(pieces: list[str], joint: str) -> None:
        text = joint.join(pieces)
        if "sleep" not in text and judge(text, root, [root]).is_free:
            tried.add(text)

    collect()
    assert len(tried) > 20
    script = [f"timeout 2 bash -c {shlex.quote(text)}" for text in sorted(tried)]
    subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "HOME": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=50,
        check=False,
    )
    assert _state(root) == before


def test_no_character_crashes_the_parser(judge_command: Judge) -> None:
    # Its tables have 256 entries; what is beyond them depends on the memory of the process.
    for code in range(0x80, 0x110000, 97):
        if not 0xD800 <= code < 0xE000:
            judgement = judge_command(f"ls {{{chr(code)}a: {{{chr(code)}")
            assert judgement.commands == (f"ls {{{chr(code)}a: {{{chr(code)}",)
