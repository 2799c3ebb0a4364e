"""Text deltas applied to message parts, SSE frames, and bodies parsed like in Go."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.client.stream import SseParser
from culm.errors import InvalidRequest
from culm.events.views import encode_frame
from culm.wire.codec import decode, encode, parse_body
from culm.wire.messages import Binary, BinaryPart, Part, Text, TextPart, append_text
from culm.wire.workspaces import CreateWorkspace


@given(st.text(min_size=1), st.data())
def test_overlapping_deltas_add_up_to_the_text(text: str, data: st.DataObject) -> None:
    parts: list[Part] = []
    known = 0
    while known < len(text):
        offset = data.draw(st.integers(0, known))
        end = data.draw(st.integers(known + 1, len(text)))
        assert append_text(parts, 0, "text", offset, text[offset:end])
        known = end
    assert parts == [TextPart(Text(text))]


def test_a_delta_beyond_the_known_end_is_refused() -> None:
    parts: list[Part] = [TextPart(Text("ab"))]
    assert not append_text(parts, 0, "text", 3, "d")
    assert not append_text(parts, 0, "reasoning", 2, "c")
    assert not append_text(parts, 2, "text", 0, "c")
    assert parts == [TextPart(Text("ab"))]


def test_binary_parts_keep_their_capital_keys_and_padded_base64() -> None:
    part = BinaryPart(Binary("shot.png", "image/png", b"\x89PNG"))
    wire = json.loads(encode(part))
    assert wire == {
        "type": "binary",
        "data": {"Path": "shot.png", "MIMEType": "image/png", "Data": "iVBORw=="},
    }
    assert decode(encode(part), BinaryPart) == part


@given(st.lists(st.text(), max_size=5), st.data())
def test_frames_are_parsed_however_the_network_splits_them(
    texts: list[str], data: st.DataObject
) -> None:
    stream = b"".join(
        encode_frame("delta", "session", "updated", encode(text), f"e.{n}")
        for n, text in enumerate(texts)
    )
    lines = SseParser()
    read: list[str] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        read += [event.read(str) for event in lines.feed(stream[:cut])]
        stream = stream[cut:]
    assert read == texts


def test_missing_and_null_fields_are_zero_values_and_trailing_text_is_ignored() -> None:
    body = b' {"path": "/x", "env": null, "yolo": null, "unknown": {"deep": null}} trailing'
    assert parse_body(body, CreateWorkspace) == CreateWorkspace(path="/x")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid UTF-8 at byte 0"),
        (b'{"yolo": NaN}', "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b'{"path": 7}', r"\$.path"),
        (b'{"env": ["a", 7]}', r"\$.env"),
        (b"[" * 90_000, "nested too deeply"),
    ],
)
def test_an_invalid_body_is_refused_with_the_field(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_body(body, CreateWorkspace)
