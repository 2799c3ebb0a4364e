"""The decoder accepts, refuses and fills the same values as Go's encoding/json."""

import pytest

from tests.crush_client.golang import (
    ZERO_TIME,
    Any,
    Bool,
    Bytes,
    Float,
    GoType,
    Int,
    Map,
    Ptr,
    Slice,
    Str,
    Struct,
    Time,
    decode,
    encode,
    record,
    to_json,
    unmarshal,
)
from tests.crush_client.syntax import DEPTH_MAX, DecodeError

STR, INT, FLOAT, BOOL, TIME, ANY = Str(), Int(), Float(), Bool(), Time(), Any()
POINT = Struct("Point", {"x": INT, "y": INT})
PLAIN = Struct(
    "Plain",
    {"name": STR, "count": INT, "cost": FLOAT, "on": BOOL, "at": TIME, "data": Bytes()}
    | {"point": POINT, "next": Ptr(POINT), "items": Slice(INT), "map": Map(INT), "any": ANY},
)


def values(data: bytes, kind: GoType = PLAIN) -> dict[str, object]:
    """The non-zero fields of a decoded struct; raises if the decode failed."""
    found = record(decode(data, kind).must())
    zero = record(kind.zero())
    return {name: value for name, value in found.values.items() if value != zero.values[name]}


# --- scalars


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1", INT, 1),
        ("-0", INT, 0),
        ("-9223372036854775808", INT, -(2**63)),
        ("9223372036854775807", INT, 2**63 - 1),
        ("1", FLOAT, 1.0),
        ("1.0", FLOAT, 1.0),
        ("1e9", FLOAT, 1e9),
        ("1E-400", FLOAT, 0.0),
        ("123456789012345678901234567890", FLOAT, 1.2345678901234568e29),
        ('"a"', STR, "a"),
        ('"\\u00e9\\n\\/\\ud83d\\ude00"', STR, "é\n/😀"),
        ('"\x7f\u2028"', STR, "\x7f\u2028"),
        ("true", BOOL, True),
        ("0", ANY, 0.0),
        ('{"a": [1, null, "b", true]}', ANY, {"a": [1.0, None, "b", True]}),
    ],
)
def test_matching_value_is_decoded(text: str, kind: GoType, value: object) -> None:
    found = decode(text.encode(), kind).must()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1.0", INT),
        ("1e9", INT),
        ("1E2", INT),
        ("-0.0", INT),
        ("9223372036854775808", INT),
        ("-9223372036854775809", INT),
        ("1" * 5000, INT),
        ('"1"', INT),
        ("true", INT),
        ("[]", INT),
        ("{}", INT),
        ("256", Int(0, 255)),
        ("-1", Int(0, 255)),
        ("1e400", FLOAT),
        ('"1.5"', FLOAT),
        ("1", STR),
        ("false", STR),
        ('["a"]', STR),
        ('{"a": 1}', STR),
        ("0", BOOL),
        ('"true"', BOOL),
        ("{}", Slice(INT)),
        ('"a"', Slice(INT)),
        ('[1, "2"]', Slice(INT)),
        ("[]", Map(INT)),
        ('{"a": "b"}', Map(INT)),
        ("[]", POINT),
        ("1", POINT),
        ('"x"', Ptr(POINT)),
        ("1e400", ANY),
        ("12", Bytes()),
        ("{}", Bytes()),
    ],
)
def test_value_of_another_type_is_a_type_error(text: str, kind: GoType) -> None:
    error = decode(text.encode(), kind).error
    assert error is not None
    assert error.kind == "type"


@pytest.mark.parametrize(
    "kind", [INT, FLOAT, STR, BOOL, TIME, ANY, Bytes(), Slice(INT), Map(INT), Ptr(INT), POINT]
)
def test_null_is_the_zero_value_of_every_type(kind: GoType) -> None:
    assert decode(b"null", kind).must() == kind.zero()


def test_null_keeps_scalars_and_clears_nilable_values() -> None:
    twice = b'{"count": 1, "count": null, "name": "a", "name": null, "point": {"x": 1}'
    twice += b', "point": null, "items": [1], "items": null, "map": {"a": 1}, "map": null'
    twice += b', "next": {"x": 1}, "next": null}'
    found = values(twice)
    assert (found.pop("count"), found.pop("name")) == (1, "a")
    assert record(found.pop("point")).values == {"x": 1, "y": 0}
    assert found == {}


# --- structs


def test_key_matches_in_any_case_but_needs_its_underscores() -> None:
    kind = Struct("T", {"session_id": STR, "MIMEType": STR})
    assert values(b'{"SESSION_ID": "a", "mimetype": "b"}', kind) == {
        "session_id": "a",
        "MIMEType": "b",
    }
    assert values(b'{"SessionID": "a", "sessionId": "b", "mime_type": "c"}', kind) == {}


def test_exact_key_wins_over_another_case() -> None:
    kind = Struct("T", {"ID": STR, "id": STR})
    assert values(b'{"id": "exact"}', kind) == {"id": "exact"}
    assert values(b'{"Id": "folded"}', kind) == {"ID": "folded"}


def test_only_two_non_ascii_letters_fold_to_ascii_in_keys() -> None:
    kind = Struct("T", {"kiss": STR})
    assert values('{"\u212ai\u017f\u017f": "a"}'.encode(), kind) == {"kiss": "a"}
    assert values('{"ki\u00df": "a"}'.encode(), kind) == {}


def test_unknown_keys_are_ignored() -> None:
    assert values(b'{"what": {"deep": [1e999, {}]}, "count": 2}') == {"count": 2}


def test_last_duplicate_key_wins_and_structs_and_maps_are_merged() -> None:
    data = b'{"count": 1, "Count": 2, "point": {"x": 1}, "point": {"y": 2}'
    data += b', "map": {"a": 1}, "map": {"b": 2}, "items": [1, 2], "items": [3]}'
    found = values(data)
    assert record(found.pop("point")).values == {"x": 1, "y": 2}
    assert found == {"count": 2, "map": {"a": 1, "b": 2}, "items": [3]}


def test_pointer_is_nil_only_for_null() -> None:
    assert values(b'{"next": null}') == {}
    assert record(values(b'{"next": {}}')["next"]).values == {"x": 0, "y": 0}


def test_null_map_entry_has_a_zero_value() -> None:
    assert decode(b'{"a": null}', Map(INT)).must() == {"a": 0}
    assert decode(b'{"a": null}', Map(Ptr(INT))).must() == {"a": None}


def test_mismatch_fills_the_rest_and_returns_the_first_error() -> None:
    found = decode(b'{"count": "1", "name": "a", "on": 1, "point": {"x": 1.5, "y": 2}}', PLAIN)
    assert found.error is not None
    assert found.error.text == "json: cannot unmarshal string into int"
    got = record(found.value)
    assert (got.text("name"), got.flag("on")) == ("a", False)
    assert got.record("point").values == {"x": 0, "y": 2}


def test_error_of_a_custom_decoder_stops_filling() -> None:
    found = decode(b'{"count": 1, "at": "", "name": "a"}', PLAIN)
    assert found.error is not None
    assert found.error.kind == "custom"
    got = record(found.value)
    assert (got.integer("count"), got.text("name"), got.text("at")) == (1, "", ZERO_TIME)


# --- text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (rb'"a\ud800b"', "a\ufffdb"),
        (rb'"\udc00"', "\ufffd"),
        (rb'"\ud800\ud83d\ude00"', "\ufffd😀"),
        (b'"a\xffb"', "a\ufffdb"),
        (b'"\xe2\x82"', "\ufffd\ufffd"),
        (b'"\xed\xa0\x80"', "\ufffd\ufffd\ufffd"),
    ],
)
def test_invalid_unicode_becomes_replacement_characters(data: bytes, text: str) -> None:
    assert decode(data, STR).must() == text


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('""', b""),
        ('"aGVsbG8="', b"hello"),
        ('"aGVs\\r\\nbG8="', b"hello"),
        ('"aGk="', b"hi"),
        ('"aGl="', b"hi"),  # Stray bits at the end are ignored.
        ("[104, 105]", b"hi"),
    ],
)
def test_bytes_are_base64_with_padding(text: str, data: bytes) -> None:
    assert decode(text.encode(), Bytes()).must() == data


@pytest.mark.parametrize(
    "text", ["aGVsbG8", "aGVsbG8==", "aGk_", "a", "aGk= ", "=", "aGVs====", "é"]
)
def test_invalid_base64_is_an_error_that_does_not_stop_the_decode(text: str) -> None:
    found = decode(f'{{"data": "{text}", "count": 1}}'.encode(), PLAIN)
    assert found.error is not None
    assert record(found.value).integer("count") == 1


@pytest.mark.parametrize(
    "text",
    [
        ZERO_TIME,
        "2026-08-21T19:08:35Z",
        "2026-08-21T19:08:35.123456789+02:00",
        "2026-08-21T19:08:35.1-23:59",
        "2024-02-29T00:00:00Z",
        "0000-01-01T00:00:00Z",
        # Go disables its check for these in its own source and accepts them.
        "2026-08-21T9:08:35Z",
        "2026-08-21T19:08:35,5Z",
        "2026-08-21T19:08:35+24:60",
    ],
)
def test_time_is_rfc_3339_with_a_zone(text: str) -> None:
    assert decode(f'"{text}"'.encode(), TIME).must() == text


@pytest.mark.parametrize(
    "text",
    [
        '""',
        "1787338000",
        '"2026-08-21"',
        '"2026-08-21T19:08:35"',
        '"2026-08-21 19:08:35Z"',
        '"2026-08-21t19:08:35z"',
        '"2026-08-21T19:08:35.Z"',
        '"2026-08-21T24:00:00Z"',
        '"2026-08-21T19:60:00Z"',
        '"2026-06-30T23:59:60Z"',
        '"2026-02-29T00:00:00Z"',
        '"2026-13-01T00:00:00Z"',
        '"2026-01-00T00:00:00Z"',
        '"2026-08-21T19:08:35+25:00"',
        '"2026-08-21T19:08:35+02:61"',
        '"2026-08-21T19:08:35+0200"',
        '"2026-08-21T19:08:35\\u005a"',
        '"02026-08-21T19:08:35Z"',
        '" 2026-08-21T19:08:35Z"',
    ],
)
def test_other_time_formats_are_errors(text: str) -> None:
    assert decode(text.encode(), TIME).error is not None


# --- syntax


@pytest.mark.parametrize(
    "text",
    [
        "{'a': 1}",
        '{"a": 1,}',
        "{a: 1}",
        "[1,]",
        "[1 2]",
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        "]",
        "NaN",
        "Infinity",
        "-Infinity",
        "+1",
        ".5",
        "-.5",
        "1.x",
        "1ex",
        "-x",
        "True",
        "nul!",
        "'a'",
        '"a\nb"',
        '"\t"',
        r'"\x41"',
        r'"\u12g4"',
        "// comment\n1",
        "\ufeff1",
        "\xa01",
    ],
)
def test_syntax_error_fills_nothing(text: str) -> None:
    for read in (decode, unmarshal):
        found = read(text.encode(), ANY)
        assert found.error is not None, read
        assert (found.error.kind, found.value) == ("syntax", None)


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_input_is_eof_to_decode_and_a_syntax_error_to_unmarshal(text: str) -> None:
    errors = [read(text.encode(), ANY).error for read in (decode, unmarshal)]
    assert [error.kind for error in errors if error] == ["eof", "syntax"]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[", '{"a"', '{"a":', '{"a": 1', '{"a": 1,', '{"a', "[1", "[1,", "[{"),
        *('"a', '"a\\', '"\\u12', "tru", "n", "-", "1.", "1e", "1.5e+"),
    ],
)
def test_truncated_text_is_an_unexpected_eof(text: str) -> None:
    errors = [read(text.encode(), ANY).error for read in (decode, unmarshal)]
    assert [error.kind for error in errors if error] == ["unexpected eof", "syntax"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{} trailing", {}),
        ('{"a": 1}{"a": 2}', {"a": 1.0}),
        ("1 2", 1.0),
        ("01", 0.0),
        ("1.5.5", 1.5),
        ("truefalse", True),
        ('"a""b"', "a"),
        ("[1]]", [1.0]),
    ],
)
def test_decode_ignores_trailing_data_and_unmarshal_does_not(text: str, value: object) -> None:
    assert decode(text.encode(), ANY).must() == value
    error = unmarshal(text.encode(), ANY).error
    assert error is not None
    assert error.kind == "syntax"


def test_space_around_a_value_is_ignored() -> None:
    assert unmarshal(b' \t\r\n{ "count" :\n1 }\n', PLAIN).error is None


def test_10000_levels_are_accepted_and_10001_are_not() -> None:
    deep = b"[" * DEPTH_MAX + b"]" * DEPTH_MAX
    assert unmarshal(deep, STR).error is not None  # Not a string, but not a syntax error.
    assert decode(b'{"unknown": ' + deep[1:-1] + b"}", PLAIN).error is None
    deeper = decode(b"[" + deep + b"]", PLAIN).error
    assert deeper is not None
    assert deeper.text == "exceeded max depth"


def test_must_raises_the_error_that_go_returns() -> None:
    with pytest.raises(DecodeError, match="cannot unmarshal bool into string"):
        decode(b"true", STR).must()


# --- encoding


def test_encoded_body_is_compact_and_escapes_html() -> None:
    assert encode({"a": ["<&>", "\u2028é"], "b": None}) == (
        '{"a":["\\u003c\\u0026\\u003e","\\u2028é"],"b":null}'.encode()
    )


def test_struct_is_encoded_without_its_empty_optional_fields() -> None:
    kind = Struct(
        "T", {"id": STR, "note?": STR, "cost": FLOAT, "items": Slice(INT), "data": Bytes()}
    )
    value = decode(b'{"data": "aGk=", "cost": 2}', kind).must()
    assert to_json(value) == {"id": "", "cost": 2, "items": None, "data": "aGk="}
    noted = decode(b'{"note": "n", "items": []}', kind).must()
    assert to_json(noted) == {"id": "", "note": "n", "cost": 0, "items": [], "data": None}
