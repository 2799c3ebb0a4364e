"""Glob patterns and .gitignore rules.

Pure. A pattern becomes one regular expression a component. Its stars are atomic groups and `**` is
matched over whole components, so no pattern takes more than length × length steps: these run in
threads of the server, where a backtracking regular expression would block everything.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

ALTERNATIVES_MAX = 100  # The most patterns that `{a,b}` may expand to.
PATTERN_CHARS_MAX = 1000
RULES_MAX = 2000  # For one directory; real ones have dozens.
Component = re.Pattern[str] | None  # None is `**`: any number of components.
# Generated and large: shown, but not entered unless they are named.
SKIPPED_DIRECTORIES = frozenset(
    {
        ".cache", ".eggs", ".git", ".gradle", ".hg", ".hypothesis", ".idea", ".mypy_cache",
        ".next", ".nox", ".nuxt", ".pytest_cache", ".ruff_cache", ".svn", ".terraform", ".tox",
        ".venv", ".yarn", "__pycache__", "bower_components", "dist", "node_modules", "target",
        "venv",
    }
)  # fmt: skip


class BadPattern(ValueError):
    """A pattern that cannot be used, with the reason."""


class Glob(NamedTuple):
    """A parsed pattern, to be matched against paths given as their components."""

    alternatives: tuple[tuple[Component, ...], ...]
    hidden: bool

    def matches(self, parts: Sequence[str]) -> bool:
        return any(_match(one, parts, hidden=self.hidden) for one in self.alternatives)


def parse_glob(text: str, *, hidden: bool) -> Glob:
    """Parse `**`, `*`, `?`, `[…]`, `{a,b}` and `\\`; raises `BadPattern`.

    Unless `hidden`, a name that begins with a dot is matched only by a component that does, too.
    """
    if len(text) > PATTERN_CHARS_MAX:
        raise BadPattern(f"it is longer than {PATTERN_CHARS_MAX} characters")
    alternatives = tuple(_components(one, hidden=hidden) for one in expand_braces(text))
    if not all(alternatives):
        raise BadPattern("it is empty")
    return Glob(alternatives, hidden)


def _match(pattern: tuple[Component, ...], parts: Sequence[str], *, hidden: bool) -> bool:
    """Match from the left. On a mismatch the last `**` takes one more component; that is enough."""
    at = here = 0
    after_deep, taken = -1, 0
    while here < len(parts):
        if at < len(pattern):
            component = pattern[at]
            if component is None:
                at += 1
                after_deep, taken = at, here
                continue
            if component.fullmatch(parts[here]):
                at += 1
                here += 1
                continue
        if after_deep < 0 or (parts[taken].startswith(".") and not hidden):
            return False
        taken += 1
        at, here = after_deep, taken
        if after_deep == len(pattern) and taken == len(parts):
            return True
    return at == len(pattern) and pattern[-1] is not None


def expand_braces(text: str) -> list[str]:
    """Expand `a{b,c}` to `ab` and `ac`; raises `BadPattern` if there are too many."""
    waiting, done = [text], list[str]()
    while waiting:
        if len(waiting) + len(done) > ALTERNATIVES_MAX:
            raise BadPattern(f"its braces expand to more than {ALTERNATIVES_MAX} patterns")
        one = waiting.pop()
        found = _first_braces(one)
        if found is None:
            done.append(one)
        else:
            start, end, choices = found
            waiting += [one[:start] + choice + one[end:] for choice in reversed(choices)]
    return done


def _first_braces(text: str) -> tuple[int, int, list[str]] | None:
    """Find the first `{…}` that has a comma of its own: its start, its end, and its choices."""
    stack: list[tuple[int, list[int]]] = []  # The position of each open brace, and its commas.
    first: tuple[int, int, list[str]] | None = None
    escaped = False
    for at, character in enumerate(text):
        if escaped or character == "\\":
            escaped = not escaped
        elif character == "{":
            stack.append((at, []))
        elif character == "," and stack:
            stack[-1][1].append(at)
        elif character == "}" and stack:
            start, commas = stack.pop()
            if commas and (first is None or start < first[0]):
                bounds = [start, *commas, at]
                choices = [text[a + 1 : b] for a, b in pairwise(bounds)]
                first = start, at + 1, choices
            if not stack and first is not None:
                return first
    return first


def _components(text: str, *, hidden: bool) -> tuple[Component, ...]:
    found: list[Component] = []
    for part in text.split("/"):
        if part == "**":
            if not found or found[-1] is not None:  # Repeated ones add nothing.
                found.append(None)
        elif part not in ("", "."):
            found.append(_component(part, hidden=hidden))
    return tuple(found)


def _component(text: str, *, hidden: bool) -> re.Pattern[str]:
    """Compile the pattern of one name. Text between two stars matches at its first position."""
    pieces = [""]  # The text before, between and after the stars.
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "*":
            if pieces[-1] or len(pieces) == 1:
                pieces.append("")
        elif character == "?":
            pieces[-1] += "."
        elif character == "[":
            expression, at = _character_class(text, at)
            pieces[-1] += expression
        else:
            if character == "\\" and at < len(text):
                character, at = text[at], at + 1
            pieces[-1] += re.escape(character)
    head, *rest = pieces
    middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
    tail = f".*{rest[-1]}" if rest else ""
    guard = "" if hidden or text[0] in ".\\" else r"(?!\.)"
    return re.compile(f"{guard}{head}{middle}{tail}", re.DOTALL)


def _character_class(text: str, start: int) -> tuple[str, int]:
    """Translate `[…]`; `start` is behind the bracket. Without an end it is a literal bracket."""
    at = start + 1 if text[start : start + 1] in ("!", "^") else start
    end = text.find("]", at + 1)  # A bracket at the very beginning is one of the characters.
    if end < 0:
        return r"\[", start
    body, ranges = text[at:end], ""
    here = 0
    while here < len(body):
        low = high = body[here]
        if body[here + 1 : here + 2] == "-" and here + 2 < len(body):
            high = body[here + 2]
            here += 2
        if low <= high:
            ranges += f"{re.escape(low)}-{re.escape(high)}"
        here += 1
    if at > start:
        return (f"[^{ranges}]" if ranges else "."), end + 1
    return (f"[{ranges}]" if ranges else "(?!)"), end + 1


class _Rule(NamedTuple):
    depth: int  # Of the directory with its .gitignore, below the root.
    pattern: tuple[Component, ...]
    by_name: bool  # Without a slash it matches a name anywhere, else a path from its directory.
    only_directories: bool
    hides: bool  # A rule with `!` shows again what an earlier one hides.


class IgnoreRules(NamedTuple):
    """The rules of all .gitignore files that apply to one directory. The last match counts."""

    rules: tuple[_Rule, ...] = ()

    def below(self, depth: int, text: str) -> "IgnoreRules":
        """Add the .gitignore of a directory at this depth, which overrides those above it."""
        if not text:
            return self
        return IgnoreRules((*self.rules, *_parse_gitignore(text, depth))[:RULES_MAX])

    def hides(self, parts: Sequence[str], *, is_directory: bool) -> bool:
        """Return True if `parts` itself is hidden; the walk has checked its directory."""
        for rule in reversed(self.rules):
            if is_directory or not rule.only_directories:
                path = parts[-1:] if rule.by_name else parts[rule.depth :]
                if _match(rule.pattern, path, hidden=True):
                    return rule.hides
        return False


class GitignoreLine(NamedTuple):
    """A line of a .gitignore that has a pattern."""

    body: str  # Without `!`.
    by_name: bool
    hides: bool


def gitignore_lines(text: str) -> Iterator[GitignoreLine]:
    """Yield the lines that are neither empty nor a comment; at most `RULES_MAX` are read."""
    for line in text.split("\n", RULES_MAX)[:RULES_MAX]:
        stripped = line.rstrip() + (" " if line.rstrip().endswith("\\") else "")
        if not stripped or stripped.startswith("#") or len(stripped) > PATTERN_CHARS_MAX:
            continue
        hides = not stripped.startswith("!")
        body = stripped if hides else stripped[1:]
        yield GitignoreLine(body, "/" not in body.rstrip("/"), hides)


def _parse_gitignore(text: str, depth: int) -> Iterator[_Rule]:
    """Parse comments, `!`, slashes at any position, `**`, `\\`. No line is an error."""
    for line in gitignore_lines(text):
        pattern = _components(line.body, hidden=True)
        if pattern:
            is_directory = line.body.endswith("/")
            yield _Rule(depth, pattern, line.by_name, is_directory, line.hides)


def combine_gitignores(texts: Sequence[str]) -> IgnoreRules:
    """Return the rules of nested directories, given from the root down."""
    rules = IgnoreRules()
    for depth, text in enumerate(texts):
        rules = rules.below(depth, text)
    return rules
