"""Requests that the offline model understands, parsed from a prompt.

Pure. The prompt is cut into clauses, and the first rule that matches a whole clause decides.
Clauses that match no rule are ignored, so prose yields nothing. Quoted text is replaced by a
placeholder first, so that its content is never parsed as English.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from msgspec import Struct, convert, field

from culm.wire.codec import clean

PROMPT_CHARS = 4000  # Requests that rules can understand are short; the rest is ignored.
INTENTS_MAX = 6
CLAUSES_MAX = 40
CLAUSE_CHARS = 400  # Longer clauses can only be commands or the content of a file.
CUTS_MAX = 3  # A clause without a match is tried again without its end, this many times.

IntentKind = (
    Literal["list", "read", "search", "find", "count_files", "count_matches", "fetch"]
    | Literal["run", "replace", "write", "delegate"]
)


class Intent(Struct, frozen=True):
    """One request. Each kind uses the fields that its rule fills in."""

    kind: IntentKind
    path: str = ""  # Of a search, empty is the working directory.
    pattern: str = ""  # Literal text to search for, or a glob for file names.
    lines: int = 0  # To read, from the beginning; 0 leaves the number to the tool.
    command: str = ""
    old: str = ""
    new: str = ""
    content: str = ""
    url: str = ""
    prompts: tuple[str, ...] = ()  # One for each agent; they work side by side.


def parse_intents(prompt: str) -> tuple[Intent, ...]:
    """The requests in a prompt, in order and without duplicates."""
    quoted = QuotedTexts()
    text = quoted.replace(clean(prompt[:PROMPT_CHARS])).strip()
    text = without_courtesy(_GAP.sub(" ", text))
    if (delegated := _DELEGATE.fullmatch(text)) is not None:  # All that follows is for the agents.
        tasks = (quoted.restore(_without_end(t)) for t in _NEXT_AGENT.split(delegated["tasks"]))
        prompts = tuple(islice(filter(None, tasks), INTENTS_MAX))
        return (Intent("delegate", prompts=prompts),) if prompts else ()
    clauses = islice(_clauses(text), CLAUSES_MAX)
    parsed = (_parse_clause(clause, quoted) for clause in clauses)
    return tuple(dict.fromkeys(filter(None, parsed)))[:INTENTS_MAX]


def without_courtesy(text: str) -> str:
    courtesy = _COURTESY.match(text)
    return text if courtesy is None else text[courtesy.end() :]


# --- quoted text

# Private characters, each for one quoted text. There are 6,400, which is more than fit in a prompt.
_PLACEHOLDER = "[\ue000-\uf8ff]"
_PLACEHOLDER_PATTERN = re.compile(_PLACEHOLDER)
_QUOTED = re.compile(
    r"""\n?```(?:[\w+-]*\n)?(?P<fence>.*?)\n?```|`(?P<code>[^`\n]+)`|"(?P<double>[^"\n]*)\""""
    r"""|(?<!\w)'(?P<single>[^'\n]*)'(?!\w)""",
    re.DOTALL,
)


class QuotedTexts(Struct, frozen=True):
    """The quoted texts of one prompt, each of which has a placeholder."""

    _matches: list[re.Match[str]] = field(default_factory=list[re.Match[str]])

    def replace(self, prompt: str) -> str:
        return _QUOTED.sub(self._add, _PLACEHOLDER_PATTERN.sub("\ufffd", prompt))

    def restore(self, text: str) -> str:
        """`text` with its quoted texts; one that is all of `text` loses its quotation marks."""
        text = text.strip()
        if _PLACEHOLDER_PATTERN.fullmatch(text):
            match = self._matches[ord(text) - 0xE000]
            return match[match.lastgroup or 0]
        return _PLACEHOLDER_PATTERN.sub(lambda p: self._matches[ord(p[0]) - 0xE000][0], text)

    def _add(self, match: re.Match[str]) -> str:
        self._matches.append(match)
        space = " " if match[0].startswith("\n") else ""
        return space + chr(0xE000 + len(self._matches) - 1)


# --- clauses. Repetitions of spaces are bounded, or long rows of them would take quadratic time.

_VERBS = (
    "list|ls|show|open|read|cat|view|search|grep|look|find|count|how|what|which|run|execute"
    "|replace|change|create|write|fetch|delegate|ask|have|let|please"
)
_STOP = r"[,;.!?]{1,3}\s{1,9}"
_JOINT = rf"(?:{_STOP}|\s{{1,9}})(?:(?:and|then|also)\s{{1,9}}){{1,3}}|{_STOP}"
_ANY_JOINT = re.compile(_JOINT, re.IGNORECASE)
_BETWEEN = re.compile(rf"(?:{_JOINT})(?=(?:{_VERBS})\b)", re.IGNORECASE)
_COMMAND = re.compile(r"(?:run|execute)\b", re.IGNORECASE)  # In it, a semicolon ends no clause.
_AFTER_COMMAND = re.compile(
    rf",?\s{{1,9}}(?:(?:and|then)\s{{1,9}}){{1,3}}(?=(?:{_VERBS})\b)", re.IGNORECASE
)
_GAP = re.compile(r"[^\S\n]{20,}")
_BULLET = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+")
_COURTESY = re.compile(
    r"(?:(?:please|can you|could you|would you|hi|hello|hey|ok|culm|now|first|then|also|and)"
    r"(?:[,:!]\s*|\s+))+",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[^\s.,:;!?])(?:,?\s(?:please|for me|thanks))?[.,:;!?]{0,9}$", re.IGNORECASE)

_AGENT = r"(?:sub-?\s?)?agent"
_TO = r"(?::|,|\s+to\b:?)?"
_GIVE = r"(?:ask|tell|let|have|use)"
_OTHER = r"(?:another|a\s+(?:second|third|fourth|fifth|sixth))"
_DELEGATE = re.compile(
    rf"(?:delegate\b|{_GIVE}\s+(?:a|an|one|another)\s+{_AGENT}){_TO}\s+(?P<tasks>.+)",
    re.IGNORECASE | re.DOTALL,
)
_NEXT_AGENT = re.compile(
    rf"(?:[,;.]\s{{1,9}}(?:and\s{{1,9}})?|\s{{1,9}}and\s{{1,9}})(?:{_GIVE}\s+)?{_OTHER}"
    rf"(?:\s+(?:one|{_AGENT}){_TO}\s+|{_TO}\s+(?=(?:{_VERBS})\b))",
    re.IGNORECASE,
)


def _clauses(text: str) -> Iterator[str]:
    for whole_line in text.splitlines():
        line = _BULLET.sub("", whole_line, count=1).strip()
        while line:
            line = without_courtesy(line)
            cut = (_AFTER_COMMAND if _COMMAND.match(line) else _BETWEEN).search(line)
            if cut is None or line.startswith("$ ") or _CONTENT.match(line):
                yield line
                break
            yield line[: cut.start()]
            line = line[cut.end() :]


def _without_end(text: str) -> str:
    """The text without the punctuation and the courtesies at its end."""
    return _END.sub("", text.rstrip())


def _parse_clause(text: str, quoted: QuotedTexts) -> Intent | None:
    """The request of a clause, or of its beginning if the whole of it matches no rule."""
    cuts = [cut.start() for cut in islice(_ANY_JOINT.finditer(text), CUTS_MAX)]
    for end in (len(text), *reversed(cuts)):
        if (intent := _apply_rules(_without_end(text[:end]), quoted)) is not None:
            return intent
    return None


def _apply_rules(text: str, quoted: QuotedTexts) -> Intent | None:
    for kind, pattern in _RULES[: None if len(text) <= CLAUSE_CHARS else LONG_RULES]:
        if (match := pattern.fullmatch(text)) is None:
            continue
        fields = {name: quoted.restore(s) for name, s in match.groupdict().items() if s is not None}
        if not all(value or name in ("new", "content") for name, value in fields.items()):
            continue
        if kind in ("find", "count_files"):
            fields["pattern"] = _glob_of(fields.get("pattern", "*"))
        return convert({"kind": kind, **fields}, Intent, strict=False)
    return None


# --- rules

_KINDS = {"python": "*.py", "markdown": "*.md", "javascript": "*.js", "text": "*.txt"}


def _glob_of(name: str) -> str:
    """A pattern for files with this name or of this kind, at any depth."""
    if name.isalpha():
        name = _KINDS.get(name.lower(), f"*{name}*")
    return name if "/" in name else f"**/{name}"


_THE = r"(?:(?:the|all|my|this|me)\s+)*"
_HERE = rf"{_THE}(?:current\s+)?(?:directory|folder|project|workspace|repository)"
_PLACE = rf"\s+(?:in|under)\s+(?:{_HERE}|(?:the\s+)?(?P<path>\S+)(?:\s+(?:folder|directory))?)"
_IN = f"(?:{_PLACE})?"
_IS = r"(?:what(?:['’]s|\s+is))"
_NAME = r"(?!(?:the|all|my|any|are)\s)(?P<pattern>\S+)"
_NEW_FILE = (
    rf"(?:create|write)\s+(?:(?:a|an|the|new|empty|file|called|named)\s+)*"
    rf"(?P<path>(?=\S*(?:[./]|{_PLACEHOLDER}))\S+)"
)
_WITH = r",?\s+(?:with|containing)(?:\s+(?:the\s+)?(?:content|text))?(?::|\s)\s*"
# Text that is to be written, unless it is quoted, has no clauses.
_CONTENT = re.compile(rf"{_NEW_FILE}{_WITH}(?!{_PLACEHOLDER})", re.IGNORECASE)
_PATTERNS: tuple[tuple[IntentKind, str], ...] = (
    ("run", r"\$ (?P<command>.+)"),
    ("run", r"(?:run|execute)\b:?\s+(?!(?:the|a|all|my|it)\b)(?P<command>.+)"),
    ("write", rf"{_NEW_FILE}(?:{_WITH}(?P<content>.+))?"),
    # The rules below are for short clauses only.
    (
        "replace",
        r"(?:replace|change)\s+(?P<old>.+?)\s+(?:by|with|to)\s+(?P<new>.+)"
        r"\s+in\s+(?:the\s+)?(?:file\s+)?(?P<path>\S+)",
    ),
    ("fetch", r"(?:fetch|open)\s+(?:the\s+page\s+)?(?P<url>https?://[^/\s]\S*)"),
    (
        "count_matches",
        rf"how\s+(?:many\s+times|often)\s+does\s+(?P<pattern>.+?)\s+(?:occur|appear){_IN}",
    ),
    (
        "count_files",
        rf"(?:how\s+many|count)\s+{_THE}(?:{_NAME}\s+)?files(?:\s+are)?(?:\s+(?:there|here))?{_IN}",
    ),
    ("find", rf"(?:find|list|which)\s+{_THE}{_NAME}\s+files(?:\s+are\s+there)?{_IN}"),
    ("find", rf"(?:find|glob)\s+(?P<pattern>\S*[*.]\S+){_IN}"),
    (
        "read",
        r"(?:read|show)\s+the\s+first\s+(?P<lines>[1-9][0-9]{0,3})\s+lines\s+of\s+(?P<path>\S+)",
    ),
    ("read", rf"(?:read|cat|view)\s+{_THE}(?:file\s+)?(?P<path>\S+)"),
    ("read", rf"(?:show|open|{_IS}\s+in)\s+{_THE}(?:file\s+)?(?P<path>\S*\w\.\w+|{_PLACEHOLDER})"),
    ("list", r"(?:ls|tree)(?:\s+-\w+)*(?:\s+(?P<path>[^\s-]\S*))?"),
    ("list", rf"list|(?:list|show)\s+(?:{_HERE}|{_THE}files(?:\s+here)?){_IN}"),
    ("list", rf"(?:{_IS}|(?:what|which)\s+files\s+are)(?:\s+here|\s+there|{_PLACE})"),
    ("search", rf"(?:search(?:\s+for)?|look\s+for|grep|find)\s+(?P<pattern>.+?){_IN}"),
)
LONG_RULES = 3  # The first ones, which take linear time.
_RULES = tuple((kind, re.compile(p, re.IGNORECASE | re.DOTALL)) for kind, p in _PATTERNS)
