"""Hooks before a call, run as real commands; each decision applies to that call."""

import json
from pathlib import Path

from tests.flow.asking import answer, notified, open_asking, request_in
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.support import contract


def hook(output: dict[str, object], *, of: str) -> str:
    """A command that prints `output` only for calls whose input contains `of`."""
    return f"grep -q {of} && echo '{json.dumps(output)}' || true"


@contract("INV-75", "INV-76")
async def test_hook_allows_one_call_and_the_next_equal_call_asks(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    marker = tmp_path / "said"
    once = f'test -e {marker} || {{ touch {marker}; echo \'{{"decision":"allow"}}\'; }}'
    config = {"hooks": {"PreToolUse": [{"command": once}]}}
    play = script(calling("look", path="a"), calling("look", path="a"))
    async with open_asking(tmp_path, play, tool, config=config) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        assert len(tool.calls) == 1
        assert [notification.granted for notification in notified(harness.received)] == [
            True,
            False,
        ]
        assert await answer(harness, ask.id, "allow")
        await harness.received.complete(run_id)
        assert len(tool.calls) == 2


@contract("INV-76")
async def test_denying_or_halting_hook_prevents_the_call(tmp_path: Path) -> None:
    tool = Probe("look")
    hooks = [
        {"command": hook({"decision": "deny", "reason": "not that"}, of="bad")},
        {"command": hook({"halt": True, "reason": "stop here"}, of="worse")},
        {"command": hook({"context": "mind the step"}, of="good")},
    ]
    config = {"hooks": {"PreToolUse": hooks}}
    play = script(*(calling("look", path=path) for path in ("bad", "good", "worse")))
    async with open_asking(tmp_path, play, tool, config=config) as harness:
        complete = await harness.received.complete(await harness.prompt("Hi."))
        assert complete.error == ""
        assert [call.arguments for call in tool.calls] == [{"path": "good"}]
        results = [(one.content, one.is_error) for one in results_of(await harness.messages())]
        assert results == [
            ("not that", True),
            ("look 1\nmind the step", False),
            ("stop here", True),
        ]
