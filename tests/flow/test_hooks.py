"""Hooks before a call, run as the real commands they are: what each says holds for that call."""

import json
from pathlib import Path

from tests.flow.asking import answer, notified, open_asking, request_in
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.support import contract


def hook(says: dict[str, object], *, of: str) -> str:
    """A command that says this of calls whose input names `of`, and nothing of others."""
    return f"grep -q {of} && echo '{json.dumps(says)}' || true"


@contract("INV-75", "INV-76")
async def test_a_hook_lets_one_call_through_and_the_next_like_it_is_asked_about(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    said = tmp_path / "said"
    once = f'test -e {said} || {{ touch {said}; echo \'{{"decision":"allow"}}\'; }}'
    config = {"hooks": {"PreToolUse": [{"command": once}]}}
    play = script(calling("look", path="a"), calling("look", path="a"))
    async with open_asking(tmp_path, play, tool, config=config) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        assert len(tool.calls) == 1
        assert [told.granted for told in notified(stage.heard)] == [True, False]
        assert await answer(stage, ask.id, "allow")
        await stage.heard.complete(run_id)
        assert len(tool.calls) == 2


@contract("INV-76")
async def test_a_hook_that_denies_or_halts_keeps_a_call_from_running(tmp_path: Path) -> None:
    tool = Probe("look")
    hooks = [
        {"command": hook({"decision": "deny", "reason": "not that"}, of="bad")},
        {"command": hook({"halt": True, "reason": "stop here"}, of="worse")},
        {"command": hook({"context": "mind the step"}, of="good")},
    ]
    config = {"hooks": {"PreToolUse": hooks}}
    play = script(*(calling("look", path=path) for path in ("bad", "good", "worse")))
    async with open_asking(tmp_path, play, tool, config=config) as stage:
        complete = await stage.heard.complete(await stage.prompt("Hi."))
        assert complete.error == ""
        assert [call.arguments for call in tool.calls] == [{"path": "good"}]
        results = [(one.content, one.is_error) for one in results_of(await stage.messages())]
        assert results == [
            ("not that", True),
            ("look 1\nmind the step", False),
            ("stop here", True),
        ]
