"""Validation of a document against its schema: every problem, with its line and key.

Pure. Names match regardless of case, as in Crush; the checked document has the schema's spelling.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Struct, UnsetType

from culm.config import jsonc
from culm.wire.codec import INT_MAX, Json, folded, printable

PROBLEMS_MAX = 50  # Per file. Nobody reads more, and for each the text is searched for its line.
NAME_CHARS_MAX = 64  # Compared to find the nearest name; no name in the schema is longer.

Document = dict[str, Json]
Hint = Any  # A type, as an annotation has it.


class ConfigProblem(NamedTuple):
    """An error in a configuration file."""

    file: str
    line: int
    key: str  # Dotted; empty if the whole file is meant.
    text: str
    hint: str = ""

    def __str__(self) -> str:
        """One line without control characters: the names come from the file, so from anybody."""
        return printable(self._describe())

    def _describe(self) -> str:
        location = f"{self.file}:{self.line}" if self.line else self.file
        return f"{location}: {self.key}: {self.text}" if self.key else f"{location}: {self.text}"


class CheckedDocument(Struct, frozen=True):
    """A document without its invalid parts."""

    document: Document
    problems: tuple[ConfigProblem, ...] = ()
    is_json: bool = True


def unusable(problem: ConfigProblem) -> CheckedDocument:
    """The result for a text that is not a JSON object at all."""
    return CheckedDocument({}, (problem,), is_json=False)


class _Found(NamedTuple):
    path: jsonc.Path
    text: str
    hint: str = ""


class _Findings:
    """The first problems in a document, and the number of others."""

    def __init__(self) -> None:
        self.first: list[_Found] = []
        self.left_out = 0

    def __len__(self) -> int:
        return len(self.first) + self.left_out

    def add(self, path: jsonc.Path, text: str, hint: Callable[[], str] = str) -> None:
        if len(self.first) < PROBLEMS_MAX:
            self.first.append(_Found(path, text, hint()))
        else:
            self.left_out += 1


def check_text(text: str, kind: type[Struct], file: str) -> CheckedDocument:
    """Parse a file's text as a document of `kind`; invalid parts are dropped and reported."""
    try:
        value = jsonc.parse(text)
    except jsonc.InvalidJson as exc:
        hint = "use JSON; comments and trailing commas are allowed"
        return unusable(ConfigProblem(file, exc.line, "", f"not valid JSON: {exc}", hint))
    if not isinstance(value, dict):
        return unusable(ConfigProblem(file, 1, "", "expected a JSON object"))
    found = _Findings()
    document = cast("Document", _checked(value, kind, (), found))
    lines = jsonc.lines_of(text, [one.path for one in found.first])
    problems = [
        ConfigProblem(file, line, key_of(one.path), one.text, one.hint)
        for line, one in zip(lines, found.first, strict=True)
    ]
    problems.sort(key=lambda problem: problem.line)
    if found.left_out:
        problems.append(ConfigProblem(file, 0, "", f"and {found.left_out} more problems"))
    return CheckedDocument(document, tuple(problems))


def key_of(path: jsonc.Path) -> str:
    """A path in dotted form: `providers.local.models[0].id`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


class _Misfit:
    """A placeholder for a value that does not fit."""


_MISFIT = _Misfit()


def _checked(value: Json, hint: Hint, path: jsonc.Path, found: _Findings) -> Json | _Misfit:
    for meta in _metas(hint):
        if meta.extra and meta.extra.get("whole"):
            return _checked_whole(value, get_args(hint)[0], path, found)
        if meta.max_length and _count(value) > meta.max_length:
            found.add(path, f"it may have at most {meta.max_length} entries")
            return _MISFIT
    return _checked_parts(value, _plain(hint), path, found)


def _checked_whole(value: Json, hint: Hint, path: jsonc.Path, found: _Findings) -> Json | _Misfit:
    """Check a part that is dropped as a whole if anything in it is invalid."""
    if value is None:
        return _misfit(value, "an object", path, found)
    before = len(found)
    checked = _checked(value, hint, path, found)
    return checked if len(found) == before else _MISFIT


def _count(value: Json) -> int:
    """The number of entries of a list or an object, otherwise 0."""
    return len(cast("list[Json]", value)) if isinstance(value, dict | list) else 0


def _metas(hint: Hint) -> Iterator[msgspec.Meta]:
    if get_origin(hint) is Annotated:
        yield from (one for one in get_args(hint)[1:] if isinstance(one, msgspec.Meta))


def _checked_parts(value: Json, hint: Hint, path: jsonc.Path, found: _Findings) -> Json | _Misfit:
    if hint is Any or value is None:
        return value
    if _is_struct(hint):
        return _checked_struct(value, hint, path, found)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is dict:
        return _checked_map(value, arguments, path, found)
    if origin is list:
        if not isinstance(value, list):
            return _misfit(value, "a list", path, found)
        items = cast("list[Json]", value)
        checked = [_checked(item, arguments[0], (*path, n), found) for n, item in enumerate(items)]
        return [item for item in checked if item is not _MISFIT]
    return _checked_leaf(value, hint, path, found)


def _plain(hint: Hint) -> Hint:
    """A type without the members that only make it optional; its constraints stay."""
    if get_origin(hint) in (Union, UnionType):
        others = [one for one in get_args(hint) if one not in (UnsetType, type(None))]
        return _plain(others[0]) if len(others) == 1 else hint
    if get_origin(hint) is Annotated:
        base = get_args(hint)[0]
        if get_origin(base) in (dict, list, Union, UnionType) or _is_struct(base):
            return _plain(base)
    return hint


def _is_struct(hint: Hint) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


def _checked_struct(
    value: Json, kind: type[Struct], path: jsonc.Path, found: _Findings
) -> Json | _Misfit:
    if not isinstance(value, dict):
        return _misfit(value, "an object", path, found)
    known = _fields(kind)
    spelling = {folded(name): name for name in known}
    fields = cast("Document", value)
    result: Document = {}
    for name, inner in fields.items():
        spelled = spelling.get(folded(name))
        if spelled is None:
            found.add((*path, name), "unknown key", partial(_nearest, name, tuple(known)))
            continue
        checked = _checked(inner, known[spelled], (*path, name), found)
        if checked is not _MISFIT:
            result[spelled] = checked
    present = {spelling.get(folded(name)) for name, inner in fields.items() if inner is not None}
    for name in _required(kind) - present:
        found.add(path, f"{name} is missing")
    return result


def _checked_map(
    value: Json, arguments: tuple[Hint, ...], path: jsonc.Path, found: _Findings
) -> Json | _Misfit:
    if not isinstance(value, dict):
        return _misfit(value, "an object", path, found)
    names = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else None
    result: Document = {}
    for name, inner in cast("Document", value).items():
        if names is not None and name not in names:
            found.add((*path, name), "unknown key", partial(_nearest, name, names))
            continue
        if names is None and not _fits(name, arguments[0]):
            found.add((*path, name), "invalid name", lambda: _NAMES_HINT)
            continue
        checked = _checked(inner, arguments[1], (*path, name), found)
        if checked is not _MISFIT:
            result[name] = checked
    return result


def _checked_leaf(value: Json, hint: Hint, path: jsonc.Path, found: _Findings) -> Json | _Misfit:
    if isinstance(value, int) and not -INT_MAX <= value <= INT_MAX:
        found.add(path, "the number is too large")
        return _MISFIT
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    try:
        checked = msgspec.convert(value, hint)
    except msgspec.ValidationError as exc:
        is_number = isinstance(value, int | float) and base in (int, float)
        if is_number or (isinstance(value, str) and base is str):
            found.add(path, str(exc).replace("Expected", "expected"))
            return _MISFIT
        if isinstance(value, str) and get_origin(base) is Literal:
            found.add(path, f"expected {_expected(base)}, got {value[:NAME_CHARS_MAX]!r}")
            return _MISFIT
        return _misfit(value, _expected(base), path, found)
    for meta in _metas(hint):
        if meta.extra and (problem := meta.extra["check"](value)):
            found.add(path, problem)
            return _MISFIT
    return checked


def _fits(name: str, hint: Hint) -> bool:
    try:
        msgspec.convert(name, hint)
    except msgspec.ValidationError:
        return False
    return True


_NAMES_HINT = "use up to 64 lower-case letters, digits and `_`, starting with a letter"
_DESCRIPTIONS: Mapping[Hint, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str | list[str]: "a string or a list of strings",
}


def _expected(base: Hint) -> str:
    if get_origin(base) is Literal:
        return f"one of {', '.join(get_args(base))}"
    return _DESCRIPTIONS.get(base, "something else")


def _misfit(value: Json, expected: str, path: jsonc.Path, found: _Findings) -> _Misfit:
    found.add(path, f"expected {expected}, got {_kind_of(value)}")
    return _MISFIT


def _kind_of(value: Json) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case None:
            return "null"
        case _:
            return "an object"


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib  # Only a misspelled name needs it.

    close = difflib.get_close_matches(name.lower()[:NAME_CHARS_MAX], names, 1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(names)[:40])}"


@cache
def _required(kind: type[Struct]) -> frozenset[str]:
    return frozenset(one.encode_name for one in msgspec.structs.fields(kind) if one.required)


@cache
def _fields(kind: type[Struct]) -> dict[str, Hint]:
    hints = get_type_hints(kind, include_extras=True)
    encoded = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    return {encoded[name]: hints[name] for name in kind.__struct_fields__}
