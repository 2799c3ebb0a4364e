"""JSON with comments is parsed correctly, and an edit changes nothing else."""

import json
import re
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config.jsonc import (
    NESTING_MAX,
    InvalidJson,
    NotAnObject,
    Unwritable,
    line_of,
    parse,
    remove_value,
    set_value,
)
from culm.wire.codec import Json

DEEPEST = "[" * NESTING_MAX + "]" * NESTING_MAX

# --- reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, 2.5, "x", true, null]}', {"a": [1, 2.5, "x", True, None]}),
        ("\ufeff{}", {}),
        ("// first\n{} // last", {}),
        ('/* one\ntwo */ {"a": /* here */ 1, }', {"a": 1}),
        ('{"a": [1, /* , ] */ ], // }\n}', {"a": [1]}),
        ('{"url": "http://x/*y*/", "b": ",]"}', {"url": "http://x/*y*/", "b": ",]"}),
        ('{"quote": "\\"// no comment", }', {"quote": '"// no comment'}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("// old line ends\r{}", {}),
        ("/***/[/**/]", []),
        ("1" * 400, int("1" * 400)),
        ('"\\ud83d\\ude00"', "\U0001f600"),
    ],
)
def test_comments_and_trailing_commas_are_skipped(text: str, expected: Json) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "a value is missing"),
        ("// nothing else\n", 2, 1, "a value is missing"),
        ('{"a": }', 1, 7, "a value is missing"),
        ("[1,,]", 1, 4, "a value is missing"),
        ("[ /* x */ , ]", 1, 11, "a value is missing"),
        ("{,}", 1, 2, "a key is missing"),
        ("{name: 1}", 1, 2, "keys must be in double quotes"),
        ('{"a": 1,\n ]', 2, 2, "the object ends with }, not with ]"),
        ('{"a" 1}', 1, 6, "a colon is missing after the key"),
        ('{\r\n  "a": 1\r\n  "b": 2\r\n}', 3, 3, "a comma is missing before the next key"),
        ('\ufeff{"a": 1 // x\n"b": 2}', 2, 1, "a comma is missing before the next key"),
        ("[1 2]", 1, 4, "a comma is missing before the next item"),
        ('{"a": "b": 1}', 1, 10, "a colon is only allowed after a key"),
        ('\ufeff{"a": "x\n}', 1, 7, "the string does not end"),
        ('["x', 1, 2, "the string does not end"),
        ('["x\\', 1, 2, "the string does not end"),
        ('["\\x"]', 1, 2, "the escape \\x is unknown or incomplete"),
        ('["a\tb"]', 1, 2, "a control character in a string must be written \\u0009"),
        ('["\\ud800"]', 1, 2, "the string contains an unpaired surrogate"),
        ('["\ud800"]', 1, 3, "an unpaired surrogate is not a character"),
        ("[NaN]", 1, 2, "NaN is not valid JSON"),
        ("[-Infinity]", 1, 2, "-Infinity is not valid JSON"),
        ("[True]", 1, 2, "True is not valid JSON; use true, false or null"),
        ("['a']", 1, 2, "strings must be in double quotes"),
        ("[01]", 1, 2, "01 is not a JSON number"),
        ("[.5]", 1, 2, ".5 is not a JSON number"),
        ("[1e999]", 1, 2, "the number is too large"),
        ("[" + "1" * 5000 + "]", 1, 2, "the number is too large"),
        ("[\u00a01]", 1, 2, "the character U+00A0 is not valid JSON"),
        ("# x\n{}", 1, 1, "comments start with // or /*"),
        ('{"a": 1 # x\n}', 1, 9, "comments start with // or /*"),
        ("{} /* x", 1, 4, "the comment does not end"),
        ("[1,\n[2", 2, 3, "the list that begins in line 2 does not end"),
        ('{"a":\n[1}', 2, 3, "the list that begins in line 2 does not end before this }"),
        ("{}\n{}", 2, 1, "unexpected text after the end of the document"),
        (f"[{DEEPEST}]", 1, 101, "the nesting is deeper than 100 levels"),
    ],
)
def test_an_error_has_its_line_and_column(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column, caught.value.message) == (line, column, message)


def test_up_to_a_hundred_levels_are_parsed_and_edited() -> None:
    assert json.dumps(parse(DEEPEST + "// x")) == DEEPEST
    inner = json.loads("[" * (NESTING_MAX - 1) + "]" * (NESTING_MAX - 1))
    assert parse(set_value("", ("a",), inner)) == {"a": inner}
    with pytest.raises(Unwritable):
        set_value("{}", ("a",), [inner])


@pytest.mark.parametrize("piece", ["[", '[["', '"\\', "[/*", ",[1", "{,/*", "//", "[1,"])
def test_a_pathological_text_is_refused_quickly(piece: str) -> None:
    with pytest.raises(InvalidJson):
        parse(piece * 80_000)


@given(st.text(alphabet='{}[]",:/*\\\n\r1e-.au0d8 \ufeff', max_size=14))
def test_any_text_is_refused_or_parsed_and_editable(text: str) -> None:
    try:
        value = parse(text)
    except InvalidJson:
        return
    assert line_of(text, ("a", 0)) >= 1
    assert parse(set_value(text, (), value)) == value


# --- the line of a key

PLACES = """// Where things are.
{
  "a": 1, "b": {
    // "c": 0,
    "c": 2,
    "list": [
      1, 2,
      { "x": 3 }
    ]
  },
  "a": 4
}
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 1),
        (("missing",), 1),
        (("a",), 11),
        (("b",), 3),
        (("b", "c"), 5),
        (("b", "c", "no object"), 5),
        (("b", "list", 1), 7),
        (("b", "list", 2, "x"), 8),
        (("b", "list", 9), 6),
        (("b", "list", -1), 6),
        (("b", "list", "1"), 6),
        (("b", 0), 3),
    ],
)
def test_the_line_is_that_of_the_deepest_existing_step(
    path: tuple[str | int, ...], line: int
) -> None:
    assert line_of(PLACES, path) == line
    assert line_of(PLACES.replace("\n", "\r\n"), path) == line


# --- edits by example


@pytest.mark.parametrize(
    ("before", "path", "value", "after"),
    [
        ("", "a.b", 1, '{\n  "a": {\n    "b": 1\n  }\n}\n'),
        ("\ufeff// mine\r\n", "a", "ü", '\ufeff// mine\r\n{\r\n  "a": "ü"\r\n}\r\n'),
        ('{"a": 1}', "b", 2, '{"a": 1, "b": 2}'),
        ('{ "a": 1 /* x */ }', "b", 2, '{ "a": 1, /* x */ "b": 2 }'),
        ('{"a": 1,}', "b", 2, '{"a": 1, "b": 2,}'),
        ('{"a": {}}', "a.b", [], '{"a": {"b": []}}'),
        ('{ "a": 1 }', "b", [2], '{\n  "a": 1,\n  "b": [\n    2\n  ]\n}'),
        ('{\n\t"a": {}\n}', "a.b", 2, '{\n\t"a": {\n\t\t"b": 2\n\t}\n}'),
        ("{\n  // none\n}\n", "a", 1, '{\n  // none\n  "a": 1\n}\n'),
        ('{"a" : /* x */ 1 /* y */}', "a", 2, '{"a" : /* x */ 2 /* y */}'),
        ('{"a": 1, "a": 2}', "a", 3, '{"a": 1, "a": 3}'),
        (
            '{\n    "a": 1 // one\n    // "b": 2\n}\n',
            "c.d",
            [True],
            '{\n    "a": 1, // one\n    // "b": 2\n    "c": {\n        "d": [\n'
            "            true\n        ]\n    }\n}\n",
        ),
        ('{\r\n  "a": 1, // x\r\n}', "b", 2, '{\r\n  "a": 1, // x\r\n  "b": 2,\r\n}'),
        ('{\n  "a": {"x": 1}\n}', "a", {"y": 2}, '{\n  "a": {\n    "y": 2\n  }\n}'),
    ],
)
def test_setting_a_key_keeps_the_rest(before: str, path: str, value: Json, after: str) -> None:
    assert set_value(before, tuple(path.split(".")), value) == after


@pytest.mark.parametrize(
    ("before", "path", "after"),
    [
        ("", "a", ""),
        ('{"a": [1]}', "a.0", '{"a": [1]}'),
        ('{"a": 1}', "a", "{}"),
        ('{"a": 1, "b": 2, "c": 3}', "a", '{"b": 2, "c": 3}'),
        ('{"a": 1, "b": 2, "c": 3}', "b", '{"a": 1, "c": 3}'),
        ('{"a": 1, "b": 2, "c": 3}', "c", '{"a": 1, "b": 2}'),
        ('{"a": 1, "b": 2,}', "b", '{"a": 1,}'),
        ('{"a": 1, "b": 2, "a": 3}', "a", '{"b": 2}'),
        ('{"a": 1, /* of b */ "b": 2}', "a", '{/* of b */ "b": 2}'),
        ('{\n  // above\n  "a": 1, // end\n  "b": 2\n}', "a", '{\n  // above\n  "b": 2\n}'),
        ('{\n  "a": 1, // one\n  "b": [\n  2] // end\n}', "b", '{\n  "a": 1 // one\n}'),
        ('{\r\n\t"a": 1,\r\n\t"b": 2, // x\r\n}\r\n', "b", '{\r\n\t"a": 1,\r\n}\r\n'),
        ('{ "a": 1, "b": 2 // x\n}', "b", '{ "a": 1\n}'),
        ('{\n  "o": {\n    "a": 1\n  }\n}', "o.a", '{\n  "o": {\n  }\n}'),
        ('{ "a": 1\n// of b\n, "b": 2 }', "a", '{\n// of b\n "b": 2 }'),
    ],
)
def test_removing_a_key_removes_its_line_and_fixes_commas(
    before: str, path: str, after: str
) -> None:
    assert remove_value(before, tuple(path.split("."))) == after


@pytest.mark.parametrize(
    ("text", "expected"), [("[]", ()), ('{"a": 1}', ("a",)), ('{"a": {"b": null}}', ("a", "b"))]
)
def test_a_key_below_a_value_that_is_not_an_object_is_refused(
    text: str, expected: tuple[str, ...]
) -> None:
    with pytest.raises(NotAnObject) as caught:
        set_value(text, ("a", "b", "c"), 1)
    assert caught.value.path == expected
    assert remove_value(text, ("a", "b", "c")) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {"\ud800": 1}, [10**5000]])
def test_a_value_that_could_not_be_parsed_again_is_not_written(value: Json) -> None:
    with pytest.raises(Unwritable):
        set_value("{}", ("a",), value)


def test_an_invalid_text_is_not_edited() -> None:
    with pytest.raises(InvalidJson):
        set_value('{"a": 1', ("a",), 2)
    with pytest.raises(InvalidJson):
        remove_value('{"a": 1', ("a",))


# --- edits of any text

KEYS = st.sampled_from(["a", "b", "c", "d/*", '"', "é\n"])
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(-9, 9)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True)
class UntidyText:
    """A text whose comments are all different, with the positions of its members."""

    text: str
    members: list[tuple[str, int, int]]  # Each outermost key with the start and end of its member.


class UntidyWriter:
    """Writes JSON as untidily as a person might."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self._line_end = data.draw(st.sampled_from(["\n", "\r\n"]))
        self._comments = 0

    def document(self, fields: list[tuple[str, Json]]) -> UntidyText:
        text = self._draw(st.sampled_from(["", "\ufeff"])) + self.gap() + "{"
        members: list[tuple[str, int, int]] = []
        for key, value in fields:
            text += ("," if members else "") + self.gap()
            member = self._member(key, self.value(value))
            members.append((key, len(text), len(text) + len(member)))
            text += member + self.gap()
        text += self._draw(st.sampled_from(["", ","])) if members else ""
        return UntidyText(text + self.gap() + "}" + self.gap(), members)

    def value(self, value: Json) -> str:
        if isinstance(value, dict):
            fields = cast("dict[str, Json]", value)
            return f"{{{self._body([self._member(k, self.value(fields[k])) for k in fields])}}}"
        if isinstance(value, list):
            return f"[{self._body([self.value(item) for item in cast('list[Json]', value)])}]"
        return json.dumps(value, ensure_ascii=self._draw(st.booleans()))

    def gap(self) -> str:
        return "".join(
            self._piece() for _ in range(self._draw(st.sampled_from([0, 0, 1, 1, 2, 3])))
        )

    def _piece(self) -> str:
        kind = self._draw(st.sampled_from([" ", "\t", "line end", "//", "/*", "/*\n"]))
        self._comments += 1
        match kind:
            case "line end":
                return self._line_end + "  "
            case "//":
                return f'// {self._comments} "}},{self._line_end}'
            case "/*":
                return f"/* {self._comments} ] */"
            case "/*\n":
                return f"/* {self._comments}{self._line_end} */"
            case _:
                return kind

    def _member(self, key: str, value: str) -> str:
        return f"{json.dumps(key)}{self.gap()}:{self.gap()}{value}"

    def _body(self, parts: list[str]) -> str:
        written = [self.gap() + part + self.gap() for part in parts]
        trailing = "," + self.gap() if parts and self._draw(st.booleans()) else ""
        return ",".join(written) + trailing if parts else self.gap()


FIELDS = st.lists(st.tuples(KEYS, VALUES), max_size=4)
COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|(//[^\r\n]*|/\*.*?\*/)', re.DOTALL)


def comments_of(text: str) -> list[str]:
    return [found[1] for found in COMMENT.finditer(text) if found[1]]


def with_value(document: Json, path: tuple[str, ...], value: Json) -> Json:
    if not path:
        return value
    return {**document, path[0]: with_value(document.get(path[0], {}), path[1:], value)}


@given(st.data(), FIELDS, st.lists(KEYS, min_size=1, max_size=3).map(tuple), VALUES)
def test_setting_a_key_changes_only_that_key(
    data: st.DataObject, fields: list[tuple[str, Json]], path: tuple[str, ...], value: Json
) -> None:
    written = UntidyWriter(data).document(fields)
    document = parse(written.text)
    assert document == dict(fields)
    try:
        after = set_value(written.text, path, value)
    except NotAnObject as exc:
        inner = document
        for key in exc.path:
            inner = inner[key]
        assert not isinstance(inner, dict)
        return
    assert parse(after) == with_value(document, path, value)
    assert after.startswith("\ufeff") == written.text.startswith("\ufeff")
    last = max((n for n, (key, _, _) in enumerate(written.members) if key == path[0]), default=-1)
    touched = [member for n, member in enumerate(written.members) if n == last]
    assert all(text in after for text in texts_of(written, but=touched))
    if is_there(document, path):  # Comments inside the old value went with it.
        _, start, end = touched[0]
        outside = comments_of(written.text[:start]) + comments_of(written.text[end:])
        assert [x for x in comments_of(after) if x in outside] == outside
    else:
        assert comments_of(after) == comments_of(written.text)


@given(st.data(), FIELDS, KEYS)
def test_removing_a_key_keeps_the_others_and_their_comments(
    data: st.DataObject, fields: list[tuple[str, Json]], key: str
) -> None:
    written = UntidyWriter(data).document(fields)
    after = remove_value(written.text, (key,))
    assert parse(after) == {name: value for name, value in fields if name != key}
    assert after.startswith("\ufeff") == written.text.startswith("\ufeff")
    removed = [member for member in written.members if member[0] == key]
    if not removed:
        assert after == written.text
    assert all(text in after for text in texts_of(written, but=removed))
    may_go: set[str] = set()
    for _, start, end in removed:
        line_end = re.compile(r"[\r\n]|$").search(written.text, end)
        may_go.update(comments_of(written.text[start : line_end.start() if line_end else None]))
    expected = comments_of(written.text)
    left = comments_of(after)
    assert [x for x in expected if x in left] == left
    assert set(expected) - set(left) <= may_go


def texts_of(written: UntidyText, *, but: list[tuple[str, int, int]]) -> list[str]:
    kept = [member for member in written.members if member not in but]
    return [written.text[start:end] for _, start, end in kept]


def is_there(document: Json, path: tuple[str, ...]) -> bool:
    if not path:
        return True
    return (
        isinstance(document, dict)
        and path[0] in document
        and is_there(cast("dict[str, Json]", document)[path[0]], path[1:])
    )


@given(st.data(), FIELDS, st.lists(KEYS, min_size=1, max_size=2).map(tuple), VALUES)
def test_adding_and_removing_a_key_restores_the_document(
    data: st.DataObject, fields: list[tuple[str, Json]], path: tuple[str, ...], value: Json
) -> None:
    written = UntidyWriter(data).document(fields)
    document = parse(written.text)
    if path[0] not in document:
        assert parse(remove_value(set_value(written.text, path, value), path[:1])) == document
