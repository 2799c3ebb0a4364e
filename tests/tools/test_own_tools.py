"""Configured command tools: JSON on stdin, JSON or text on stdout, bounded and ended."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config.schema import OwnTool
from culm.model.base import ToolSpec
from culm.processes.base import ProcessExit
from culm.tools.base import CallPlan, CallResult, ResolvedAction, ToolContext
from culm.tools.own_tools import (
    OUTPUT_BYTES_MAX,
    OwnCommand,
    own_tools,
    read_output,
    schema_problems,
)
from culm.tools.process.child import ExchangeAnswer
from culm.tools.process.output import MODEL_BYTES_MAX
from culm.wire.codec import Json, encode
from culm.wire.tools import ToolFacts
from tests.support import WAIT_S, run_call
from tests.tools.tool_contexts import WORKSPACE, call_of, open_context, open_descriptors

SCHEMA: dict[str, Json] = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["text"],
}


@pytest.fixture
async def context(tmp_path: Path) -> AsyncGenerator[ToolContext]:
    async with open_context(tmp_path) as context:
        yield context


def tool(context: ToolContext, command: str | list[str], timeout_s: float = WAIT_S) -> OwnCommand:
    own = OwnTool(command, "Says it.", SCHEMA, timeout_s)
    return own_tools(context, {"say": own}, ())["say"]


async def run_tool(
    context: ToolContext, command: str | list[str], timeout_s: float = WAIT_S
) -> CallResult:
    call = call_of("say", {"text": "hello"})
    async with asyncio.timeout(WAIT_S):
        return await run_call(tool(context, command, timeout_s), call)


# --- declaration


async def test_a_tool_follows_its_declaration_and_needs_approval_by_default(
    context: ToolContext,
) -> None:
    free = OwnTool(["./say", "it"], "Says it.", {}, 9, "again", parallel=True, is_free=True)
    made = own_tools(context, {"say": free}, ())["say"]
    assert (made.spec, made.parallel, made.crash) == (
        ToolSpec(
            "say",
            "Says it.",
            {"type": "object", "properties": {}},
            ToolFacts(kind="execute"),
        ),
        True,
        "again",
    )
    plan = await made.prepare(call_of("say", {"any": 1}))
    root = str(context.paths.root)
    assert isinstance(plan, CallPlan)
    assert plan.action == ResolvedAction(
        "say",
        "execute",
        description="Run say, a command of your configuration",
        path=root,
        params={"any": 1},
        resolved={"argv": ["./say", "it"], "cwd": root, "arguments": {"any": 1}},
        is_free=True,
        coverage=("own:say",),
    )
    asked = await tool(context, "true").prepare(call_of("say", {"text": "x"}))
    assert isinstance(asked, CallPlan)
    assert (asked.action.is_free, asked.action.resolved["argv"]) == (
        False,
        ["/bin/sh", "-c", "true"],
    )


async def test_an_unusable_tool_is_logged_and_left_out(
    context: ToolContext, caplog: pytest.LogCaptureFixture
) -> None:
    declared = {
        "view": OwnTool("true", "d"),
        "listed": OwnTool("true", "d", {"type": "array"}),
        "empty": OwnTool([], "d"),
        "fine": OwnTool("true", "d"),
    }
    assert list(own_tools(context, declared, {"view": None})) == ["fine"]
    for name in ("view", "listed", "empty"):
        assert f"the tool {name} of the configuration is not used: " in caplog.text


# --- input and output


async def test_a_command_gets_its_arguments_session_and_directory(
    context: ToolContext,
) -> None:
    result = await run_tool(context, ["/bin/cat"])
    root = str(context.paths.root)
    request = {"arguments": {"text": "hello"}, "session_id": "session-1", "cwd": root}
    assert json.loads(result.content) == request
    assert (await run_tool(context, "pwd")).content == f"{root}\n"


async def test_a_workspace_name_that_is_not_utf8_is_passed_with_replacements(
    tmp_path: Path,
) -> None:
    async with open_context(tmp_path, name=os.fsdecode(b"w\xff")) as context:
        request = json.loads((await run_tool(context, ["/bin/cat"])).content)
        plan = await tool(context, "true").prepare(call_of("say", {"text": "x"}))
        assert (await run_tool(context, "ls -d ../w*")).content == "../w\ufffd\n"
    assert request["cwd"] == f"{tmp_path}/w\ufffd"
    assert isinstance(plan, CallPlan)
    assert plan.action.digest


@pytest.mark.parametrize(
    ("output", "result"),
    [
        (b"plain text", CallResult("plain text")),
        (b"", CallResult("")),
        (b'{"other": 1}', CallResult('{"other": 1}')),
        (b'{"content": "hi"}\n', CallResult("hi")),
        (b'{"content": {"a": [1]}}', CallResult('{"a":[1]}')),
        (b'{"content": "no", "is_error": true}', CallResult("no", is_error=True)),
        (b'{"content": "", "metadata": {"a": 1}}', CallResult("", metadata='{"a":1}')),
        (b'{"content": "x", "metadata": "y", "is_error": 1}', CallResult("x")),
        (b"\xffa\x1b[31mb", CallResult("\ufffdab")),
        (b"[" * 5000, CallResult("[" * 5000)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_output_is_json_with_a_content_or_plain_text(output: bytes, result: CallResult) -> None:
    assert read_output(ExchangeAnswer(ProcessExit(0), output, b"ignored")) == result


async def test_too_much_output_is_cut_with_a_note(
    context: ToolContext,
) -> None:
    result = await run_tool(context, "head -c 20000000 /dev/zero | tr '\\0' x")
    assert not result.is_error
    assert len(result.content) <= MODEL_BYTES_MAX + 200
    assert result.content.endswith(f"[… the output has more than {OUTPUT_BYTES_MAX:,} bytes …]")
    many: Json = {"content": "x" * 2 * MODEL_BYTES_MAX, "metadata": {"a": "x" * 100_000}}
    bounded = read_output(ExchangeAnswer(ProcessExit(0), encode(many), b""))
    assert len(bounded.content) < MODEL_BYTES_MAX + 200
    assert bounded.metadata == ""


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("echo out; echo why >&2; exit 3", "say failed with exit status 3.\nwhy"),
        ("echo out; exit 3", "say failed with exit status 3.\nout"),
        ("""echo '{"content": "fine"}'; kill -9 $$""", "say was ended by signal 9."),
    ],
)
async def test_a_failed_command_is_an_error_with_its_output(
    context: ToolContext, command: str, content: str
) -> None:
    result = await run_tool(context, command)
    assert result.is_error
    assert result.content.startswith(content)


async def test_a_missing_command_is_an_error(context: ToolContext) -> None:
    result = await run_tool(context, ["./no-such-command"])
    assert result.is_error
    assert result.content.startswith("say cannot be started: ")


async def test_a_command_past_its_timeout_is_ended_with_its_children(
    context: ToolContext,
) -> None:
    assert await run_tool(context, "setsid sleep 60 & sleep 60", 0.2) == CallResult(
        "say took longer than 0.2 s and was ended.", is_error=True
    )
    assert await context.processes.processes(WORKSPACE) == []


async def test_a_canceled_call_ends_its_command_and_closes_its_pipes(
    context: ToolContext,
) -> None:
    begun = context.paths.root / "begun"
    os.mkfifo(begun)
    before = open_descriptors()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(
            run_tool(context, "trap '' TERM; echo > begun; sleep 60; sleep 60")
        )
        await asyncio.to_thread(begun.read_text)
        task.cancel()
    assert await context.processes.processes(WORKSPACE) == []
    assert open_descriptors() <= before


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "text is missing"),
        ({"text": 1}, "text must be of type string, not integer"),
        ({"text": "", "count": 1.5}, "count must be of type integer, not number"),
        ({"text": "", "count": True}, "count must be of type integer, not boolean"),
        ({"text": "", "share": "1"}, "share must be of type number or null, not string"),
        ({"text": "", "kind": "c"}, 'kind must be one of "a", "b"'),
        ({"text": "", "tags": ["a", 2]}, "tags[1] must be of type string, not integer"),
        ({"text": "", "tags": {}}, "tags must be of type array, not object"),
        ({"text": "", "deep": {}}, "deep.on is missing"),
        ({"text": "", "deep": {"on": True, "of": 1}}, "deep.of is unknown; known: on"),
    ],
)
async def test_arguments_that_violate_the_schema_are_refused_with_the_field(
    context: ToolContext, arguments: dict[str, Json], problem: str
) -> None:
    assert await tool(context, "exit 9").prepare(call_of("say", arguments)) == CallResult(
        f"say: {problem}", is_error=True
    )


def test_valid_arguments_pass_with_extra_fields() -> None:
    fitting: dict[str, Json] = {"text": "", "count": 1, "share": None, "kind": "a", "more": [1]}
    fitting |= {"tags": ["a"], "deep": {"on": False}}
    assert list(schema_problems(fitting, SCHEMA)) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "items", "enum", "a", "object"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["type", "properties", "required", "a"]), JSON)


@given(OBJECTS, OBJECTS)
def test_the_schema_check_never_raises(arguments: dict[str, Json], schema: dict[str, Json]) -> None:
    assert all(isinstance(problem, str) for problem in schema_problems(arguments, schema))
