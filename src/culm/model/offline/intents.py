"""What a prompt asks of the offline model: a few plain requests, told apart by their words.

Pure, from text to intents. Each clause of the prompt is put to a list of rules, and the first rule
that understands all of it decides. What no rule understands is left out, so a prompt of prose
gives nothing.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from culm.model.offline.agents import tasks_of
from culm.model.offline.clauses import (
    COMMAND,
    CREATE,
    FILES,
    HOLE,
    IN,
    KINDS,
    LOOSE,
    PLACES,
    WORD,
    Clause,
    clauses_of,
    glob_of,
    is_glob,
    location_of,
    looks_like_file,
    significant_words,
    vocabulary,
    without_end,
    words_of,
)

INTENTS_MAX = 6
CLAUSES_MAX = 40  # In one prompt ...
CLAUSE_CHARS = 400  # ... and the length of one, quoted text not counted.
CUTS_MAX = 3  # So often a clause is tried again without its end.


@dataclass(frozen=True, slots=True)
class ListIntent:
    path: str = ""  # Empty is the working directory, here and below.


@dataclass(frozen=True, slots=True)
class ReadIntent:
    path: str
    lines: int = 0  # From the beginning; 0 is as many as the tool gives.


@dataclass(frozen=True, slots=True)
class ReadFirstIntent:
    """Find files, then read the first of them."""

    pattern: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class SearchIntent:
    pattern: str
    path: str = ""
    include: str = ""  # A glob that file names must match.
    literal: bool = True


@dataclass(frozen=True, slots=True)
class FindIntent:
    pattern: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class CountFilesIntent:
    pattern: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class CountLinesIntent:
    path: str


@dataclass(frozen=True, slots=True)
class CountMatchesIntent:
    search: SearchIntent


@dataclass(frozen=True, slots=True)
class RunIntent:
    command: str


@dataclass(frozen=True, slots=True)
class ReplaceIntent:
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class WriteIntent:
    path: str
    content: str


@dataclass(frozen=True, slots=True)
class FetchIntent:
    url: str


@dataclass(frozen=True, slots=True)
class DownloadIntent:
    url: str
    path: str


@dataclass(frozen=True, slots=True)
class DelegateIntent:
    """Have agents work side by side."""

    prompts: tuple[str, ...]  # One for each of them.


Intent = (
    ListIntent
    | ReadIntent
    | ReadFirstIntent
    | SearchIntent
    | FindIntent
    | CountFilesIntent
    | CountLinesIntent
    | CountMatchesIntent
    | RunIntent
    | ReplaceIntent
    | WriteIntent
    | FetchIntent
    | DownloadIntent
    | DelegateIntent
)


def parse_intents(prompt: str) -> tuple[Intent, ...]:
    """What the prompt asks for, in its order; the same thing is done once."""
    clauses = islice(clauses_of(prompt), CLAUSES_MAX)
    found = dict.fromkeys(intent for clause in clauses for intent in _understand(clause))
    return tuple(found)[:INTENTS_MAX]


def _understand(clause: Clause) -> Iterator[Intent]:
    """The whole clause, else its beginning, and then what follows: "read this.py and that.py"."""
    text = clause.text
    for _ in range(INTENTS_MAX):
        cuts = [cut.span() for cut in islice(LOOSE.finditer(text), CUTS_MAX)]
        for end, after in ((len(text), len(text)), *reversed(cuts)):
            intent = _apply_rules(Clause(without_end(text[:end]), clause.quoted))
            if intent is not None:
                yield intent
                text = text[after:]
                break
        else:
            return


def _apply_rules(clause: Clause) -> Intent | None:
    for rule in _RULES if len(clause.text) <= CLAUSE_CHARS else _LONG_RULES:
        intent = rule(clause)
        if intent is not None:
            return intent if _is_whole(intent) else None
    return None


def _is_whole(intent: Intent) -> bool:
    """Whether it says what to work on; quotes may have nothing between them."""
    match intent:
        case (
            ReadIntent(path="")
            | CountLinesIntent(path="")
            | WriteIntent(path="")
            | ReplaceIntent(path="")
        ):
            return False
        case (
            SearchIntent(pattern="")
            | CountMatchesIntent(search=SearchIntent(pattern=""))
            | ReplaceIntent(old="")
        ):
            return False
        case (
            FindIntent(pattern="")
            | RunIntent(command="")
            | DelegateIntent(prompts=())
            | DownloadIntent(path="")
        ):
            return False
        case _:
            return True


# --- rules: each understands the whole clause or says None


def _delegate(clause: Clause) -> Intent | None:
    tasks = tasks_of(clause.text)
    if not tasks:
        return None
    told = (clause.plain(without_end(task)) for task in tasks)
    return DelegateIntent(tuple(filter(None, told)))


def _run(clause: Clause) -> Intent | None:
    if clause.text.startswith("$ "):
        command = clause.text[2:]
    else:
        match = COMMAND.fullmatch(clause.text)
        if match is None or significant_words(WORD.findall(match[1])[:1]) == []:
            return None  # "Run the tests" does not say how.
        command = match[1]
    return RunIntent(clause.plain(command).strip())


def _changes(clause: Clause) -> Intent | None:
    asked = re.fullmatch(
        r"(?:what|which files)(?:['’]s| has| have| did you| was| were)? changed?(?: here| so far)?"
        r"|show (?:me )?(?:the |all |your )*(?:changes|changed files)"
        r"|was (?:wurde|hat sich) geändert",
        clause.text,
        re.I,
    )
    return RunIntent("git status --short") if asked else None


def _get(clause: Clause) -> Intent | None:
    match = re.fullmatch(
        r"(?:fetch|get|open|read|download|hole?|lade)\s+(?:the\s+)?(?:page\s+|url\s+|website\s+)?(\S+)"
        r"(?:\s+(?:in)?to\s+(?:the\s+)?(?:file\s+)?(\S+))?",
        clause.text,
        re.I,
    )
    url = clause.word(match[1]) if match is not None else ""
    if match is None or not re.match(r"https?://[^/\s]", url, re.I):
        return None
    return DownloadIntent(url, clause.word(match[2])) if match[2] else FetchIntent(url)


def _write(clause: Clause) -> Intent | None:
    to = re.fullmatch(
        r"(?:write|put|save)\s+(.+)\s+(?:in)?to\s+(?:(?:the|a|new|file)\s+)*(\S+)",
        clause.text,
        re.I,
    )
    if to is not None:
        return WriteIntent(clause.word(to[2]), clause.plain(to[1]))
    match = CREATE.fullmatch(clause.text)
    if match is None:
        return None
    path = clause.word(match[1])
    named = match[2] is not None or HOLE.fullmatch(match[1]) or looks_like_file(path)
    return WriteIntent(path, clause.plain(match[2] or "")) if named else None


def _replace(clause: Clause) -> Intent | None:
    match = re.fullmatch(
        r"(?:replace|change|ersetze)\s+(.+?)\s+(?:by|with|to|into|durch)\s+(.+)"
        r"\s+in\s+(?:the\s+)?(?:file\s+)?(\S+)",
        clause.text,
        re.I,
    )
    if match is None:
        return None
    return ReplaceIntent(clause.word(match[3]), clause.plain(match[1]), clause.plain(match[2]))


def _count(clause: Clause) -> Intent | None:
    match = re.match(
        r"(how many|how often|count|wie viele|wie oft|zähle?)\s+(?!to\b)", clause.text, re.I
    )
    if match is None:
        return None
    rest = clause.text[match.end() :]
    of = re.fullmatch(
        r"(?:(?:the|all)\s+)?(?:occurrences|matches|mentions|uses|hits)\s+(?:of|for)\s+(.+)"
        r"|(?:times\s+)?(?:does|do|is|are|kommt)\s+(.+?)"
        r"\s+(?:occur|appear|used|mentioned|found|come up|vor)(\s+.+)?",
        rest,
        re.I,
    )
    if of is not None:
        return CountMatchesIntent(_search_for(clause, (of[1] or of[2]) + (of[3] or "")))
    words = [word.lower() for word in WORD.findall(rest)]
    if "lines" in words or "zeilen" in words:
        telling = [
            word for word in significant_words(words_of(clause)) if word.lower() not in _COUNTING
        ]
        return CountLinesIntent(clause.word(telling[0])) if len(telling) == 1 else None
    if "files" in words or "dateien" in words:
        found = _find_in(clause, rest)
        return CountFilesIntent(found.pattern, found.path) if found else None
    search = _search_for(clause, re.sub(r"\s+(?:are|is)\s+there\b", "", rest, flags=re.I))
    sign = re.fullmatch(r"([A-Z][A-Z_]+)s?", search.pattern)  # "TODOs" and the like.
    if sign is None and not HOLE.match(rest):
        return None
    pattern = sign[1] if sign else search.pattern
    return CountMatchesIntent(SearchIntent(pattern, search.path, search.include, search.literal))


_COUNTING = vocabulary(
    "how many count wie viele zähle zähl lines line zeilen number contain total up"
)


def _find_in(clause: Clause, text: str) -> FindIntent | None:
    """The files that a phrase with "files" in it means."""
    what, path, include = location_of(clause, text)
    telling = [
        word for word in significant_words(WORD.findall(what)) if word.lower() not in _NAMING
    ]
    if len(telling) > 1 or (telling and include):
        return None
    name = clause.word(telling[0]) if telling else include
    return FindIntent(glob_of(name) if name else "**/*", path)


_NAMING = vocabulary("called named matching like heißen namens")


def _find(clause: Clause) -> Intent | None:
    words = words_of(clause)
    head = words[0].lower() if words else ""
    if head == "glob" and len(words) == 2:
        return FindIntent(clause.word(words[1]))
    if head not in _FINDING:
        return None
    lower = [word.lower() for word in words]
    rest = "".join(clause.text.split(None, 1)[1:])
    if {"files", "file", "dateien", "datei"} & set(lower):
        found = _find_in(clause, rest)
        # Without a name it is a listing: "show all files".
        return found if found and found.pattern != "**/*" else None
    what, path, include = location_of(clause, rest)
    telling = significant_words(WORD.findall(what))
    if head in ("list", "find", "locate", "finde", "which") and len(telling) == 1 and not include:
        name = clause.word(telling[0])
        if is_glob(name) or (head not in ("list", "which") and _looks_like_a_name(name)):
            return FindIntent(glob_of(name), path)
    return None


_FINDING = vocabulary("find locate list which what show search finde liste zeige zeig")


def _looks_like_a_name(name: str) -> bool:
    # "find TODO" looks for a word, "find setup.py" for a file.
    return looks_like_file(name) and not name.isupper() and " " not in name


def _containing(clause: Clause) -> Intent | None:
    match = re.fullmatch(
        r"(?:find|list|show|which|what|search)\s+(?:(?:me|all|the|for)\s+)*(?:(\S+)\s+)?files\s+"
        r"(?:(?:that|which)\s+)?(?:containing|contains?|with|mention(?:ing)?|use|using)\s+(.+)",
        clause.text,
        re.I,
    )
    if match is None:
        return None
    search = _search_for(clause, match[2])
    kind = clause.word(match[1] or "")
    include = glob_of(kind).removeprefix("**/") if kind else search.include
    return SearchIntent(search.pattern, search.path, include, search.literal)


def _list(clause: Clause) -> Intent | None:
    words = words_of(clause)
    head = words[0].lower() if words else ""
    lower = {word.lower() for word in words[1:]}
    if head in ("ls", "dir", "tree"):
        paths = [word for word in words[1:] if not word.startswith("-")]
        if len(paths) > 1:
            paths = significant_words(paths)
        return ListIntent(clause.word(paths[0]) if paths else "") if len(paths) <= 1 else None
    telling = significant_words(words[1:])
    if head in ("what", "which", "was", "show", "display", "zeige", "zeig") and not telling:
        return ListIntent() if lower & (PLACES | FILES | {"here", "hier"}) else None
    if len(telling) > 1 or head not in _LISTING:
        return None
    path = clause.word(telling[0]) if telling else ""
    if head in ("what", "was") and not lower & IN:
        return None
    if head not in ("list", "liste") and looks_like_file(path) and not lower & PLACES:
        return None
    return None if path.lower() in KINDS or "://" in path else ListIntent(path)


_LISTING = vocabulary("list liste show display open zeige zeig öffne what was")


def _read(clause: Clause) -> Intent | None:
    words = words_of(clause)
    head = words[0].lower() if words else ""
    if head not in _READING:
        return None
    lines = re.search(r"\bfirst\s+(\d{1,4})\s+lines\b", clause.text, re.I)
    dropped = {"first", "lines", lines[1]} if lines else set[str]()
    telling = [word for word in significant_words(words[1:]) if word.lower() not in dropped]
    if len(telling) == 2 and telling[0].lower() in ("first", "erste") and not lines:
        return ReadFirstIntent(glob_of(clause.word(telling[1])))
    if len(telling) == 3 and telling[0].lower() == "first" and not lines:
        return ReadFirstIntent(glob_of(clause.word(telling[1])), clause.word(telling[2]))
    if len(telling) != 1:
        return None
    path = clause.word(telling[0])
    if path.lower() == "readme":
        return ReadFirstIntent("README*")
    sure = head in _READING_ONLY or looks_like_file(path) or lines is not None
    return ReadIntent(path, int(lines[1]) if lines else 0) if sure else None


_READING_ONLY = vocabulary("read cat view lies")
_READING = _READING_ONLY | vocabulary("show display open print what was zeige zeig öffne")


def _search(clause: Clause) -> Intent | None:
    where = re.fullmatch(
        r"(?:where|wo)\s+(?:is|are|ist|wird)\s+(?:(?:the|class|function|method)\s+)*"
        r"(\S+)(?:\s+(defined|declared|implemented|used|called|mentioned|definiert|benutzt))?",
        clause.text,
        re.I,
    )
    if where is not None and significant_words([where[1]]):
        return _definition(clause.word(where[1]), where[2] or "")
    match = re.fullmatch(
        r"(?:search|grep|rg|look|find|locate|suche?|finde)((?:\s+-\w+)*)"
        r"(?:\s+(?:for|up|nach))?(?:\s+(?:the\s+)?(?:word|string|text|pattern|regex))?\s+(.+)",
        clause.text,
        re.I,
    )
    if match is None:
        return None
    flags, what = match[1], match[2]
    words = WORD.findall(what)
    if len(words) == 2 and (flags or words[1].endswith("/") or "/" in words[1][1:-1]):
        pattern, literal = _pattern(clause, words[0])
        return SearchIntent(pattern, clause.word(words[1]), literal=literal)
    return _search_for(clause, what)


def _definition(name: str, verb: str) -> Intent:
    if looks_like_file(name) and not verb:
        return FindIntent(glob_of(name))
    if verb.lower() in ("defined", "declared", "implemented", "definiert") and name.isidentifier():
        words = "class|def|func|function|fn|struct|enum|trait|interface|type|const|let|var"
        regex = rf"\b(?:{words})\s+{name}\b|^\s*{name}\s*(?::[^=]*)?="
        return SearchIntent(regex, literal=False)
    return SearchIntent(name.removesuffix("()"))


def _search_for(clause: Clause, text: str) -> SearchIntent:
    what, path, include = location_of(clause, text)
    pattern, literal = _pattern(clause, what)
    return SearchIntent(pattern, path, include, literal)


def _pattern(clause: Clause, text: str) -> tuple[str, bool]:
    """What to look for, and whether it means just itself; between slashes it is a regex."""
    pattern = clause.plain(text)
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/":
        return pattern[1:-1], False
    return pattern, True


def _bare_path(clause: Clause) -> Intent | None:
    words = WORD.findall(clause.text)
    if len(words) != 1:
        return None
    path = clause.word(words[0])
    if is_glob(path) and "/" not in path.strip("/") and "." in path:
        return FindIntent(glob_of(path))
    if re.fullmatch(r"(?:\.{1,2}|~|/|[\w.~/-]*[\w.]/)", path):
        return ListIntent(path)
    return ReadIntent(path) if looks_like_file(path) else None


_LONG_RULES: tuple[Callable[[Clause], Intent | None], ...] = (_delegate, _run, _write)
_RULES = (
    *_LONG_RULES,
    _changes,
    _get,
    _replace,
    _count,
    _containing,
    _find,
    _list,
    _read,
    _search,
    _bare_path,
)
