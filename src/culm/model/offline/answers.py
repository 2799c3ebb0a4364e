"""Texts of the offline model: tool results, titles and summaries, all of bounded length.

Pure. `model.py` decides which tools are called; `intents.py` parses the request.
"""

import re
from collections.abc import Collection, Sequence
from typing import assert_never

import msgspec
from msgspec import Struct

from culm.model.offline.intents import Intent, without_courtesy
from culm.wire.messages import Message, ToolCallPart, ToolResult, ToolResultPart, full_text

INTRODUCTION = (
    "I am culm's offline model: a few rules, not an LLM. Set OPENAI_API_KEY or ANTHROPIC_API_KEY, "
    "start a local model server, or see `culm models`.\n\n"
)
LISTED_LINES = 30
READ_LINES, READ_LINES_MAX = 40, 200  # By default, and if more were asked for.
LINE_CHARS = 200
ERROR_LINES = 8
NAME_CHARS = 40
TITLE_CHARS, TITLE_READ_CHARS = 50, 1000
SUMMARY_REQUESTS_MAX, SUMMARY_CALLS_MAX = 20, 40  # The newest ones.
SUMMARY_ANSWER_CHARS = 2000
# The line below each report with the agent's id and cost; a test checks that it still matches.
_FACTS = re.compile(r"^\[agent [^\n]*\]$\n?", re.MULTILINE)
_REFUSED = "Not allowed: "  # The beginning of a refusal after which the turn continues.


class _Metadata(Struct):
    """The metadata of tool results that is used here."""

    number_of_files: int | None = None
    number_of_matches: int | None = None
    truncated: bool = False
    content: str | None = None  # A file's text without line numbers.
    number_of_lines: int | None = None  # Of the file, if it was read to its end.


def describe_result(intent: Intent, result: ToolResult) -> str:
    """The outcome of an intent."""
    if result.is_error:
        return _failure(result)
    match intent.kind:
        case "list" | "find" | "search" | "count_files" | "count_matches":
            return _found(intent, result)
        case "read":
            return _file(intent.path, min(intent.lines or READ_LINES, READ_LINES_MAX), result)
        case "replace" | "write":
            done, _, lines = result.content.partition("\n")
            return f"{done}\n{_block(lines, READ_LINES)}" if lines.strip() else done
        case "run":
            return f"`{intent.command}`:\n{_block(result.content, READ_LINES)}"
        case "fetch":
            return f"{intent.url}:\n{_block(result.content, READ_LINES)}"
        case "delegate":
            return _reports(result, len(intent.prompts))
        case _:
            assert_never(intent.kind)


def agent_name(intent: Intent) -> str:
    """A short name for an agent that begins with this intent; empty if it needs none."""
    if intent.kind not in ("read", "search", "count_matches", "replace", "write", "run"):
        return ""
    verb = {"count_matches": "search", "replace": "edit"}.get(intent.kind, intent.kind)
    target = intent.command or intent.pattern or intent.path
    return " ".join(f"{verb} {target}".split())[:NAME_CHARS]


_ABILITIES = (  # The tool, its use, and an example.
    ("ls", "list directories", "list the files"),
    ("view", "read files", "read README.md"),
    ("grep", "search in files", "how many times does TODO occur?"),
    ("glob", "find and count files", ""),
    ("bash", "run commands", "run `make test`"),
    ("edit", "replace text in files", "replace `teh` by `the` in README.md"),
    ("write", "create files", ""),
    ("fetch", "fetch pages", ""),
    ("agent", "have sub-agents work", "have one agent read README.md and another search for TODO"),
)


def describe_abilities(tools: Collection[str]) -> str:
    """Help for a prompt without a request that can be parsed."""
    *uses, last = [use for tool, use, _ in _ABILITIES if tool in tools] or [""]
    if not last:
        return "Without tools I can do nothing here."
    listed = " and ".join(filter(None, (", ".join(uses), last)))
    examples = "".join(f"\n- {eg}" for tool, _, eg in _ABILITIES if eg and tool in tools)
    return f"I can {listed}." + (f" Type, for example:{examples}" if examples else "")


# --- titles and summaries


def title_of(messages: Sequence[Message]) -> str:
    """The beginning of the first prompt; empty if there is none."""
    prompt = next((full_text(message.parts) for message in messages if message.role == "user"), "")
    plain = prompt[:TITLE_READ_CHARS].translate({ord(sign): " " for sign in '`*#"“”'})
    text = " ".join(plain.split())
    text = (without_courtesy(text) or text).rstrip(" .!?,;:")
    if len(text) > TITLE_CHARS:
        whole, _, _ = text[:TITLE_CHARS].rpartition(" ")
        text = (whole or text[: TITLE_CHARS - 1]).rstrip(" .,;:") + "…"
    return text[:1].upper() + text[1:]


def summary_of(messages: Sequence[Message]) -> str:
    """The requests, the calls with the first line of each result, and the last answer.

    The last message is the request for the summary; the tasks that it lists are kept.
    """
    history, request = messages[:-1], messages[-1:]
    requests: list[str] = []
    calls: list[str] = []
    answer = ""
    inputs: dict[str, str] = {}
    for message in history:
        if message.role == "user":
            requests.append(_first_line(full_text(message.parts)))
        elif message.role == "assistant":
            answer = full_text(message.parts).strip() or answer
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                inputs[part.data.id] = _first_line(part.data.input)
            elif isinstance(part, ToolResultPart):
                result = part.data
                called = f"{result.name} {inputs.get(result.tool_call_id, '')}"
                failed = "failed: " if result.is_error else ""
                calls.append(f"{called} → {failed}{_first_line(result.content)}")
    asked = "".join(full_text(message.parts) for message in request).splitlines()
    sections = (
        ("The person asked:", _newest(requests, SUMMARY_REQUESTS_MAX)),
        ("Calls and the first line of each result:", _newest(calls, SUMMARY_CALLS_MAX)),
        ("Tasks:", [_first_line(line[2:]) for line in asked if line.startswith("- [")]),
    )
    texts = ["\n- ".join((title, *lines)) for title, lines in sections if lines]
    if answer:
        texts.append(f"The last answer was:\n{answer[:SUMMARY_ANSWER_CHARS]}")
    return "\n\n".join(texts) or "The conversation is empty."


def _newest(lines: list[str], count: int) -> list[str]:
    left = len(lines) - count
    return lines if left <= 0 else [f"({left} earlier ones are left out)", *lines[left:]]


def _first_line(text: str) -> str:
    return _head(text[: 4 * LINE_CHARS].strip(), 1)[0].rstrip()


# --- sections


def _failure(result: ToolResult) -> str:
    if result.content.startswith(_REFUSED):
        reason, _ = _head(result.content.removeprefix(_REFUSED), 1)
        return f"`{result.name}` was not allowed: {reason}"
    return f"`{result.name}` failed:\n{_block(result.content, ERROR_LINES)}"


def _found(intent: Intent, result: ToolResult) -> str:
    """A count, and the first entries, files or matches unless only the count was asked for."""
    about, place = _metadata_of(result), f" in {intent.path}" if intent.path else ""
    count, noun, target = about.number_of_files, "file", f" like `{intent.pattern}`{place}"
    if intent.kind == "list":
        noun, target = "entry", place or " in this directory"
    elif intent.kind in ("search", "count_matches"):
        noun, target = "matching line", f" for `{intent.pattern}`{place}"
        count = about.number_of_matches
    elif intent.pattern == "**/*":
        target = place
    if count is None:
        count = sum(1 for line in result.content.splitlines() if line.strip())
    is_listed = intent.kind not in ("count_files", "count_matches")
    if not count and is_listed:
        return f"Found nothing{target}."
    found = f"Found {'at least ' if about.truncated else ''}{_plural(count, noun)}{target}"
    return f"{found}:\n{_block(result.content, LISTED_LINES)}" if is_listed else f"{found}."


def _file(path: str, lines_max: int, result: ToolResult) -> str:
    about = _metadata_of(result)
    shown, left = _head(result.content if about.content is None else about.content, lines_max)
    if not shown:
        return f"{path} is empty."
    answer = f"{path}:\n{_fenced(shown)}"
    is_whole = about.content is None or about.number_of_lines is not None
    if is_whole and not left:
        return answer
    more = _plural(left, "more line") if is_whole else "More lines"
    request = f"read the first {min(4 * lines_max, READ_LINES_MAX)} lines of {path}"
    hint = f" To see them: `{request}`." if lines_max < READ_LINES_MAX else ""
    return f"{answer}\n{more} not shown.{hint}"


def _reports(result: ToolResult, count: int) -> str:
    """The reports of agents, without the ids and costs that clients show elsewhere."""
    agents = "The sub-agent" if count == 1 else f"The {count} sub-agents"
    shown, left = _head(_FACTS.sub("", result.content), count * READ_LINES)
    more = f"\n{_plural(left, 'more line')} not shown." if left else ""
    return f"{agents} answered:\n\n{shown}{more}"


# --- numbers and blocks


def _metadata_of(result: ToolResult) -> _Metadata:
    try:
        return msgspec.json.decode(result.metadata or "{}", type=_Metadata)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Metadata()  # Of an unknown tool.


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else {'entry': 'entries'}.get(noun, f'{noun}s')}"


def _head(text: str, lines_max: int) -> tuple[str, int]:
    """The first lines, each cut to a bounded length, and the number of lines left out."""
    text = text.strip("\n")
    lines = text[: lines_max * 4 * LINE_CHARS].split("\n", lines_max)[:lines_max]
    cut = (line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "…" for line in lines)
    return "\n".join(cut), text.count("\n") + 1 - len(lines)


def _block(text: str, lines_max: int) -> str:
    shown, left = _head(text, lines_max)
    if not shown:
        return "(nothing)"
    return _fenced(shown) + (f"\n{_plural(left, 'more line')}." if left else "")


def _fenced(text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}\n{text}\n{fence}"
