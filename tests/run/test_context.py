"""The history for a model is well formed, whatever was stored."""

from hypothesis import given
from hypothesis import strategies as st

from culm.ids import MessageId, SessionId
from culm.run import context
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Text,
    TextPart,
    Todo,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.support import contract

SESSION = SessionId("s")
FINISH = FinishPart(Finish("stop", 0))


def user_message(text: str, message_id: str = "") -> Message:
    return Message(MessageId(message_id), "user", SESSION, [TextPart(Text(text)), FINISH])


def answer(*calls: str, text: str = "", summary: bool = False, message_id: str = "") -> Message:
    parts: list[Part] = [TextPart(Text(text))] if text else []
    parts += [ToolCallPart(ToolCall(call, "bash", "{}", finished=True)) for call in calls]
    message = Message(MessageId(message_id), "assistant", SESSION, [*parts, FINISH])
    message.is_summary_message = summary
    return message


def result(call: str, content: str = "done") -> Message:
    part = ToolResultPart(ToolResult(call, "bash", content))
    return Message(MessageId(""), "tool", SESSION, [part, FINISH])


def calls_of(message: Message) -> list[str]:
    return [part.data.id for part in message.parts if isinstance(part, ToolCallPart)]


def result_of(message: Message) -> ToolResult | None:
    parts = [part.data for part in message.parts if isinstance(part, ToolResultPart)]
    return parts[0] if parts else None


@contract("INV-82")
def test_missing_results_are_added_and_stray_results_removed() -> None:
    stored = [
        user_message("a"),
        result("x"),
        answer("1", "2"),
        result("2"),
        user_message("b"),
        answer(text="c"),
    ]
    history = context.history_of(stored, "")
    assert [m.role for m in history] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    first, second = result_of(history[2]), result_of(history[3])
    assert first is not None
    assert second is not None
    assert (first.tool_call_id, first.content, first.is_error) == ("1", context.NO_RESULT, True)
    assert (second.tool_call_id, second.content) == ("2", "done")


messages = st.one_of(
    st.just(user_message("prompt")),
    st.lists(st.sampled_from("abc"), unique=True, max_size=3).map(lambda ids: answer(*ids)),
    st.sampled_from("abcd").map(result),
    st.just(answer()),
)


@contract("INV-82")
@given(st.lists(messages, max_size=12))
def test_each_call_is_followed_by_exactly_its_results(
    stored: list[Message],
) -> None:
    history = context.history_of(stored, "")
    n = 0
    while n < len(history):
        message = history[n]
        n += 1
        assert message.role != "tool", "a result without its call"
        for call in calls_of(message):
            found = result_of(history[n])
            assert found is not None
            assert found.tool_call_id == call
            n += 1


def test_history_starts_at_the_summary_as_a_user_message() -> None:
    stored = [
        user_message("old"),
        answer(text="sum", summary=True, message_id="m"),
        user_message("new"),
    ]
    history = context.history_of(stored, "m")
    assert [(m.role, m.parts[0]) for m in history] == [
        ("user", TextPart(Text("sum"))),
        ("user", TextPart(Text("new"))),
    ]
    # Without a finished summary the history starts at its beginning.
    assert [m.role for m in context.history_of(stored, "")] == ["user", "user"]


def test_empty_message_is_left_out() -> None:
    assert context.history_of([user_message("a"), answer()], "")[-1].role == "user"


def test_title_is_one_line_of_the_answer_or_the_prompt() -> None:
    assert context.title_of('<think>hm</think>\n"Fix the\n tests"', "p") == "Fix the tests"
    assert context.title_of(" \n", "please " * 20) == ("please " * 20)[:49] + "…"
    assert context.title_of("", " ") == context.UNTITLED


def test_summary_prompt_includes_the_todos() -> None:
    assert context.summary_prompt([]) == context.SUMMARY_PROMPT
    todos = [Todo("Run the tests", "in_progress", "")]
    assert "- [in_progress] Run the tests" in context.summary_prompt(todos)


def test_context_is_nearly_full_with_a_fifth_or_20_000_tokens_left() -> None:
    assert not context.needs_summary(0, 10**9)
    assert not context.needs_summary(100_000, 79_999)
    assert context.needs_summary(100_000, 80_000)
    assert not context.needs_summary(1_000_000, 979_999)
    assert context.needs_summary(1_000_000, 980_000)
