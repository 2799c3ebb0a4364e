"""The model's view of a conversation: history, titles and summaries. Pure.

Converts stored messages into the messages of a request, in which every call has a result.
"""

from collections.abc import Iterable, Sequence

from culm.ids import MessageId, SessionId
from culm.wire.messages import (
    Message,
    ReasoningPart,
    Text,
    TextPart,
    Todo,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)

TITLE_SYSTEM = """\
Write a title for this conversation: one line of at most 50 characters, in the language of the
person, without quotes and without a full stop. Answer with the title only."""

SUMMARY_SYSTEM = """\
Summarize this conversation so that another agent can go on with it and nothing is lost. It will
read your summary and nothing else. Write down: what the person wants, in their words where they
matter; what was done and found, with names of files, commands and results; what was decided and
why; what failed; what is still to do, and what comes next."""

SUMMARY_PROMPT = "Write the summary now."
NO_RESULT = "Interrupted: this call has no result."


def history_of(messages: Iterable[Message], summary_id: str) -> list[Message]:
    """Convert the stored messages into a valid history for a model.

    It starts at the summary, if there is one, which becomes a user message. Messages without
    content are dropped. A call without a result gets one; a result without a call is dropped.
    """
    history = list(messages)
    for n, message in enumerate(history):
        if summary_id and message.id == summary_id:
            history = [as_user(message), *history[n + 1 :]]
            break
    history = [message for message in history if not message.is_summary_message]
    return _paired([message for message in history if _has_content(message)])


def as_user(message: Message) -> Message:
    return user_message(message.session_id, full_text(message.parts))


def user_message(session_id: SessionId, text: str) -> Message:
    """Build a message for the model only; no client ever sees it."""
    return Message(MessageId(""), "user", session_id, [TextPart(Text(text))])


def _has_content(message: Message) -> bool:
    if message.role != "assistant":
        return bool(message.parts)
    return any(isinstance(part, TextPart | ReasoningPart | ToolCallPart) for part in message.parts)


def _paired(messages: Sequence[Message]) -> list[Message]:
    """Move each result directly behind the message that made the call."""
    history: list[Message] = []
    n = 0
    while n < len(messages):
        message = messages[n]
        n += 1
        if message.role == "tool":
            continue  # Results that follow their call are consumed below; this one has no call.
        history.append(message)
        wanted = {
            part.data.id: part.data.name
            for part in message.parts
            if isinstance(part, ToolCallPart) and message.role == "assistant"
        }
        if not wanted:
            continue
        results: dict[str, Message] = {}
        between: list[Message] = []
        while n < len(messages) and messages[n].role != "assistant":
            follower = messages[n]
            n += 1
            if follower.role != "tool":
                between.append(follower)
                continue
            for part in follower.parts:
                if isinstance(part, ToolResultPart) and part.data.tool_call_id in wanted:
                    results.setdefault(part.data.tool_call_id, follower)
        for call_id, name in wanted.items():
            history.append(results.get(call_id) or _no_result(message, call_id, name))
        history.extend(between)
    return history


def _no_result(message: Message, call_id: str, name: str) -> Message:
    result = ToolResult(call_id, name, NO_RESULT, is_error=True)
    return Message(MessageId(""), "tool", message.session_id, [ToolResultPart(result)])


# --- titles


def has_text(messages: Iterable[Message]) -> bool:
    """Return True if a user message has text."""
    return any(m.role == "user" and full_text(m.parts).strip() for m in messages)


TITLE_CHARS = 50
UNTITLED = "Untitled Session"


def title_of(answer: str, prompt: str) -> str:
    """Convert a model's answer into a title. Fall back to the beginning of the prompt."""
    _, thought, rest = answer.partition("</think>")
    title = " ".join((rest if thought else answer).split()).strip("\"' ")
    if not title:
        title = " ".join(prompt.split())
        if len(title) > TITLE_CHARS:
            title = title[: TITLE_CHARS - 1] + "…"
    return title[: 2 * TITLE_CHARS] or UNTITLED


# --- summaries


def summary_prompt(todos: Sequence[Todo]) -> str:
    if not todos:
        return SUMMARY_PROMPT
    items = "\n".join(f"- [{todo.status}] {todo.content}" for todo in todos)
    return f"{SUMMARY_PROMPT}\n\nThese are the tasks as they stand; keep them:\n{items}"


def continuation(prompt: str) -> str:
    """Build the prompt that resumes a turn after its conversation was summarized."""
    return (
        "The conversation had become too long and was replaced by the summary above. "
        f"Go on with what you were doing. The request was:\n\n{prompt}"
    )


def needs_summary(window: int, used_tokens: int) -> bool:
    """Return True if the remaining context may be too small for the next step."""
    if not window:
        return False
    left = window - used_tokens
    return left <= (20_000 if window > 200_000 else window // 5)
