"""A prompt cut into clauses, and the words that the offline model knows in them.

Pure. A clause holds one request. What is quoted is one word in it and is never read as English:
a hole stands for it until somebody asks for the plain text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from culm.model.offline.agents import DELEGATE
from culm.wire.codec import clean

PROMPT_CHARS = 4000  # Requests that rules can understand are short; the rest is not looked at.

_QUOTED = re.compile(
    r"""\n?```(?:[\w+-]*\n)?(?P<fence>.*?)\n?```|`(?P<code>[^`\n]+)`|"(?P<double>[^"\n]*)\""""
    r"""|“(?P<curly>[^“”\n]*)”|„(?P<low>[^„“”\n]*)[“”]|(?<!\w)'(?P<single>[^'\n]*)'(?!\w)""",
    re.DOTALL,
)
HOLE = re.compile("[\ue000-\uf8ff]")  # Private characters: each stands for one quoted text.
_HOLES_MAX = 0xF8FF - 0xE000

_HEADS = (
    "list|ls|dir|tree|show|display|open|read|cat|view|print|search|grep|rg|look|find|locate|glob"
    "|count|how|what|which|where|run|execute|replace|change|create|write|fetch|download|ask|delegate"
    "|liste|zeige?|lies|öffne|suche?|finde|zähle?|wie|was|wo|ersetze|erstelle|bitte|please"
)
_STOP = r"[,;.!?]{1,3}\s{1,9}"  # Bounded, or a row of dots would be tried at each of them.
_JOINT = rf"(?:{_STOP}|\s{{1,9}})(?:(?:and|then|also|und|dann)\s{{1,9}}){{1,3}}|{_STOP}"
# A new clause begins where a known word follows a joint. Other joints may be part of the clause.
_BETWEEN = re.compile(rf"(?:{_JOINT})(?=(?:{_HEADS})\b|[\ue000-\uf8ff])", re.IGNORECASE)
_AFTER_COMMAND = re.compile(
    rf",?\s{{1,9}}(?:(?:and|then)\s{{1,9}}){{1,3}}(?=(?:{_HEADS})\b)", re.IGNORECASE
)
LOOSE = re.compile(_JOINT, re.IGNORECASE)
_GAP = re.compile(r"[^\S\n]{20,}")  # Patterns below would try each place in a long one.
_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_COURTESY = re.compile(
    r"(?:(?:please|can you|could you|would you|will you|i want (?:you )?to|i would like (?:you )?to"
    r"|i'd like (?:you )?to|let'?s|let us|now|first|then|also|and|just|ok(?:ay)?|hey|hi|hello"
    r"|culm|bitte|kannst du|dann|und|hallo|(?:show|tell) (?:me|us)(?= (?:what|where|which|how)\b))"
    r"(?:[,:!]\s*|\s+))+",
    re.IGNORECASE,
)
# Not the dots of "ls ..", which follow no word.
_FULL_STOP = re.compile(r"(?<=[\w)\ue000-\uf8ff])[.:,;]{1,3}$")
_POLITE_END = re.compile(r",?\s(?:please|bitte|for me|now|thanks|thank you)$", re.I)
COMMAND = re.compile(r"(?:run|execute)\b\s*(?:the (?:shell )?command\b)?[:\s]*(.+)", re.I | re.S)
CREATE = re.compile(
    r"(?:create|write|make|erstelle)\s+(?:(?:a|an|the|new|empty|file|called|named)\s+)*(\S+)"
    r"(?:,?\s+(?:with|containing|mit)(?:\s+(?:the\s+)?(?:content|contents|text))?(?::|\s)\s*(.+))?",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Clause:
    """A piece of a prompt, with a hole for each quoted text."""

    text: str
    quoted: Sequence[re.Match[str]]

    def plain(self, text: str) -> str:
        """`text` without holes: what was quoted, or, in the midst of other words, as it stood."""
        text = text.strip()
        if HOLE.fullmatch(text):
            match = self.quoted[ord(text) - 0xE000]
            return match[match.lastgroup or 0]
        return HOLE.sub(lambda hole: self.quoted[ord(hole[0]) - 0xE000][0], text)

    def word(self, word: str) -> str:
        """One word as a path or a pattern, where a backslash protects a space."""
        return self.plain(word).replace("\\ ", " ")


def clauses_of(prompt: str) -> Iterator[Clause]:
    """The clauses of a prompt's beginning, without the courtesies before them."""
    quoted: list[re.Match[str]] = []

    def dig(match: re.Match[str]) -> str:
        if len(quoted) >= _HOLES_MAX:
            return match[0]
        quoted.append(match)
        space = " " if match[0][0] == "\n" else ""
        return space + chr(0xE000 + len(quoted) - 1)

    text = _QUOTED.sub(dig, HOLE.sub("\ufffd", clean(prompt[:PROMPT_CHARS]))).strip()
    text = _GAP.sub(" ", text)
    courtesy = _COURTESY.match(text)
    if courtesy is not None:
        text = text[courtesy.end() :]
    if DELEGATE.match(text):
        yield Clause(text, quoted)  # Whatever follows is for the other agent.
        return
    for line in text.splitlines():
        yield from (
            Clause(piece, quoted) for piece in _pieces(_BULLET.sub("", line, count=1).strip())
        )


def _pieces(line: str) -> Iterator[str]:
    if line.startswith("$ "):
        yield line
        return
    while line:
        courtesy = _COURTESY.match(line)
        if courtesy is not None:
            line = line[courtesy.end() :]
        created = CREATE.fullmatch(line)
        if created is not None and created[2] and not HOLE.match(created[2]):
            yield line  # Text that is to be written has no clauses.
            return
        cut = (_AFTER_COMMAND if COMMAND.match(line) else _BETWEEN).search(line)
        if cut is None:
            yield line
            return
        yield line[: cut.start()]
        line = line[cut.end() :]


def without_end(text: str) -> str:
    """The text without the courtesies and the punctuation at its end."""
    text = _FULL_STOP.sub("", text.rstrip(" \t!?"))
    return _FULL_STOP.sub("", _POLITE_END.sub("", text)).rstrip(" \t!?")


# --- words


def vocabulary(words: str) -> frozenset[str]:
    return frozenset(words.split())


WORD = re.compile(r"(?:\\\s|\S)+")
_ARTICLES = vocabulary("a an the my our your this that these those all any every some me us")
_LINKING = vocabulary("is are was do does did have has there here of we you its be exist")
_GERMAN = vocabulary(
    "der die das den dem alle mir uns es gibt ist sind hat hier dieser diesem diesen"
)
PLACES = vocabulary(
    "directory directories folder folders dir workspace project repo repository tree codebase "
    "code current working root structure layout ordner verzeichnis projekt"
)
FILES = vocabulary("file files content contents everything entries dateien datei inhalt")
IN = vocabulary("in inside under within from im into")
_FILLER = _ARTICLES | _LINKING | _GERMAN | PLACES | FILES | IN

KINDS = {
    "python": "*.py",
    "markdown": "*.md",
    "javascript": "*.js",
    "typescript": "*.ts",
    "json": "*.json",
    "yaml": "*.{yaml,yml}",
    "toml": "*.toml",
    "rust": "*.rs",
    "go": "*.go",
    "html": "*.html",
    "css": "*.css",
    "sql": "*.sql",
    "shell": "*.sh",
    "text": "*.txt",
    "test": "*test*",
    "readme": "README*",
}
_NAMED_FILES = vocabulary(
    "license copying authors notice readme makefile dockerfile changelog procfile justfile"
)


def words_of(clause: Clause) -> list[str]:
    words = [word.rstrip(",:") or word for word in WORD.findall(clause.text)]
    if words and words[0].lower() in ("what's", "what’s", "whats"):
        words[:1] = ["what", "is"]
    return words


def significant_words(words: Sequence[str]) -> list[str]:
    """The words that say which; the others only make it a sentence."""
    return [word for word in words if word.lower() not in _FILLER]


def looks_like_file(path: str) -> bool:
    if "://" in path or path.endswith("/"):
        return False
    name = path.rpartition("/")[2]
    known = name.lower() in _NAMED_FILES or (name.isupper() and len(name) > 3 and name.isalpha())
    return known or re.search(r"[^.\s]\.[A-Za-z]\w{0,9}$|^\.[A-Za-z]\w+$", name) is not None


def is_glob(word: str) -> bool:
    return any(sign in word for sign in "*?[")


def glob_of(word: str) -> str:
    """A pattern for files that are called like this, however deep they are."""
    if word.lower() in KINDS:
        word = KINDS[word.lower()]
    elif re.fullmatch(r"\.\w+", word) and not is_glob(word):
        word = f"*{word}"
    elif not (is_glob(word) or looks_like_file(word)):
        word = f"{word}*"
    return word if "/" in word else f"**/{word}"


_PRONOUNS = frozenset({"it", "this", "that", "them", "these", "those"})


def location_of(clause: Clause, text: str) -> tuple[str, str, str]:
    """Split "foo in the src folder" into what is meant, a path, and a glob for file names."""
    for match in reversed(list(re.finditer(r"\s+(?:in|inside|under|within|im)\s+", text, re.I))):
        telling = significant_words(WORD.findall(text[match.end() :]))
        if len(telling) > 1:
            continue
        what = text[: match.start()]
        if not telling or telling[0].lower() in _PRONOUNS:
            return what, "", ""
        name = clause.word(telling[0])
        if name.lower() in KINDS:
            return what, "", KINDS[name.lower()]
        return (what, "", name) if is_glob(name) else (what, name, "")
    return re.sub(r"\s+(?:here|hier|everywhere)$", "", text, flags=re.I), "", ""
