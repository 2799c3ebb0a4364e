"""Hooks: what one says, what several say together, and that a bad one has no say."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config.schema import Hook
from culm.permission.hooks import (
    OUTPUT_BYTES_MAX,
    REASON_CHARS_MAX,
    HookAnswer,
    Hooks,
    HookVerdict,
    InvalidHookAnswer,
    matching,
    merge,
    read_answer,
)
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, contract
from tests.tools.kits import WORKSPACE, call_of, open_context, open_descriptors

# --- what one says


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, HookAnswer()),
        ({"decision": "allow"}, HookAnswer("allow")),
        ({"decision": "deny", "reason": "no"}, HookAnswer("deny", reason="no")),
        ({"decision": None, "context": "c"}, HookAnswer(context="c")),
        ({"context": ["a", "b", 1]}, HookAnswer(context="a\nb")),
        ({"halt": True, "reason": "stop"}, HookAnswer(halt=True, reason="stop")),
        ({"halt": "yes"}, HookAnswer()),
        ({"updated_input": {"a": 1}}, HookAnswer(patch={"a": 1})),
        ({"decision": "approve"}, HookAnswer("allow")),
        ({"decision": "block", "reason": "x"}, HookAnswer("deny", reason="x")),
        ({"reason": "x" * 9000}, HookAnswer(reason="x" * REASON_CHARS_MAX)),
        (
            {
                "hookSpecificOutput": {
                    "hookEventName": "PreToolUse",
                    "permissionDecision": "allow",
                    "permissionDecisionReason": "fine",
                    "updatedInput": {"b": 2},
                    "additionalContext": "note",
                }
            },
            HookAnswer("allow", reason="fine", context="note", patch={"b": 2}),
        ),
        ({"hookSpecificOutput": {"permissionDecision": "ask"}}, HookAnswer()),
        ({"continue": False, "stopReason": "enough"}, HookAnswer(halt=True, reason="enough")),
        ({"continue": True, "stopReason": "unused"}, HookAnswer()),
    ],
)
def test_a_hook_answers_in_our_words_or_in_claude_codes(answer: Json, said: HookAnswer) -> None:
    assert read_answer(0, encode(answer), b"ignored") == said


@pytest.mark.parametrize(
    ("status", "output", "why"),
    [
        (0, b"all is well", "its output is no JSON"),
        (0, b'{"decision": "allow"} and more', "its output is no JSON"),
        (0, b"[" * 5000, "its output is no JSON"),
        (0, b"\xff", "its output is no JSON"),
        (0, b"[1]", "its output is no JSON object"),
        (0, b'{"decision": "Allow"}', "its decision is 'Allow'"),
        (0, b'{"decision": ["allow"]}', "its decision is"),
        (0, b'{"updated_input": "x"}', "its updated input is no object"),
        (1, b'{"decision": "allow"}', "it ended with status 1"),
        (127, b"", "it ended with status 127"),
        (None, b'{"decision": "allow"}', "it was killed"),
    ],
)
def test_what_is_no_answer_is_no_opinion(status: int | None, output: bytes, why: str) -> None:
    with pytest.raises(InvalidHookAnswer, match=why):
        read_answer(status, output, b"")


def test_the_exit_status_alone_can_deny_and_halt() -> None:
    assert read_answer(2, b'{"decision": "allow"}', b" not here \n") == HookAnswer(
        "deny", reason="not here"
    )
    assert read_answer(49, b"", b"\xff") == HookAnswer("deny", halt=True, reason="\ufffd")
    assert read_answer(0, b" \n", b"") == HookAnswer()


# --- what several say


ONE, TWO, THREE = (Hook(command=f"c{n}", name=name) for n, name in enumerate(("one", "", "three")))


def test_several_are_merged_in_their_order_and_who_denies_has_the_last_word() -> None:
    said = [
        (ONE, HookAnswer("allow", reason="fine", context="first", patch={"a": 1, "b": 1})),
        (TWO, HookAnswer("deny", halt=True, reason="never")),
        (replace_matcher(THREE, "^b"), HookAnswer(context="last", patch={"b": 2})),
    ]
    assert merge(said, {"a": 0, "z": 26}) == HookVerdict(
        "deny",
        halt=True,
        reason="fine\nnever",
        context="first\nlast",
        updated_input={"a": 1, "b": 2, "z": 26},
        metadata={
            "hook_count": 3,
            "decision": "deny",
            "halt": True,
            "reason": "fine\nnever",
            "input_rewrite": True,
            "hooks": [
                {"name": "one", "decision": "allow", "reason": "fine", "input_rewrite": True},
                {"name": "c1", "decision": "deny", "halt": True, "reason": "never"},
                {"name": "three", "matcher": "^b", "decision": "none", "input_rewrite": True},
            ],
        },
    )


def replace_matcher(hook: Hook, matcher: str) -> Hook:
    return Hook(hook.command, hook.name, matcher)


SAID = st.builds(
    HookAnswer,
    st.sampled_from(["allow", "deny", "none"]),
    st.booleans(),
    st.sampled_from(["", "r"]),
    st.sampled_from(["", "c"]),
    st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=2),
)


@contract("INV-76")
@given(st.lists(SAID, min_size=1, max_size=5), SAID)
def test_one_more_hook_never_takes_back_a_denial_or_a_halt(
    said: list[HookAnswer], more: HookAnswer
) -> None:
    before = merge([(ONE, one) for one in said], {})
    for order in ([*said, more], [more, *said]):
        after = merge([(ONE, one) for one in order], {})
        assert before.decision != "deny" or after.decision == "deny"
        assert not before.halt or after.halt
        assert after.decision in {one.decision for one in order}


def test_a_hook_is_asked_about_the_tools_its_matcher_finds_and_the_same_command_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = [Hook("all"), Hook("some", matcher="^(edit|write)$"), Hook("bad", matcher="(")]
    hooks += [Hook("all", matcher="bash"), Hook("in", matcher="it")]
    assert [hook.command for hook in matching(hooks, "edit")] == ["all", "some", "in"]
    assert [hook.command for hook in matching(hooks, "multiedit")] == ["all", "in"]
    assert [hook.command for hook in matching(hooks, "bash")] == ["all"]
    assert "the hook 'bad' is not run, as its matcher is wrong" in caplog.text


# --- running them


@pytest.fixture
async def context(tmp_path: Path) -> AsyncGenerator[ToolContext]:
    async with open_context(tmp_path, {"CULM_TOKEN": "ours"}) as context:
        yield context


def of(context: ToolContext, *hooks: Hook) -> Hooks:
    return Hooks(context, lambda: hooks)


async def test_a_hook_is_told_of_the_call_on_its_input_and_in_its_environment(
    context: ToolContext,
) -> None:
    root = str(context.inside.root)
    hook = Hook("cat > told; env | grep -E '^(CRUSH|CULM)_[^P]' > env; pwd > where")
    arguments: dict[str, Json] = {
        "command": "ls -l\nrm x",
        "file-path": "/a",
        "count": 2,
        "deep": {"a": 1},
        "long": "x" * 10_000,
        "odd": "a\0b",
        "text": "x" * 300_000,  # More than a pipe holds.
    }
    async with asyncio.timeout(WAIT_S):
        verdict = await of(context, hook).run(call_of("bash", arguments))
    assert verdict is not None
    assert (verdict.decision, verdict.updated_input) == ("none", None)
    assert json.loads((context.inside.root / "told").read_text()) == {
        "event": "PreToolUse",
        "hook_event_name": "PreToolUse",
        "session_id": "session-1",
        "cwd": root,
        "tool_name": "bash",
        "tool_input": arguments,
    }
    assert (context.inside.root / "where").read_text() == f"{root}\n"
    known = [
        f"CWD={root}",
        "EVENT=PreToolUse",
        "SESSION_ID=session-1",
        "TOOL_INPUT_COMMAND=ls -l",  # Its second line has no name to be found by.
        "TOOL_INPUT_COUNT=2",
        "TOOL_INPUT_FILE_PATH=/a",
        "TOOL_NAME=bash",
    ]
    lines = (context.inside.root / "env").read_text().splitlines()
    assert sorted(lines) == sorted(f"{ours}_{one}" for ours in ("CRUSH", "CULM") for one in known)


@contract("INV-76")
async def test_all_hooks_of_a_call_are_heard_and_those_that_fail_have_no_say(
    context: ToolContext, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = [
        Hook("""echo '{"decision": "allow", "context": "seen"}'""", "fine"),
        Hook("echo not JSON", "odd"),
        Hook("exit 3", "failing"),
        Hook("no-such-program-at-all", "missing"),
        Hook("kill -9 $$", "killed"),
        Hook("exec <&-; exec >&-; exec 2>&-; exit 0", "silent"),
        Hook(f"head -c {OUTPUT_BYTES_MAX + 1} /dev/zero", "flood"),
        Hook("exit 1", "elsewhere", matcher="view"),
        Hook(f"head -c {OUTPUT_BYTES_MAX * 9} /dev/zero; echo 'keep out' >&2; exit 2", "guard"),
    ]
    async with asyncio.timeout(WAIT_S):
        verdict = await of(context, *hooks).run(call_of("edit", {"file_path": "a"}))
    names = ("fine", "odd", "failing", "missing", "killed", "silent", "flood")
    decisions = dict.fromkeys(names, "none") | {"fine": "allow"}
    shown: list[Json] = [{"name": name, "decision": word} for name, word in decisions.items()]
    assert verdict == HookVerdict(
        "deny",
        halt=False,
        reason="keep out",
        context="seen",
        updated_input=None,
        metadata={
            "hook_count": 8,
            "decision": "deny",
            "reason": "keep out",
            "hooks": [*shown, {"name": "guard", "decision": "deny", "reason": "keep out"}],
        },
    )
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in ("odd", "failing", "missing", "killed", "flood"):
        assert any(f"the hook {name!r} has no opinion on edit: " in line for line in told)


@contract("INV-76")
async def test_without_a_hook_that_matches_nothing_is_said(context: ToolContext) -> None:
    assert await of(context, Hook("exit 2", matcher="^bash$")).run(call_of("view", {})) is None
    assert await of(context).run(call_of("view", {})) is None


async def test_a_hook_has_its_say_in_a_workspace_whose_name_is_no_text(tmp_path: Path) -> None:
    async with (
        open_context(tmp_path, name=os.fsdecode(b"w\xff")) as context,
        asyncio.timeout(WAIT_S),
    ):
        verdict = await of(context, Hook("cat; exit 2")).run(call_of("bash", {"a": "b"}))
    assert verdict is not None
    assert verdict.decision == "deny"


async def test_arguments_that_are_no_object_are_told_as_they_were_written(
    context: ToolContext,
) -> None:
    hook = Hook("""cat > told; echo '{"updated_input": {"a": 1}}'""")
    call = replace(call_of("bash", {}), input="{broken", arguments=None)
    async with asyncio.timeout(WAIT_S):
        verdict = await of(context, hook).run(call)
    assert verdict is not None
    assert verdict.updated_input == {"a": 1}
    assert json.loads((context.inside.root / "told").read_text())["tool_input"] == "{broken"


async def test_a_hook_that_takes_too_long_is_ended_and_has_no_say(
    context: ToolContext, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Hook("sleep 60 & sleep 60", "slow", timeout=1)
    async with asyncio.timeout(WAIT_S):
        verdict = await of(context, slow).run(call_of("bash", {}))
    assert verdict is not None
    assert verdict.decision == "none"
    assert "the hook 'slow' has no opinion on bash: it took longer than 1 s" in caplog.text
    assert await context.processes.processes(WORKSPACE) == []


async def test_a_call_that_is_cancelled_ends_its_hooks_and_leaves_nothing_open(
    context: ToolContext,
) -> None:
    hooks = of(context, *(Hook(f"echo {n} > begun; sleep 60") for n in range(2)))
    begun = context.inside.root / "begun"
    os.mkfifo(begun)
    before = open_descriptors()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(hooks.run(call_of("bash", {})))
        said = ""
        while len(said) < len("0\n1\n"):
            said += await asyncio.to_thread(begun.read_text)
        # One may have begun to write before whoever started it has heard that it runs.
        while len(found := await context.processes.processes(WORKSPACE)) < 2:
            await asyncio.sleep(0.002)
        assert [process.owner.kind for process in found] == ["hook", "hook"]
        task.cancel()
    assert await context.processes.processes(WORKSPACE) == []
    assert open_descriptors() <= before
