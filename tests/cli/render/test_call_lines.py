import json

import pytest

from culm.cli.render.call_lines import block, call_line, diff_lines, result_lines
from culm.tools.registry import SPECS
from culm.wire.messages import ToolCall, ToolResult

TOOLS = {spec.name: spec.info() for spec in SPECS}


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("bash", '{"command":"make\\ntest","description":"x"}', "→ bash make test"),
        ("grep", '{"pattern":"a b","include":"*.py","path":"src"}', "→ grep a b src *.py"),
        ("edit", '{"file_path":"a.py","old_string":"x"}', "→ edit a.py"),
        ("ls", "{}", "→ ls"),
        ("view", '{"file_path":7}', '→ view {"file_path":7}'),
        (
            "no\x1b[2J\u202etool",
            "{}",
            r"→ no\x1b[2J\u202etool",
        ),  # A misled model may call such a tool.
        ("theirs", '{"a":1}', '→ theirs {"a":1}'),
        ("agent", '{"prompt":"read a","name":"reader"}', "→ agent read a"),
        (
            "agent",
            '{"assignments":[{"prompt":"read\\na"},{"name":"n","prompt":"b"},7]}',
            "→ agent 3: read a; b; ?",
        ),
        ("agent_send", '{"agent":"a1","message":"stop"}', "→ agent_send a1 stop"),
        ("bash", '{"command":"ec', '→ bash {"command":"ec'),
    ],
)
def test_call_is_one_line_with_its_main_arguments(name: str, given: str, line: str) -> None:
    assert call_line(ToolCall("c", name, given, finished=True), TOOLS) == line


CHANGED = {
    "additions": 1,
    "removals": 1,
    "old_content": "a\nb\nc\nd\n",
    "new_content": "a\nB\nc\nd\n",
}
WRITTEN = {"additions": 1, "removals": 0, "diff": "@@ -0,0 +1 @@\n+a\tb"}


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (ToolResult("c", "view", "x" * 1234), ["← view: 1,234 chars"]),
        (ToolResult("c", "view", "no\nfile", is_error=True), ["✗ view: no file"]),
        (
            ToolResult("c", "edit", "Changed.", metadata=json.dumps(CHANGED)),
            [
                "← edit: +1 -1 lines",
                *("  | @@ -1,3 +1,3 @@", "  |  a", "  | -b", "  | +B", "  |  c"),
            ],
        ),
        (
            ToolResult("c", "write", "Made.", metadata=json.dumps(WRITTEN)),
            ["← write: +1 -0 lines", "  | @@ -0,0 +1 @@", "  | +a  b"],
        ),
        (ToolResult("c", "edit", "Changed.", metadata="{"), ["← edit: 8 chars"]),
        (ToolResult("c", "bash", "(no output)\n"), ["← bash: (no output)"]),
        (
            ToolResult("c", "bash", "one\n\x1b[2J\nExit code 2"),
            ["  | one", r"  | \x1b[2J", "  | Exit code 2", "← bash: 3 lines"],
        ),
    ],
)
def test_result_is_a_summary_line_with_diff_or_output(result: ToolResult, lines: list[str]) -> None:
    assert list(result_lines(result, TOOLS)) == lines


def test_long_block_shows_first_and_last_lines_without_repeats() -> None:
    lines = [str(number) for number in range(100)]
    shown = list(block(lines))
    assert shown[:8] == [f"  | {number}" for number in range(8)]
    assert shown[8:] == ["  | … 89 more lines", "  | 97", "  | 98", "  | 99"]
    assert list(block(lines, 12)) == ["  | … 85 more lines", "  | 97", "  | 98", "  | 99"]
    assert list(block(lines[:14], 12)) == ["  | 12", "  | 13"]
    assert list(block(lines[:12])) == [f"  | {number}" for number in range(12)]
    assert list(block(["x" * 300])) == ["  | " + "x" * 199 + "…"]


def test_text_too_long_to_compare_is_not_compared() -> None:
    assert diff_lines("a", "b" * 100_000) == ["(too much to compare here)"]
