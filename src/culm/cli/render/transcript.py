"""A conversation as a Markdown page.

Pure: messages in, pieces of text out. The text of a message cannot affect the rest of the page: a
fence is longer than any run of backticks inside it, an open fence is closed, headings are below
the heading of their message, and HTML that would extend to the end of the page is escaped.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from culm.cli.render.text import head_of, without_controls
from culm.wire.messages import (
    Binary,
    BinaryPart,
    Finish,
    FinishPart,
    ImageUrlPart,
    Message,
    Part,
    ReasoningPart,
    Session,
    ShellCommandPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

FENCE_MIN = 3  # The minimum of Markdown.
GOOD_ENDS = ("", "stop", "end_turn", "tool_use")  # These need no remark.
_BACKTICKS = re.compile(r"`+")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
# The HTML blocks that an empty line does not end.
_HTML = re.compile(r" {0,3}<(!--|\?|![a-z]|!\[cdata\[|/?(script|pre|style|textarea)\b)", re.I)
_HEADING = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")  # It turns the line above into a heading.
HEADING_MAX = 6
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~])")

Results = Mapping[str, ToolResult]  # Keyed by the id of the call.


def markdown_of(
    session: Session,
    messages: Sequence[Message],
    level: int = 1,
    step: Callable[[int], None] = lambda n: None,
) -> Iterator[str]:
    """Yield the page in pieces; with a higher `level` it is a section of another page.

    `step` is called after each message.
    """
    yield f"{'#' * level} {plain(session.title) or 'Untitled'}\n"
    yield "\n" + "\n".join(f"- {line}" for line in _header(session, messages)) + "\n"
    yield from _message_lines(messages, level + 1, step)


def markdown_of_run(prompt: str, messages: Sequence[Message]) -> Iterator[str]:
    """A prompt and all messages of its run; a prompt among the messages is not repeated."""
    yield f"# {plain(prompt) or 'Untitled'}\n"
    if not any(message.role == "user" for message in messages):
        yield from _section("## User", [quoted(prompt, 2)])
    yield from _message_lines(messages, 2)


def _header(session: Session, messages: Sequence[Message]) -> Iterator[str]:
    yield f"Session: `{head_of(session.id)}`"
    yield f"Date: {date_text(session.created_at)}"
    models = dict.fromkeys(author for author in map(_author, messages) if author)
    if models:
        yield f"Model: {', '.join(plain(model) for model in models)}"
    yield f"Cost: ${session.cost:.4f}"


def _message_lines(
    messages: Sequence[Message], level: int, step: Callable[[int], None] = lambda n: None
) -> Iterator[str]:
    results, shown = _results_in(messages), set[str]()
    for message in messages:
        pieces_of_parts = [_part_of(message, part, results, level) for part in message.parts]
        parts = [piece for pieces in pieces_of_parts for piece in pieces]
        shown |= {part.data.id for part in message.parts if isinstance(part, ToolCallPart)}
        # A result is below its call, whichever message contains it.
        parts += [
            piece
            for part in message.parts
            if isinstance(part, ToolResultPart) and part.data.tool_call_id not in shown
            for piece in _result(part.data)
        ]
        if parts or message.role != "tool":
            yield from _section(f"{'#' * level} {_heading(message)}", parts)
        step(1)


def _results_in(messages: Sequence[Message]) -> Results:
    parts = (part for message in messages for part in message.parts)
    results = (part.data for part in parts if isinstance(part, ToolResultPart))
    return {one.tool_call_id: one for one in results}


def _section(heading: str, pieces: Sequence[str]) -> Iterator[str]:
    yield f"\n{heading}\n"
    for piece in pieces:
        yield f"\n{piece}\n"


def _heading(message: Message) -> str:
    if message.is_summary_message:
        return "Summary"
    name = message.role.capitalize()
    author = _author(message)
    return f"{name} ({plain(author)})" if author else name


def _author(message: Message) -> str:
    if message.role != "assistant":
        return ""
    return "/".join(filter(None, (message.provider, message.model)))


def _part_of(message: Message, part: Part, results: Results, level: int) -> Iterator[str]:
    match part:
        case TextPart(data=data) if data.text.strip():
            # User input is not Markdown and is shown as it was typed.
            is_typed = message.role == "user"
            yield quoted(data.text, level) if is_typed else contained(data.text, level)
        case ReasoningPart(data=data) if data.thinking.strip():
            yield "Reasoning:\n\n" + quoted(data.thinking, level)
        case BinaryPart(data=data):
            yield _attachment(data)
        case ImageUrlPart(data=data):
            # A data URL would repeat the whole image here.
            yield f"Attachment: {plain(data.url.partition(';base64,')[0])}"
        case ToolCallPart(data=data):
            yield from _call(data, results.get(data.id))
        case ShellCommandPart(data=data):
            yield fenced(data.command, "sh")
            yield f"Exit status {data.exit_code}:\n\n" + fenced(data.output)
        case FinishPart(data=data):
            yield from _end(data)
        case _:
            pass


def _attachment(data: Binary) -> str:
    kind = plain(data.mime_type) or "unknown type"
    return f"Attachment: {plain(data.path) or 'unnamed'} ({kind}, {len(data.data):,} bytes)"


def _call(call: ToolCall, result: ToolResult | None) -> Iterator[str]:
    yield f"**Call:** {plain(call.name)}"
    yield fenced(*_input_of(call))
    if result is not None:
        yield from _result(result)


def _input_of(call: ToolCall) -> tuple[str, str]:
    """The input, pretty-printed if it is JSON, and the language of its block."""
    try:
        return json.dumps(json.loads(call.input), indent=2, ensure_ascii=False), "json"
    except (ValueError, RecursionError):
        return call.input, ""


def _result(result: ToolResult) -> Iterator[str]:
    yield f"**{'Failed' if result.is_error else 'Result'}:** {plain(result.name)}"
    if result.content or not result.data:
        yield fenced(result.content)
    if result.data:
        yield f"Attachment: {plain(result.mime_type) or 'unknown type'}"


def _end(finish: Finish) -> Iterator[str]:
    reason = finish.culm_reason or finish.reason
    if reason not in GOOD_ENDS:
        text = ": ".join(filter(None, (reason, finish.message, finish.details)))
        yield f"*Ended: {plain(text)}*"


# --- text that cannot affect the rest of the page


def plain(text: str) -> str:
    """The beginning of a text on one line, with Markdown syntax escaped."""
    return _SPECIAL.sub(r"\\\1", head_of(text))


def fenced(text: str, language: str = "") -> str:
    """A block of code whose fence does not occur inside it."""
    shown = without_controls(text)
    longest = max(map(len, _BACKTICKS.findall(shown)), default=0)
    fence = "`" * max(FENCE_MIN, longest + 1)
    end = "" if shown.endswith("\n") or not shown else "\n"
    return f"{fence}{language}\n{shown}{end}{fence}"


def quoted(text: str, level: int = 0) -> str:
    """A quotation that ends all blocks opened inside it."""
    return "\n".join(f"> {line}".rstrip() for line in contained(text, level).split("\n"))


def contained(text: str, level: int = 0) -> str:
    """Markdown as written, with open blocks closed or escaped.

    Its headings are moved below a heading of `level`.
    """
    lines: list[str] = []
    fence = ""  # The open fence.
    for line in without_controls(text).strip("\n").split("\n"):
        found = _FENCE.match(line)
        if fence:
            # A fence of the same kind, at least as long and alone on its line, ends it.
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            lines.append(line)
        elif found:
            fence = found[1]
            lines.append(line)
        else:
            lines.append(_put_below(line, level, below_text=bool(lines and lines[-1].strip())))
    return "\n".join([*lines, fence] if fence else lines)


def _put_below(line: str, level: int, *, below_text: bool) -> str:
    """A line outside a block of code, made unable to affect the lines around it."""
    if found := _HEADING.match(line):
        return "#" * min(len(found[1]) + level, HEADING_MAX) + line[found.end() :]
    if _HTML.match(line):
        return line.replace("<", "\\<", 1)
    if below_text and _UNDERLINE.match(line):
        return f"\\{line.strip()}"
    return line


def date_text(at: int) -> str:
    """A time in UTC, because pages are read in other time zones."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
