"""What the offline model says: what tools found, in a few words and with bounds, and what it is.

Pure. Which tools are called is `offline.py`; what was asked for is `offline_intents.py`.
"""

import re
from collections.abc import Collection, Sequence
from typing import assert_never

import msgspec
from msgspec import Struct

from culm.model.offline.intents import (
    CountFilesIntent,
    CountLinesIntent,
    CountMatchesIntent,
    DelegateIntent,
    DownloadIntent,
    FetchIntent,
    FindIntent,
    Intent,
    ListIntent,
    ReadFirstIntent,
    ReadIntent,
    ReplaceIntent,
    RunIntent,
    SearchIntent,
    WriteIntent,
)
from culm.wire.messages import BinaryPart, Message, ToolResult

INTRODUCTION = (
    "I am culm's offline model: a few rules, not an LLM. Set OPENAI_API_KEY or ANTHROPIC_API_KEY, "
    "start a local model server, or see `culm models`.\n\n"
)
LISTED_LINES = 30
READ_LINES = 40
READ_LINES_MAX = 200  # However many were asked for.
LINE_CHARS = 200
ERROR_LINES = 8
NAME_CHARS = 40
# The line below each report, with the agent's id and what it has cost; a test holds culm to it.
_FACTS = re.compile(r"^\[agent [^\n]*\]$\n?", re.MULTILINE)
_REFUSED = "Not allowed: "  # How a refusal begins that the model may go on after.


class _Metadata(Struct):
    """What tools tell clients about a result, as far as it counts here."""

    number_of_files: int | None = None
    number_of_matches: int | None = None
    truncated: bool = False
    content: str | None = None  # Of a file, without line numbers ...
    number_of_lines: int | None = None  # ... and how many it has, if it was read to its end.


def describe_result(intent: Intent, result: ToolResult) -> str:
    """What came of an intent."""
    if result.is_error:
        return _failure(result)
    about = _metadata_of(result)
    match intent:
        case ListIntent(path=path):
            return _listing(result, about, "entry", f"in {path or 'this directory'}")
        case FindIntent(pattern=pattern, path=path):
            return _listing(result, about, "file", f"like `{pattern}`{_in(path)}")
        case CountFilesIntent(pattern=pattern, path=path):
            like = "" if pattern == "**/*" else f" like `{pattern}`"
            count = _number(about.number_of_files, result, about)
            return f"Found {_plural(count, 'file')}{like}{_in(path)}."
        case SearchIntent():
            return _matches(intent, result, about)
        case CountMatchesIntent(search=search):
            count = _number(about.number_of_matches, result, about)
            return (
                f"Found {_plural(count, 'matching line')} for `{search.pattern}`{_scope(search)}."
            )
        case CountLinesIntent(path=path):
            return f"{path} has {_plural(_lines_of(result, about), 'line')}."
        case ReadIntent(path=path, lines=lines):
            return _file(path, min(lines or READ_LINES, READ_LINES_MAX), result, about)
        case ReadFirstIntent(pattern=pattern, path=path):
            return f"There is no file like `{pattern}`{_in(path)}."
        case RunIntent(command=command):
            return f"`{command}`:\n{_block(result.content, READ_LINES)}"
        case ReplaceIntent() | WriteIntent() | DownloadIntent():
            done, _, lines = result.content.partition("\n")
            return f"{done}\n{_block(lines, READ_LINES)}" if lines.strip() else done
        case FetchIntent(url=url):
            return f"{url}:\n{_block(result.content, READ_LINES)}"
        case DelegateIntent(prompts=prompts):
            return _reports(result, len(prompts))
        case _:
            assert_never(intent)


def name_of(intent: Intent) -> str:
    """A few words for whoever does it; nothing if its own are as good."""
    match intent:
        case ReadIntent(path=path):
            words = f"read {path}"
        case (
            SearchIntent(pattern=pattern) | CountMatchesIntent(search=SearchIntent(pattern=pattern))
        ):
            words = f"search {pattern}"
        case ReplaceIntent(path=path):
            words = f"edit {path}"
        case WriteIntent(path=path):
            words = f"write {path}"
        case RunIntent(command=command):
            words = f"run {command}"
        case _:
            return ""
    return " ".join(words.split())[:NAME_CHARS]


def first_path(result: ToolResult) -> str:
    """The first of the files that were found, by depth and name; empty if there is none."""
    if result.is_error:
        return ""
    # Notes stand behind the paths.
    paths = result.content.splitlines()[: _metadata_of(result).number_of_files]
    return min(filter(None, paths), key=lambda path: (path.count("/"), path), default="")


def is_unread(result: ToolResult) -> bool:
    """Whether a file was not changed because the session does not know it as it is."""
    return result.is_error and "view it" in result.content


def missing(tool: str) -> str:
    return f"That needs the tool `{tool}`, which is not here yet."


def unanswered(tool: str) -> str:
    return f"I have no result of `{tool}`."


def abilities(tools: Collection[str], message: Message | None) -> str:
    """What it understands, for a prompt that it does not."""
    can = [
        what
        for tool, what in (
            ("ls", "list directories"),
            ("view", "read files"),
            ("grep", "search in files"),
            ("glob", "find and count files"),
            ("bash", "run commands"),
            ("edit", "replace text in files"),
            ("write", "create files"),
            ("fetch", "fetch pages"),
            ("agent", "have sub-agents work"),
        )
        if tool in tools
    ]
    if not can:
        return f"{_attachments(message)}Without tools I can do nothing here."
    examples = "\n".join(
        f"- {example}"
        for tool, example in (
            ("ls", "list the files"),
            ("view", "read README.md"),
            ("grep", "how many times does TODO occur?"),
            ("edit", "replace `teh` by `the` in README.md"),
            ("bash", "run `make test`"),
            ("agent", "have one agent read README.md and another search for TODO"),
        )
        if tool in tools
    )
    return f"{_attachments(message)}I can {_and(can)}. Type, for example:\n{examples}"


def _attachments(message: Message | None) -> str:
    files = [p.data for p in message.parts if isinstance(p, BinaryPart)] if message else []
    if not files:
        return ""
    names = [f"{file.path or 'a file'} ({_size(len(file.data))})" for file in files[:5]]
    more = [f"{len(files) - 5} more"] if len(files) > 5 else []
    return f"You attached {_and([*names, *more])}. "


# --- sections


def _failure(result: ToolResult) -> str:
    if result.content.startswith(_REFUSED):
        reason, _ = _head(result.content.removeprefix(_REFUSED), 1)
        return f"`{result.name}` was not allowed: {reason}"
    return f"`{result.name}` failed:\n{_block(result.content, ERROR_LINES)}"


def _listing(result: ToolResult, about: _Metadata, noun: str, where: str) -> str:
    number = _number(about.number_of_files, result, about)
    if number == "0":
        return f"Found nothing {where}."
    return f"Found {_plural(number, noun)} {where}:\n{_block(result.content, LISTED_LINES)}"


def _matches(search: SearchIntent, result: ToolResult, about: _Metadata) -> str:
    number = _number(about.number_of_matches, result, about)
    if number == "0":
        return f"Found nothing that matches `{search.pattern}`{_scope(search)}."
    found = f"Found {_plural(number, 'matching line')} for `{search.pattern}`{_scope(search)}"
    return f"{found}:\n{_block(result.content, LISTED_LINES)}"


def _scope(search: SearchIntent) -> str:
    return _in(search.path) + (f" in files like `{search.include}`" if search.include else "")


def _file(path: str, lines_max: int, result: ToolResult, about: _Metadata) -> str:
    text = result.content if about.content is None else about.content
    shown, left = _head(text, lines_max)
    if not shown:
        return f"{path} is empty."
    answer = f"{path}:\n{_fenced(shown)}"
    is_whole = about.content is None or about.number_of_lines is not None
    if is_whole and not left:
        return answer
    more = f"{left} more {_noun(str(left), 'line')}" if is_whole else "More lines"
    asked = f"read the first {min(4 * lines_max, READ_LINES_MAX)} lines of {path}"
    hint = f" To see them: `{asked}`." if lines_max < READ_LINES_MAX else ""
    return f"{answer}\n{more} not shown.{hint}"


def _reports(result: ToolResult, count: int) -> str:
    """What agents have reported, without their ids: whoever reads this has seen who it was."""
    who = "The sub-agent" if count == 1 else f"The {count} sub-agents"
    shown, left = _head(_FACTS.sub("", result.content), count * READ_LINES)
    more = f"\n{left} more {_noun(str(left), 'line')} not shown." if left else ""
    return f"{who} answered:\n\n{shown}{more}"


# --- numbers and texts


def _metadata_of(result: ToolResult) -> _Metadata:
    try:
        return msgspec.json.decode(result.metadata or "{}", type=_Metadata)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _Metadata()  # Not of a tool that we know.


def _number(count: int | None, result: ToolResult, about: _Metadata) -> str:
    """How many there are, if need be counted in the result itself."""
    if count is None:
        count = sum(1 for line in result.content.splitlines() if line.strip())
    return f"at least {count}" if about.truncated else str(count)


def _lines_of(result: ToolResult, about: _Metadata) -> str:
    if about.number_of_lines is not None:
        return str(about.number_of_lines)
    if about.content is None:
        return str(len(result.content.splitlines()))
    return f"at least {len(about.content.splitlines())}" if about.content else "0"


_PLURALS = {"file": "files", "line": "lines", "matching line": "matching lines", "entry": "entries"}


def _plural(number: str, noun: str) -> str:
    return f"{number} {_noun(number, noun)}"


def _noun(number: str, noun: str) -> str:
    return noun if number == "1" else _PLURALS[noun]


def _in(path: str) -> str:
    return f" in {path}" if path else ""


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _size(size_bytes: int) -> str:
    return f"{size_bytes} bytes" if size_bytes < 1000 else f"{size_bytes / 1000:.1f} kB"


def _head(text: str, lines_max: int) -> tuple[str, int]:
    """The first lines, none too long, and how many lines are left."""
    text = text.strip("\n")
    lines = text[: lines_max * 4 * LINE_CHARS].split("\n", lines_max)[:lines_max]
    cut = (line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + "…" for line in lines)
    return "\n".join(cut), text.count("\n") + 1 - len(lines)


def _block(text: str, lines_max: int) -> str:
    shown, left = _head(text, lines_max)
    return (
        _fenced(shown) + (f"\n{left} more {_noun(str(left), 'line')}." if left else "")
        if shown
        else "(nothing)"
    )


def _fenced(text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}\n{text}\n{fence}"
