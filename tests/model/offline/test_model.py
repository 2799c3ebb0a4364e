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
    FOR_AGENT_WORDS,
    SUMMARY_WORDS,
    TITLE_WORDS,
    OfflineCall,
    OfflineModel,
    answer_to,
)
from culm.run.context import SUMMARY_SYSTEM, TITLE_SYSTEM, summary_prompt
from culm.run.limits import Price, used_of
from culm.store.sessions import add_session
from culm.subagents.results import AgentReport, result_of
from culm.subagents.roles import BUILT_IN
from culm.tools.base import CallRequest, Tool
from culm.tools.process.jobs import open_jobs
from culm.tools.registry import make_tools
from culm.wire.agents import Agent
from culm.wire.codec import Json
from culm.wire.messages import (
    Binary,
    BinaryPart,
    Message,
    Part,
    Role,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from culm.wire.sessions import Todo
from tests.support import WAIT_S, carried_out
from tests.tools.kits import open_context

PARAMETERS = {
    "ls": ["path", "ignore", "depth"],
    "view": ["file_path", "offset", "limit"],
    "glob": ["pattern", "path"],
    "grep": ["pattern", "path", "include", "literal_text"],
    "bash": ["command", "description"],
    "edit": ["file_path", "old_string", "new_string", "replace_all"],
    "write": ["file_path", "content"],
    "fetch": ["url", "format"],
    "download": ["url", "file_path"],
    "agent": ["prompt", "name", "assignments"],
}
ALL = tuple(
    ToolSpec(name, "", {"type": "object", "properties": {key: {} for key in keys}})
    for name, keys in PARAMETERS.items()
)


def message(role: Role, *parts: Part) -> Message:
    return Message(MessageId("m"), role, SessionId("s"), list(parts))


def said(text: str, role: Role = "user") -> Message:
    return message(role, TextPart(Text(text)))


def called(name: str, call_id: str = "c") -> Message:
    return message("assistant", ToolCallPart(ToolCall(call_id, name, "{}", finished=True)))


def resulted(name: str, content: str, *, metadata: str = "", is_error: bool = False) -> Message:
    result = ToolResult("c", name, content, metadata=metadata, is_error=is_error)
    return message("tool", ToolResultPart(result))


async def heard(request: ModelRequest) -> list[ModelEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in OfflineModel().stream(request)]


def text_in(events: Sequence[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def take_turn(messages: list[Message], tools: Mapping[str, Tool]) -> str:
    """Ask and call until there is an answer without calls, as the loop of a run does."""
    while True:
        request = ModelRequest("", messages, tuple(tool.spec for tool in tools.values()))
        events = await heard(request)
        begun = [event for event in events if isinstance(event, CallStarted)]
        inputs = {event.key: event.text for event in events if isinstance(event, CallDelta)}
        if not begun:
            return text_in(events)
        calls = [ToolCall(c.id, c.name, inputs[c.key], finished=True) for c in begun]
        messages.append(message("assistant", *(ToolCallPart(call) for call in calls)))
        for call in calls:
            arguments = msgspec.json.decode(call.input, type=dict[str, Json])
            asked = CallRequest(call.id, call.name, call.input, arguments, "s")
            result = await carried_out(tools[call.name], asked)
            told = ToolResult(call.id, call.name, result.content, metadata=result.metadata)
            told.is_error = result.is_error
            messages.append(message("tool", ToolResultPart(told)))


async def test_the_first_words_of_a_session_say_what_it_is_and_later_ones_do_not() -> None:
    first = await heard(ModelRequest("", [said("hello")], ALL))
    assert text_in(first).startswith(INTRODUCTION)
    later = await heard(
        ModelRequest("", [said("hello"), said("hi", "assistant"), said("help")], ALL)
    )
    assert "I can" in text_in(later)
    assert INTRODUCTION not in text_in(later)


async def test_a_request_becomes_a_call_with_whole_arguments() -> None:
    messages = [said("hi"), said("hello", "assistant"), said("grep def main in src")]
    assert await heard(ModelRequest("", messages, ALL)) == [
        CallStarted(0, "offline_3_0", "grep"),
        CallDelta(0, '{"pattern":"def main","path":"src","literal_text":true}'),
        AnswerDone("tool_use"),
    ]


async def test_a_workspace_is_really_worked_in(tmp_path: Path) -> None:
    expected = {
        "list the files in src": "Found 2 entries in src:",
        "search for TODO": "Found 2 matching lines for `TODO`:",
        "search for absent_word": "Found nothing that matches `absent_word`.",
        "find *.py files": "Found 2 files like `**/*.py`:",
        "how many python files": "Found 2 files like `**/*.py`.",
        "count the files in src": "Found 2 files in src.",
        "how many times does TODO occur": "Found 2 matching lines for `TODO`.",
        "count lines in README.md": "README.md has 50 lines.",
        "count lines in empty.txt": "empty.txt has 0 lines.",
        "read empty.txt": "empty.txt is empty.",
        "read README.md": "10 more lines not shown. To see them: `read the first 160 lines of",
        "read the first 20 lines of README.md": "line 20\n```\nMore lines not shown.",
        "read the first python file": "src/a.py:\n```\nimport re\n# TODO: one\n```",
        "read the first rust file": "There is no file like `**/*.rs`.",
        "show me the readme": "README.md:\n```\nline 1\n",
        "read absent.md": "`view` failed:\n```\n",
        "ls src and read src/b.py": "b.py\n```\n\nsrc/b.py:\n```\n# TODO: two\n```",
        "run echo hi; exit 3": "`echo hi; exit 3`:\n```\nhi\nExit code 3\n```",
        "run true and read src/b.py": "(no output)\n```\n\nsrc/b.py:\n```\n# TODO: two\n```",
        "replace TODO by DONE in src/a.py and run cat src/a.py": "import re\n# DONE: one\n```",
        "replace absent by it in src/a.py": "`edit` failed:\n```\n",
        "replace a by b in absent.py": "`view` failed:\n```\n",
        "create notes/new.txt with hello": "Made notes/new.txt (1 line, 5 bytes).",
        "write it anew to src/b.py": "Wrote src/b.py (1 line, 7 bytes).",
        "what changed?": "not a git repository",
        "fetch http://[::1]:9/": "`fetch` failed:\n```\n",
        "ask a sub-agent to rest": "That needs the tool `agent`, which is not here yet.",
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
            assert answer in await take_turn([said(prompt)], tools), prompt
        texts = {name: (project / name).read_text() for name in ("src/a.py", "src/b.py")}
        assert texts == {"src/a.py": "import re\n# DONE: one\n", "src/b.py": "it anew"}
        assert (project / "notes" / "new.txt").read_text() == "hello"


def test_a_chain_reads_what_was_found_and_then_ends() -> None:
    found = resulted("glob", "b/c.py\nz.py\n(note)", metadata='{"number_of_files":2}')
    messages = [said("read the first python file"), called("glob"), found]
    assert answer_to(ModelRequest("", messages, ALL)).uses == (
        OfflineCall("view", {"file_path": "z.py"}),
    )
    messages += [called("view"), resulted("view", "boom", is_error=True)]
    assert answer_to(ModelRequest("", messages, ALL)).uses == ()


def test_a_call_that_failed_is_told_and_not_repeated() -> None:
    messages = [said("ls src"), called("ls"), resulted("ls", "no such directory", is_error=True)]
    answer = answer_to(ModelRequest("", messages, ALL))
    assert (answer.text, answer.uses) == ("`ls` failed:\n```\nno such directory\n```", ())


def test_what_is_refused_is_told_and_the_rest_is_done_nevertheless() -> None:
    refused = resulted("bash", "Not allowed: a rule denies it.", is_error=True)
    messages = [said("run make and read a.txt"), called("bash"), refused]
    assert answer_to(ModelRequest("", messages, ALL)).uses == (
        OfflineCall("view", {"file_path": "a.txt"}),
    )
    messages += [called("view"), resulted("view", "", metadata='{"content":"x"}')]
    answer = answer_to(ModelRequest("", messages, ALL))
    assert answer.text.startswith("`bash` was not allowed: a rule denies it.\n\na.txt:\n")


def test_a_prompt_that_joins_in_the_middle_of_a_turn_is_answered_for_itself() -> None:
    messages = [said("ls"), called("ls"), resulted("ls", "a"), said("read a.txt")]
    assert answer_to(ModelRequest("", messages, ALL)).uses == (
        OfflineCall("view", {"file_path": "a.txt"}),
    )


def test_what_was_cut_is_counted_as_at_least() -> None:
    cut = resulted("glob", "a.py", metadata='{"number_of_files":100,"truncated":true}')
    messages = [said("how many python files"), called("glob"), cut]
    assert (
        answer_to(ModelRequest("", messages, ALL)).text
        == "Found at least 100 files like `**/*.py`."
    )


def test_changes_are_made_one_after_the_other_and_only_to_what_was_read() -> None:
    prompt = "replace a by b in x.txt, create y.txt with `hi` and run make"
    messages = [said(prompt)]
    made: list[OfflineCall] = []
    while uses := answer_to(ModelRequest("", messages, ALL)).uses:
        (use,) = uses
        made.append(use)
        messages += [called(use.tool), resulted(use.tool, "done")]
    edit = {"file_path": "x.txt", "old_string": "a", "new_string": "b", "replace_all": True}
    assert made == [
        OfflineCall("view", {"file_path": "x.txt"}),
        OfflineCall("edit", edit),
        OfflineCall("write", {"file_path": "y.txt", "content": "hi"}),
        OfflineCall("bash", {"command": "make", "description": "Run make"}),
    ]


def test_everything_else_is_one_call() -> None:
    for prompt, use in {
        "$ git status": OfflineCall(
            "bash", {"command": "git status", "description": "Run git status"}
        ),
        "delegate: count files": OfflineCall("agent", {"prompt": "count files"}),
        "fetch https://a.b/c": OfflineCall("fetch", {"url": "https://a.b/c", "format": "markdown"}),
        "download http://a.b to c": OfflineCall(
            "download", {"url": "http://a.b", "file_path": "c"}
        ),
    }.items():
        assert answer_to(ModelRequest("", [said(prompt)], ALL)).uses == (use,)


def test_agents_side_by_side_are_one_call_and_the_answer_has_what_each_reported() -> None:
    messages = [said("have one agent read a.txt and another have an agent rest")]
    (use,) = answer_to(ModelRequest("", messages, ALL)).uses
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
    messages += [called("agent"), resulted("agent", reported.content)]
    assert answer_to(ModelRequest("", messages, ALL)).text == (
        "The 2 sub-agents answered:\n\n"
        "## read a.txt\na.txt:\nhi\n\n## have an agent rest\nDone.\n[1]"
    )


def test_only_whoever_talks_to_people_introduces_itself() -> None:
    system = BUILT_IN["worker"].prompt
    assert FOR_AGENT_WORDS in system
    assert not answer_to(ModelRequest(system, [said("hello")], ALL)).text.startswith(INTRODUCTION)
    assert answer_to(ModelRequest("", [said("hello")], ALL)).text.startswith(INTRODUCTION)


def test_an_attached_file_is_named_with_its_size() -> None:
    attached = BinaryPart(Binary("notes.txt", "text/plain", b"x" * 1234))
    answer = answer_to(ModelRequest("", [message("user", TextPart(Text("hm?")), attached)], ALL))
    assert "You attached notes.txt (1.2 kB). " in answer.text


async def test_an_answer_costs_nothing_whatever_the_price() -> None:
    request = ModelRequest("", [said("hello")], ALL)
    done = (await heard(request))[-1]
    assert isinstance(done, AnswerDone)
    assert used_of(done.usage, Price(1.0, 1.0, 1.0, 1.0), request, 100).cost == 0.0


# --- titles and summaries


def test_a_title_is_made_of_the_first_words() -> None:
    assert TITLE_SYSTEM.startswith(TITLE_WORDS)
    titles = {
        "please list the files!": "List the files",
        "read `README.md`": "Read README.md",
        "x" * 60: "X" + "x" * 48 + "…",
        "word " * 20: "Word" + " word" * 9 + "…",
        "": "",
    }
    for prompt, title in titles.items():
        assert answer_to(ModelRequest(TITLE_SYSTEM, [said(prompt)])).text == title
        assert len(title) <= 50


def test_a_summary_keeps_requests_calls_tasks_and_the_last_answer() -> None:
    assert SUMMARY_SYSTEM.startswith(SUMMARY_WORDS)
    messages = [
        *(said("ls src\nquickly"), called("ls"), resulted("ls", "a.py\nb.py")),
        *(said("Two files.", "assistant"), said(summary_prompt([Todo("rest", "pending", "")]))),
    ]
    assert answer_to(ModelRequest(SUMMARY_SYSTEM, messages)).text == (
        "The person asked:\n- ls src\n\n"
        "Calls and the first line of each result:\n- ls {} → a.py\n\n"
        "Tasks:\n- [pending] rest\n\n"
        "The last answer was:\nTwo files."
    )


def test_a_summary_of_much_is_bounded() -> None:
    turn = [said("x" * 10_000), called("ls"), resulted("ls", "y" * 10_000)]
    question = said(summary_prompt([]))
    answer = answer_to(ModelRequest(SUMMARY_SYSTEM, [*turn * 500, question]))
    assert len(answer.text) < 40_000
    assert answer_to(ModelRequest(SUMMARY_SYSTEM, [])).text == "Nothing has been said yet."


# --- anything at all

WORDS = (
    *("list", "read", "search for", "how many", "run", "create", "replace", "ask a sub-agent to"),
    *("have one agent", "another", "two agents"),
    *("files", "lines", "the", "first", "python", "file", "README.md", "a.txt", "TODO", "make"),
    *("and", "then", "in", "with", "by", "$", '"', "`", "```", "\n", ",", "."),
)
PROMPTS = st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join))
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
async def test_any_request_gets_one_whole_answer_with_few_legal_calls(
    history: list[Message], prompt: str, tools: list[ToolSpec], system: str
) -> None:
    results = [one for one in history if one.role != "user"]
    request = ModelRequest(system, [*history, said(prompt), *results], tuple(tools))
    events = await heard(request)
    assert events == await heard(request)
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
