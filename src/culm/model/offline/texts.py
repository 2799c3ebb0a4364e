"""Titles and summaries by rule: the conversation's own words, shortened.

Pure, and bounded however long the conversation is.
"""

import re
from collections.abc import Sequence

from culm.wire.messages import Message, ToolCallPart, ToolResultPart, full_text

TITLE_CHARS = 50
TITLE_READ_CHARS = 1000  # A title is in a prompt's first words.
LINE_CHARS = 200
REQUESTS_MAX = 20  # The newest are kept ...
CALLS_MAX = 40  # ... here, too.
ANSWER_CHARS = 2000

_COURTESY = re.compile(
    r"(?:(?:please|can you|could you|would you|hi|hello|hey|bitte)[\s,!]+)+", re.I
)


def title_of(messages: Sequence[Message]) -> str:
    """The first words of what was said, or nothing."""
    said = next((full_text(message.parts) for message in messages if message.role == "user"), "")
    words = said[:TITLE_READ_CHARS].translate({ord(sign): " " for sign in '`*#"“”'})
    text = " ".join(words.split())
    courtesy = _COURTESY.match(text)
    if courtesy is not None and courtesy.end() < len(text):
        text = text[courtesy.end() :]
    text = text.rstrip(" .!?,;:")
    if len(text) > TITLE_CHARS:
        whole, _, _ = text[:TITLE_CHARS].rpartition(" ")
        text = (whole or text[: TITLE_CHARS - 1]).rstrip(" .,;:") + "…"
    return text[:1].upper() + text[1:]


def summary_of(messages: Sequence[Message]) -> str:
    """What was asked, which calls were made and what came of them, and the last answer.

    The last message is the request for the summary; the tasks it lists are kept.
    """
    history, question = messages[:-1], messages[-1:]
    requests: list[str] = []
    calls: list[str] = []
    answer = ""
    inputs: dict[str, str] = {}
    for message in history:
        if message.role == "user":
            requests.append(_line(full_text(message.parts)))
        elif message.role == "assistant":
            answer = full_text(message.parts).strip() or answer
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                inputs[part.data.id] = _line(part.data.input)
            elif isinstance(part, ToolResultPart):
                result = part.data
                asked = inputs.get(result.tool_call_id, "")
                failed = "failed: " if result.is_error else ""
                calls.append(f"{result.name} {asked} → {failed}{_line(result.content)}")
    wishes = "".join(full_text(message.parts) for message in question)
    tasks = [_line(line[2:]) for line in wishes.splitlines() if line.startswith("- [")]
    sections = (
        ("The person asked:", _newest(requests, REQUESTS_MAX)),
        ("Calls and the first line of each result:", _newest(calls, CALLS_MAX)),
        ("Tasks:", tasks),
    )
    texts = [
        f"{title}\n" + "\n".join(f"- {line}" for line in lines)
        for title, lines in sections
        if lines
    ]
    if answer:
        texts.append(f"The last answer was:\n{answer[:ANSWER_CHARS]}")
    return "\n\n".join(texts) or "Nothing has been said yet."


def _newest(lines: list[str], count: int) -> list[str]:
    left = len(lines) - count
    return lines if left <= 0 else [f"({left} earlier ones are left out)", *lines[left:]]


def _line(text: str) -> str:
    """The first line that says something, if need be cut."""
    line = text[: 4 * LINE_CHARS].strip().partition("\n")[0].rstrip()
    return line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "…"
