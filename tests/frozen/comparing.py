"""Comparison of a fact with its file, with a readable difference."""

import difflib
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = "python -m tests.frozen.record"


def as_text(value: object) -> str:
    """Format JSON like the files here."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def check_text(name: str, now: str, *, command: str = "") -> None:
    """Fail with the difference between the file `name` and the current text."""
    before = (HERE / name).read_text()
    if before == now:
        return
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), f"frozen/{name}", "now", lineterm=""
    )
    hint = f"to change it on purpose: {command or f'{COMMAND} {name}'}"
    pytest.fail("\n".join([*lines, "", hint]), pytrace=False)
