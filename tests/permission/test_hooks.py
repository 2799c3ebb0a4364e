"""Hooks: single answers, merged answers, and failing hooks."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

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
from culm.tools.base import ToolContext
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, contract
from tests.tools.tool_contexts import WORKSPACE, call_of, open_context, open_descriptors

# --- one answer


@pytest.mark.parametrize(
    ("answer", "expected"),
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
def test_hook_answer_is_read_in_our_format_or_claude_codes(
    answer: Json, expected: HookAnswer
) -> None:
    assert read_answer(0, encode(answer), b"ignored") == expected


@pytest.mark.parametrize(
    ("status", "output", "reason"),
    [
        (0, b"all is well", "its output is not valid JSON"),
        (0, b'{"decision": "allow"} and more', "its output is not valid JSON"),
        (0, b"[" * 5000, "its output is not valid JSON"),
        (0, b"\xff", "its output is not valid JSON"),
        (0, b"[1]", "its output is not a JSON object"),
        (0, b'{"decision": "Allow"}', "its decision is 'Allow'"),
        (0, b'{"decision": ["allow"]}', "its decision is"),
        (0, b'{"updated_input": "x"}', "its updated input is not an object"),
        (1, b'{"decision": "allow"}', "it ended with status 1"),
        (127, b"", "it ended with status 127"),
        (None, b'{"decision": "allow"}', "it was killed"),
    ],
)
def test_invalid_hook_answer_is_rejected_with_its_reason(
    status: int | None, output: bytes, reason: str
) -> None:
    with pytest.raises(InvalidHookAnswer, match=reason):
        read_answer(status, output, b"")


def test_exit_status_alone_can_deny_and_halt() -> None:
    assert read_answer(2, b'{"decision": "allow"}', b" not here \n") == HookAnswer(
        "deny", reason="not here"
    )
    assert read_answer(49, b"", b"\xff") == HookAnswer("deny", halt=True, reason="\ufffd")
    assert read_answer(0, b" \n", b"") == HookAnswer()


# --- merged answers


ONE, TWO, THREE = (Hook(command=f"c{n}", name=name) for n, name in enumerate(("one", "", "three")))


def test_answers_are_merged_in_order_and_a_denial_wins() -> None:
    answers = [
        (ONE, HookAnswer("allow", reason="fine", context="first", patch={"a": 1, "b": 1})),
        (TWO, HookAnswer("deny", halt=True, reason="never")),
        (replace_matcher(THREE, "^b"), HookAnswer(context="last", patch={"b": 2})),
    ]
    assert merge(answers, {"a": 0, "z": 26}) == HookVerdict(
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


ANSWERS = st.builds(
    HookAnswer,
    st.sampled_from(["allow", "deny", "none"]),
    st.booleans(),
    st.sampled_from(["", "r"]),
    st.sampled_from(["", "c"]),
    st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=2),
)


@contract("INV-76")
@given(st.lists(ANSWERS, min_size=1, max_size=5), ANSWERS)
def test_additional_hook_never_reverts_a_denial_or_halt(
    answers: list[HookAnswer], more: HookAnswer
) -> None:
    before = merge([(ONE, one) for one in answers], {})
    for order in ([*answers, more], [more, *answers]):
        after = merge([(ONE, one) for one in order], {})
        assert before.decision != "deny" or after.decision == "deny"
        assert not before.halt or after.halt
        assert after.decision in {one.decision for one in order}


def test_hooks_match_by_tool_and_a_repeated_command_runs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = [Hook("all"), Hook("some", matcher="^(edit|write)$"), Hook("bad", matcher="(")]
    hooks += [Hook("all", matcher="bash"), Hook("in", matcher="it")]
    assert [hook.command for hook in matching(hooks, "edit")] == ["all", "some", "in"]
    assert [hook.command for hook in matching(hooks, "multiedit")] == ["all", "in"]
    assert [hook.command for hook in matching(hooks, "bash")] == ["all"]
    assert "hook 'bad' is skipped: invalid matcher" in caplog.text


# --- running them


@pytest.fixture
async def context(tmp_path: Path) -> AsyncGenerator[ToolContext]:
    async with open_context(tmp_path, {"CULM_TOKEN": "ours"}) as context:
        yield context


def hooks_of(context: ToolContext, *hooks: Hook) -> Hooks:
    return Hooks(context, lambda: hooks)


async def test_hook_gets_the_call_on_stdin_and_in_its_environment(
    context: ToolContext,
) -> None:
    root = str(context.paths.root)
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
        verdict = await hooks_of(context, hook).run(call_of("bash", arguments))
    assert verdict is not None
    assert (verdict.decision, verdict.updated_input) == ("none", None)
    assert json.loads((context.paths.root / "told").read_text()) == {
        "event": "PreToolUse",
        "hook_event_name": "PreToolUse",
        "session_id": "session-1",
        "cwd": root,
        "tool_name": "bash",
        "tool_input": arguments,
    }
    assert (context.paths.root / "where").read_text() == f"{root}\n"
    known = [
        f"CWD={root}",
        "EVENT=PreToolUse",
        "SESSION_ID=session-1",
        "TOOL_INPUT_COMMAND=ls -l",  # The rest of a multi-line value does not match the pattern.
        "TOOL_INPUT_COUNT=2",
        "TOOL_INPUT_FILE_PATH=/a",
        "TOOL_NAME=bash",
    ]
    lines = (context.paths.root / "env").read_text().splitlines()
    assert sorted(lines) == sorted(f"{ours}_{one}" for ours in ("CRUSH", "CULM") for one in known)


@contract("INV-76")
async def test_all_hooks_of_a_call_run_and_failing_ones_do_not_decide(
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
        verdict = await hooks_of(context, *hooks).run(call_of("edit", {"file_path": "a"}))
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
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    for name in ("odd", "failing", "missing", "killed", "flood"):
        assert any(f"hook {name!r} made no decision on edit: " in line for line in warnings)


@contract("INV-76")
async def test_no_verdict_without_a_matching_hook(context: ToolContext) -> None:
    assert (
        await hooks_of(context, Hook("exit 2", matcher="^bash$")).run(call_of("view", {})) is None
    )
    assert await hooks_of(context).run(call_of("view", {})) is None


async def test_hook_runs_in_a_workspace_with_a_non_utf8_name(tmp_path: Path) -> None:
    async with (
        open_context(tmp_path, name=os.fsdecode(b"w\xff")) as context,
        asyncio.timeout(WAIT_S),
    ):
        verdict = await hooks_of(context, Hook("cat; exit 2")).run(call_of("bash", {"a": "b"}))
    assert verdict is not None
    assert verdict.decision == "deny"


async def test_unparsable_arguments_are_passed_to_the_hook_verbatim(
    context: ToolContext,
) -> None:
    hook = Hook("""cat > told; echo '{"updated_input": {"a": 1}}'""")
    call = replace(call_of("bash", {}), input="{broken", arguments=None)
    async with asyncio.timeout(WAIT_S):
        verdict = await hooks_of(context, hook).run(call)
    assert verdict is not None
    assert verdict.updated_input == {"a": 1}
    assert json.loads((context.paths.root / "told").read_text())["tool_input"] == "{broken"


async def test_hook_that_times_out_is_ended_and_does_not_decide(
    context: ToolContext, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Hook("sleep 60 & sleep 60", "slow", timeout=1)
    async with asyncio.timeout(WAIT_S):
        verdict = await hooks_of(context, slow).run(call_of("bash", {}))
    assert verdict is not None
    assert verdict.decision == "none"
    assert "hook 'slow' made no decision on bash: it took longer than 1 s" in caplog.text
    assert await context.processes.processes(WORKSPACE) == []


async def test_canceled_call_ends_its_hooks_and_leaves_nothing_open(
    context: ToolContext,
) -> None:
    hooks = hooks_of(context, *(Hook(f"echo {n} > begun; sleep 60") for n in range(2)))
    begun = context.paths.root / "begun"
    os.mkfifo(begun)
    before = open_descriptors()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(hooks.run(call_of("bash", {})))
        output = ""
        while len(output) < len("0\n1\n"):
            output += await asyncio.to_thread(begun.read_text)
        # A hook may write before its start is confirmed to the parent.
        while len(found := await context.processes.processes(WORKSPACE)) < 2:
            await asyncio.sleep(0.002)
        assert [process.owner.kind for process in found] == ["hook", "hook"]
        task.cancel()
    assert await context.processes.processes(WORKSPACE) == []
    assert open_descriptors() <= before
