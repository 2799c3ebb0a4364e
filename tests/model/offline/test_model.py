import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from culm.ids import AgentId, MessageId, SessionId
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ToolSpec,
)
from culm.model.offline.answers import INTRODUCTION
from culm.model.offline.intents import INTENTS_MAX
from culm.model.offline.model import (
    SUBAGENT_SYSTEM_PART,
    SUMMARY_SYSTEM_START,
    TITLE_SYSTEM_START,
    OfflineCall,
    OfflineModel,
    answer_to,
)
from culm.run.context import SUMMARY_SYSTEM, TITLE_SYSTEM, summary_prompt
from culm.run.limits import Price, used_of
from culm.store.sessions import add_session
from culm.subagents.delegation import AgentReport, result_of
from culm.subagents.start_policy import BUILT_IN_ROLES
from culm.tools.base import CallRequest, Tool
from culm.tools.process.jobs import open_jobs
from culm.tools.registry import make_tools
from culm.wire.agents import Agent
from culm.wire.codec import Json
from culm.wire.messages import (
    Message,
    Part,
    Role,
    Text,
    TextPart,
    Todo,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.support import WAIT_S, run_call
from tests.tools.tool_contexts import open_context

PARAMETERS = {
    "ls": ["path", "ignore", "depth"],
    "view": ["file_path", "offset", "limit"],
    "glob": ["pattern", "path"],
    "grep": ["pattern", "path", "include", "literal_text"],
    "bash": ["command", "description"],
    "edit": ["file_path", "old_string", "new_string", "replace_all"],
    "write": ["file_path", "content"],
    "fetch": ["url", "format"],
    "agent": ["prompt", "name", "assignments"],
}
ALL = tuple(
    ToolSpec(name, "", {"type": "object", "properties": {key: {} for key in keys}})
    for name, keys in PARAMETERS.items()
)


def message(role: Role, *parts: Part) -> Message:
    return Message(MessageId("m"), role, SessionId("s"), list(parts))


def text_message(text: str, role: Role = "user") -> Message:
    return message(role, TextPart(Text(text)))


def call_message(name: str, call_id: str = "c") -> Message:
    return message("assistant", ToolCallPart(ToolCall(call_id, name, "{}", finished=True)))


def result_message(
    name: str, content: str, *, metadata: str = "", is_error: bool = False
) -> Message:
    result = ToolResult("c", name, content, metadata=metadata, is_error=is_error)
    return message("tool", ToolResultPart(result))


async def events_of(request: ModelRequest) -> list[ModelEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in OfflineModel().stream(request)]


def text_in(events: Sequence[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def take_turn(messages: list[Message], tools: Mapping[str, Tool]) -> str:
    """Request answers and run calls until an answer has none, like the loop of a run."""
    while True:
        request = ModelRequest("", messages, tuple(tool.spec for tool in tools.values()))
        events = await events_of(request)
        begun = [event for event in events if isinstance(event, CallStarted)]
        inputs = {event.key: event.text for event in events if isinstance(event, CallDelta)}
        if not begun:
            return text_in(events)
        calls = [ToolCall(c.id, c.name, inputs[c.key], finished=True) for c in begun]
        messages.append(message("assistant", *(ToolCallPart(call) for call in calls)))
        for call in calls:
            arguments = msgspec.json.decode(call.input, type=dict[str, Json])
            asked = CallRequest(call.id, call.name, call.input, arguments, "s")
            result = await run_call(tools[call.name], asked)
            answered = ToolResult(call.id, call.name, result.content, metadata=result.metadata)
            answered.is_error = result.is_error
            messages.append(message("tool", ToolResultPart(answered)))


async def test_only_the_first_answer_of_a_session_introduces_the_model() -> None:
    first = await events_of(ModelRequest("", [text_message("hello")], ALL))
    assert text_in(first).startswith(INTRODUCTION)
    later = await events_of(
        ModelRequest(
            "", [text_message("hello"), text_message("hi", "assistant"), text_message("help")], ALL
        )
    )
    assert "I can" in text_in(later)
    assert INTRODUCTION not in text_in(later)


async def test_request_becomes_a_call_with_complete_arguments() -> None:
    messages = [
        text_message("hi"),
        text_message("hello", "assistant"),
        text_message("grep def main in src"),
    ]
    assert await events_of(ModelRequest("", messages, ALL)) == [
        CallStarted(0, "offline_3_0", "grep"),
        CallDelta(0, '{"pattern":"def main","path":"src","literal_text":true}'),
        AnswerDone("tool_use"),
    ]


async def test_prompts_run_real_tools_in_the_workspace(tmp_path: Path) -> None:
    expected = {
        "list the files in src": "Found 2 entries in src:",
        "search for TODO": "Found 2 matching lines for `TODO`:",
        "search for absent_word": "Found nothing for `absent_word`.",
        "find *.py files": "Found 2 files like `**/*.py`:",
        "how many python files": "Found 2 files like `**/*.py`.",
        "count the files in src": "Found 2 files in src.",
        "how many times does TODO occur": "Found 2 matching lines for `TODO`.",
        "read empty.txt": "empty.txt is empty.",
        "read README.md": "10 more lines not shown. To see them: `read the first 160 lines of",
        "read the first 20 lines of README.md": "line 20\n```\nMore lines not shown.",
        "read absent.md": "`view` failed:\n```\n",
        "ls src and read src/b.py": "b.py\n```\n\nsrc/b.py:\n```\n# TODO: two\n```",
        "run echo hi; exit 3": "`echo hi; exit 3`:\n```\nhi\nExit code 3\n```",
        "run true and read src/b.py": "(no output)\n```\n\nsrc/b.py:\n```\n# TODO: two\n```",
        "replace TODO by DONE in src/a.py and run cat src/a.py": "import re\n# DONE: one\n```",
        "replace absent by it in src/a.py": "`edit` failed:\n```\n",
        "replace a by b in absent.py": "`view` failed:\n```\n",
        "create notes/new.txt with hello": "Made notes/new.txt (1 line, 5 bytes).",
        "create src/b.py with it anew": "Wrote src/b.py (1 line, 7 bytes).",
        "fetch http://[::1]:9/": "`fetch` failed:\n```\n",
        "ask a sub-agent to rest": "That needs the tool `agent`, which is not available.",
    }
    async with open_context(tmp_path) as context, open_jobs() as jobs:
        await context.store.write(add_session(SessionId("s"), "one", sessions_max=1))
        project = tmp_path / "work"
        (project / "src").mkdir()
        (project / "src" / "a.py").write_text("import re\n# TODO: one\n")
        (project / "src" / "b.py").write_text("# TODO: two\n")
        (project / "README.md").write_text("".join(f"line {n}\n" for n in range(1, 51)))
        (project / "empty.txt").touch()
        tools = make_tools(context, jobs)
        for prompt, answer in expected.items():
            assert answer in await take_turn([text_message(prompt)], tools), prompt
        texts = {name: (project / name).read_text() for name in ("src/a.py", "src/b.py")}
        assert texts == {"src/a.py": "import re\n# DONE: one\n", "src/b.py": "it anew"}
        assert (project / "notes" / "new.txt").read_text() == "hello"


def test_failed_call_is_reported_and_not_repeated() -> None:
    messages = [
        text_message("ls src"),
        call_message("ls"),
        result_message("ls", "no such directory", is_error=True),
    ]
    answer = answer_to(ModelRequest("", messages, ALL))
    assert (answer.text, answer.calls) == ("`ls` failed:\n```\nno such directory\n```", ())


def test_refused_call_is_reported_and_the_rest_is_done() -> None:
    refused = result_message("bash", "Not allowed: a rule denies it.", is_error=True)
    messages = [text_message("run make and read a.txt"), call_message("bash"), refused]
    assert answer_to(ModelRequest("", messages, ALL)).calls == (
        OfflineCall("view", {"file_path": "a.txt"}),
    )
    messages += [call_message("view"), result_message("view", "", metadata='{"content":"x"}')]
    answer = answer_to(ModelRequest("", messages, ALL))
    assert answer.text.startswith("`bash` was not allowed: a rule denies it.\n\na.txt:\n")


def test_prompt_in_the_middle_of_a_turn_is_answered_by_itself() -> None:
    messages = [
        text_message("ls"),
        call_message("ls"),
        result_message("ls", "a"),
        text_message("read a.txt"),
    ]
    assert answer_to(ModelRequest("", messages, ALL)).calls == (
        OfflineCall("view", {"file_path": "a.txt"}),
    )


def test_truncated_result_is_counted_as_at_least() -> None:
    cut = result_message("glob", "a.py", metadata='{"number_of_files":100,"truncated":true}')
    messages = [text_message("how many python files"), call_message("glob"), cut]
    assert (
        answer_to(ModelRequest("", messages, ALL)).text
        == "Found at least 100 files like `**/*.py`."
    )


def test_changes_are_made_in_order_after_reading_the_file() -> None:
    prompt = "replace a by b in x.txt, create y.txt with `hi` and run make"
    messages = [text_message(prompt)]
    made: list[OfflineCall] = []
    while uses := answer_to(ModelRequest("", messages, ALL)).calls:
        (use,) = uses
        made.append(use)
        messages += [call_message(use.tool), result_message(use.tool, "done")]
    edit = {"file_path": "x.txt", "old_string": "a", "new_string": "b", "replace_all": True}
    assert made == [
        OfflineCall("view", {"file_path": "x.txt"}),
        OfflineCall("edit", edit),
        OfflineCall("write", {"file_path": "y.txt", "content": "hi"}),
        OfflineCall("bash", {"command": "make", "description": "Run make"}),
    ]


def test_other_requests_are_one_call() -> None:
    for prompt, use in {
        "$ git status": OfflineCall(
            "bash", {"command": "git status", "description": "Run git status"}
        ),
        "delegate: count files": OfflineCall("agent", {"prompt": "count files"}),
        "fetch https://a.b/c": OfflineCall("fetch", {"url": "https://a.b/c", "format": "markdown"}),
    }.items():
        assert answer_to(ModelRequest("", [text_message(prompt)], ALL)).calls == (use,)


def test_several_agents_are_one_call_and_their_reports_are_in_the_answer() -> None:
    messages = [text_message("have one agent read a.txt and another have an agent rest")]
    (use,) = answer_to(ModelRequest("", messages, ALL)).calls
    assignments = [
        {"prompt": "read a.txt", "name": "read a.txt"},
        {"prompt": "have an agent rest"},
    ]
    assert use == OfflineCall("agent", {"assignments": assignments})
    agents = [
        Agent(AgentId(f"id{n}"), "", SessionId("s"), name=name, state="ended", outcome="completed")
        for n, name in enumerate(("read a.txt", "have an agent rest"))
    ]
    reported = result_of(
        [AgentReport(agents[0], "a.txt:\nhi"), AgentReport(agents[1], "Done.\n[1]")]
    )
    messages += [call_message("agent"), result_message("agent", reported.content)]
    assert answer_to(ModelRequest("", messages, ALL)).text == (
        "The 2 sub-agents answered:\n\n"
        "## read a.txt\na.txt:\nhi\n\n## have an agent rest\nDone.\n[1]"
    )


def test_subagent_does_not_introduce_itself() -> None:
    system = BUILT_IN_ROLES["worker"].prompt
    assert SUBAGENT_SYSTEM_PART in system
    assert not answer_to(ModelRequest(system, [text_message("hello")], ALL)).text.startswith(
        INTRODUCTION
    )
    assert answer_to(ModelRequest("", [text_message("hello")], ALL)).text.startswith(INTRODUCTION)


async def test_answer_costs_nothing_at_any_price() -> None:
    request = ModelRequest("", [text_message("hello")], ALL)
    done = (await events_of(request))[-1]
    assert isinstance(done, AnswerDone)
    assert used_of(done.usage, Price(1.0, 1.0, 1.0, 1.0), request, 100).cost == 0.0


# --- titles and summaries


def test_title_is_made_of_the_first_words() -> None:
    assert TITLE_SYSTEM.startswith(TITLE_SYSTEM_START)
    titles = {
        "please list the files!": "List the files",
        "read `README.md`": "Read README.md",
        "x" * 60: "X" + "x" * 48 + "…",
        "word " * 20: "Word" + " word" * 9 + "…",
        "": "",
    }
    for prompt, title in titles.items():
        assert answer_to(ModelRequest(TITLE_SYSTEM, [text_message(prompt)])).text == title
        assert len(title) <= 50


def test_summary_keeps_requests_calls_tasks_and_the_last_answer() -> None:
    assert SUMMARY_SYSTEM.startswith(SUMMARY_SYSTEM_START)
    messages = [
        *(text_message("ls src\nquickly"), call_message("ls"), result_message("ls", "a.py\nb.py")),
        *(
            text_message("Two files.", "assistant"),
            text_message(summary_prompt([Todo("rest", "pending", "")])),
        ),
    ]
    assert answer_to(ModelRequest(SUMMARY_SYSTEM, messages)).text == (
        "The person asked:\n- ls src\n\n"
        "Calls and the first line of each result:\n- ls {} → a.py\n\n"
        "Tasks:\n- [pending] rest\n\n"
        "The last answer was:\nTwo files."
    )


def test_long_summary_is_bounded() -> None:
    turn = [text_message("x" * 10_000), call_message("ls"), result_message("ls", "y" * 10_000)]
    question = text_message(summary_prompt([]))
    answer = answer_to(ModelRequest(SUMMARY_SYSTEM, [*turn * 500, question]))
    assert len(answer.text) < 40_000
    assert answer_to(ModelRequest(SUMMARY_SYSTEM, [])).text == "The conversation is empty."


# --- arbitrary requests

FRAGMENTS = (
    *("list", "read", "search for", "how many", "run", "create", "replace", "ask a sub-agent to"),
    *("have one agent", "another", "two agents"),
    *("files", "lines", "the", "first", "python", "file", "README.md", "a.txt", "TODO", "make"),
    *("and", "then", "in", "with", "by", "$", '"', "`", "```", "\n", ",", "."),
)
PROMPTS = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map(" ".join))
NAMES = st.sampled_from(list(PARAMETERS))
METADATA = st.sampled_from(["", "{", "[]", '{"number_of_files":0}', '{"content":"a\\nb"}'])
CALLS = st.builds(ToolCall, st.just("c"), NAMES, st.just("{}"))
RESULTS = st.builds(
    ToolResult,
    tool_call_id=st.just("c"),
    name=NAMES,
    content=st.text(),
    metadata=METADATA,
    is_error=st.booleans(),
)
PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(TextPart, st.builds(Text, PROMPTS)),
    st.builds(ToolCallPart, CALLS),
    st.builds(ToolResultPart, RESULTS),
)
ROLES: st.SearchStrategy[Role] = st.sampled_from(("user", "assistant", "tool", "system"))
MESSAGES = st.lists(
    st.builds(
        Message,
        id=st.just(MessageId("m")),
        role=ROLES,
        session_id=st.just(SessionId("s")),
        parts=st.lists(PARTS, max_size=3),
    ),
    max_size=6,
)


@given(
    MESSAGES,
    PROMPTS,
    st.lists(st.sampled_from(ALL), unique_by=lambda spec: spec.name),
    st.sampled_from(["", "You are culm.", TITLE_SYSTEM, SUMMARY_SYSTEM]),
)
async def test_any_request_gets_one_complete_answer_with_few_valid_calls(
    history: list[Message], prompt: str, tools: list[ToolSpec], system: str
) -> None:
    results = [one for one in history if one.role != "user"]
    request = ModelRequest(system, [*history, text_message(prompt), *results], tuple(tools))
    events = await events_of(request)
    assert events == await events_of(request)
    assert [n for n, event in enumerate(events) if isinstance(event, AnswerDone)] == [
        len(events) - 1
    ]
    offered = {spec.name: spec for spec in tools}
    begun = [event for event in events if isinstance(event, CallStarted)]
    assert len(begun) <= INTENTS_MAX
    inputs = {event.key: event.text for event in events if isinstance(event, CallDelta)}
    for call in begun:
        arguments = msgspec.json.decode(inputs[call.key], type=dict[str, Json])
        known = cast("dict[str, Json]", offered[call.name].parameters["properties"])
        assert set(arguments) <= set(known)
    assert events[-1] == AnswerDone("tool_use" if begun else "end_turn")
