"""Text differences are correct for any input and fast to find in large texts."""

import difflib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from culm.tools.files.diffs import (
    CONTENT_CHARS_MAX,
    EDITS_MAX,
    TextDifference,
    difference,
    excerpts,
    lines_of,
    unified,
)

TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "d"]), max_size=14).map("".join)


def applied(before: Sequence[str], found: TextDifference) -> list[str]:
    """Return the lines after a change, computed from the difference."""
    after: list[str] = []
    at = 0
    for block in found.blocks:
        start = found.skipped + block.a0
        after += before[at:start]
        after += found.after[block.b0 : block.b1]
        at = found.skipped + block.a1
    return [*after, *before[at:]]


@given(TEXTS, TEXTS)
def test_applying_a_difference_gives_the_other_text(before: str, after: str) -> None:
    found = difference(before, after)
    assert "".join(applied(lines_of(before), found)) == after
    grown = len(lines_of(after)) - len(lines_of(before))
    assert found.additions - found.removals == grown
    assert (found.additions + found.removals == 0) == (before == after)


@given(TEXTS, TEXTS)
def test_a_difference_is_never_longer_than_the_one_of_difflib(before: str, after: str) -> None:
    found = difference(before, after)
    other = difflib.SequenceMatcher(None, lines_of(before), lines_of(after), autojunk=False)
    kept = sum(block.size for block in other.get_matching_blocks())
    assert found.removals <= len(lines_of(before)) - kept


def test_a_difference_is_formatted_like_diff_output() -> None:
    before = "".join(f"line {n}\n" for n in range(1, 40))
    after = before.replace("line 5\n", "five\nmore\n").replace("line 30\n", "").rstrip("\n")
    wanted = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/x/y", "b/x/y"
    )
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in wanted)
    assert unified(difference(before, after), "/x/y") == (text + "\\ No newline at end of file\n")
    assert unified(difference(before, before), "x") == ""
    assert unified(difference("", "a\n"), "x") == "--- a/x\n+++ b/x\n@@ -0,0 +1,1 @@\n+a\n"


def test_changes_beyond_the_edit_limit_count_as_one_replacement() -> None:
    before = "".join(f"{n}\nsame\n" for n in range(EDITS_MAX))
    after = "".join(f"x{n}\nsame\n" for n in range(EDITS_MAX))
    found = difference(before, after)
    assert (len(found.blocks), found.additions) == (1, 2 * EDITS_MAX - 1)
    assert unified(difference("a\n" * 200_000, "b\n" * 200_000), "x").endswith(
        "(the rest of the difference is left out)\n"
    )


def test_excerpts_of_long_texts_keep_the_changed_lines_and_their_context() -> None:
    lines = [f"line {n:06}\n" for n in range(CONTENT_CHARS_MAX // 6)]
    before = "".join(lines)
    changed = [*lines[:20_000], "new\n", *lines[20_001:]]
    old, new = excerpts(before, "".join(changed))
    assert max(len(old), len(new)) < 2000
    assert old.startswith("… (lines left out: 19950)\nline 019950\n")
    assert new == old.replace("line 020000\n", "new\n")
    assert excerpts("a", "b") == ("a", "b")
    cut, _ = excerpts("x" * (CONTENT_CHARS_MAX + 9), "y")
    assert cut == "x" * CONTENT_CHARS_MAX + "… (cut)\n"
