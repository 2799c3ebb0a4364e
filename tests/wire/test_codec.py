"""Bodies are parsed by Go's rules: ignored input, zero values and refused input."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import InvalidRequest
from culm.wire.asks import PermissionGrant, QuestionAnswer, QuestionResponse
from culm.wire.codec import INT_MAX, encode, parse_body
from culm.wire.config import SelectedModel, SetConfig, SetModel
from culm.wire.extensions import GetPrompt
from culm.wire.messages import SaveSession
from culm.wire.runs import Attachment, InitAgent, Prompt
from tests.wire.payloads import EXAMPLES

DEEP = b"[" * 900 + b"]" * 900
STRUCTS: list[type] = [kind for kind in EXAMPLES if isinstance(kind, type)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"title": "a"} and then anything', SaveSession("a")),
        (b' \t\r\n{"title": "a"}', SaveSession("a")),
        (b"null", SaveSession()),
        (b"{}", SaveSession()),
        (b'{"title": null}', SaveSession()),
        (b'{"TITLE": "a", "unknown": {"x": [1]}}', SaveSession("a")),
        (b'{"title": "a", "Title": "b"}', SaveSession("b")),
        (b'{"title": "a", "Title": null}', SaveSession("a")),
        (b'{"title": "a \\ud800 b"}', SaveSession("a \ufffd b")),
        (b'{"title": "a", "unknown": 1e400}', SaveSession("a")),
        (b'{"title": "a", "unknown": 1' + b"0" * 5000 + b"}", SaveSession("a")),
        (b'{"title": "a", "unknown": ' + DEEP + b"}", SaveSession("a")),
        ('{"\u017fession_ID": "s"}'.encode(), Prompt("s")),
        ('{"se\u00dfion_id": "s"}'.encode(), Prompt()),
        (b'{"sessionid": "s"}', Prompt()),
        (b'{"attachments": [null]}', Prompt(attachments=[Attachment()])),
        (b'{"attachments": [{"content": "aGVs\\r\\nbG8="}]}',
         Prompt(attachments=[Attachment(content=b"hello")])),
        (b'{"args": {"x": null}}', GetPrompt(args={"x": ""})),
        (b'{"args": null}', GetPrompt()),
        (b'{"permission": null, "action": "deny"}', PermissionGrant(action="deny")),
        (b'{"responses": [{"yes": null}]}', QuestionAnswer(responses=[QuestionResponse()])),
        (b'{"model": {"temperature": 1}}', SetModel(model=SelectedModel(temperature=1.0))),
        (b'{"scope": %d}' % INT_MAX, SetConfig(INT_MAX)),
        (b'{"scope": %d}' % (-INT_MAX - 1), SetConfig(-INT_MAX - 1)),
        (b'{"value": null}', SetConfig()),
        (b'{"value": {"Kept": [null, 1.5]}}', SetConfig(value={"Kept": [None, 1.5]})),
    ],
)  # fmt: skip
def test_a_body_that_go_accepts_is_accepted(body: bytes, expected: object) -> None:
    assert parse_body(body, type(expected)) == expected


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"", SaveSession, "the body is empty"),
        (b"  ", SaveSession, "not valid JSON"),
        (b"{", SaveSession, "not valid JSON: .* at character 1"),
        (b'{"title": "a"', SaveSession, "not valid JSON"),
        (b"{\"title\": 'a'}", SaveSession, "not valid JSON"),
        (b'{"title": NaN}', SaveSession, "NaN is not a number"),
        (b'{"title": "\xff"}', SaveSession, "not valid UTF-8 at byte 11"),
        (b"[]", SaveSession, "Expected `object`, got `array`"),
        (b'{"Title": 7}', SaveSession, r"got `int` - at `\$\.title`"),
        (b'{"scope": 1.0}', SetConfig, r"\$\.scope"),
        (b'{"scope": 1e3}', SetConfig, r"\$\.scope"),
        (b'{"scope": "1"}', SetConfig, r"\$\.scope"),
        (b'{"scope": true}', SetConfig, r"\$\.scope"),
        (b'{"scope": %d}' % (INT_MAX + 1), SetConfig, r"64 bits - at `\$\.scope`"),
        (b'{"scope": %d}' % (-INT_MAX - 2), SetConfig, r"64 bits - at `\$\.scope`"),
        (b'{"model": {"temperature": 1e400}}', SetModel, r"\$\.model\.temperature"),
        (b'{"value": [1e400]}', SetConfig, r"\$\.value\[0\]"),
        (b'{"value": {"x": 1' + b"0" * 400 + b"}}", SetConfig, r"\$\.value\.x"),
        (b'{"attachments": [{"content": "a"}]}', Prompt, r"\$\.attachments\[0\]\.content"),
        (b'{"attachments": {}}', Prompt, r"\$\.attachments"),
        (b'{"args": {"x": 1}}', GetPrompt, r"\$\.args"),
        (b"true", InitAgent, "Expected `object`, got `bool`"),
        (b'{"title": "\\ud800", "x": ' + DEEP + b"}", SaveSession, "nested too deeply"),
        (b'{"x": ' + b"[" * 90_000, SaveSession, "nested too deeply"),
    ],
)
def test_a_body_that_go_refuses_is_refused_with_the_place(
    body: bytes, kind: type, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^failed to decode request: .*{message}"):
        parse_body(body, kind)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_encoded_structs_are_parsed_back_whatever_the_case_of_their_keys(kind: type) -> None:
    data = encode(EXAMPLES[kind])
    assert encode(parse_body(data, kind)) == data
    uppercased = {name.upper(): value for name, value in json.loads(data).items()}
    assert encode(parse_body(json.dumps(uppercased).encode(), kind)) == data


def refusal(data: bytes, kind: type) -> str | None:
    try:
        parse_body(data, kind)
    except InvalidRequest as exc:
        return exc.message
    return None


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for kind in (SaveSession, SetConfig, Prompt):
        refusal(data, kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
names = st.sampled_from(["session_id", "prompt", "attachments", "Content", "FILE_path", "run_id"])


@given(st.dictionaries(names, json_values | st.lists(st.dictionaries(names, json_values))))
def test_any_field_value_is_parsed_or_refused(value: dict[str, object]) -> None:
    refusal(json.dumps(value).encode(), Prompt)
