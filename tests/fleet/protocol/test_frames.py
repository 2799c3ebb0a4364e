"""Frames round-trip in both directions, and invalid frames are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from culm.fleet.protocol.frames import (
    BadFrame,
    EventFrame,
    RunSecrets,
    RunSpec,
    encode_frame,
    parse_child_frame,
    parse_parent_frame,
)
from tests.support import contract

FRAMES = Path(__file__).parents[2] / "frozen" / "wire" / "frames.jsonl"
LINES = [json.loads(line) for line in FRAMES.read_text().splitlines()]
PARSE = {"parent": parse_parent_frame, "child": parse_child_frame}


@contract("FLEET-31", "FLEET-P13")
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['from']}-{line['frame']['kind']}")
def test_frame_is_decoded_and_encoded_to_the_same_values(line: dict[str, object]) -> None:
    parse = PARSE[str(line["from"])]
    for text in (json.dumps(line["frame"]), json.dumps(line["frame"], indent=1, sort_keys=True)):
        frame = parse(text.encode())
        assert json.loads(encode_frame(frame)) == line["frame"]
        assert parse(encode_frame(frame)) == parse(encode_frame(parse(text)))


@contract("FLEET-32")
def test_shortest_run_has_an_empty_history() -> None:
    assert parse_parent_frame(b'{"kind":"run","assignment":"x"}') == RunSpec("x")


@contract("FLEET-31")
def test_unset_run_fields_are_not_encoded() -> None:
    assert json.loads(encode_frame(RunSpec("x"))) == {"kind": "run", "assignment": "x"}


@contract("FLEET-34")
def test_frame_repr_contains_no_secrets() -> None:
    spec = RunSpec("x", secrets=RunSecrets(codex_provider_token="sk-hidden"))
    assert "sk-hidden" not in f"{spec!r} {spec}"
    assert b"sk-hidden" in encode_frame(spec)


@contract("FLEET-33", "FLEET-26")
@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"run","assignment":"x","project_id":"../other"}',
        '{"kind":"run","assignment":"x","project_id":"a..b"}',
        '{"kind":"run","assignment":"x","execution_epoch":-1}',
        '{"kind":"run","assignment":"x","execution_epoch":18446744073709551616}',
        '{"kind":"run","assignment":"x","logical_session":{"session_id":"s","root_session_id":"s",'
        '"creation":{"created_at":"2026-09-01T10:00:00","spawn_depth":1}}}',
        '{"kind":"run","assignment":"x","logical_session":{"session_id":"s","root_session_id":"s",'
        '"creation":{"created_at":"2026-09-01T10:00:00Z","spawn_depth":-1}}}',
        '{"kind":"run"}',
        '{"kind":"run","assignment":7}',
        '{"kind":"subagent_reply","id":"1","body":{}}',
        '{"assignment":"x"}',
        '["run"]',
        "",
        "{",
        "null",
        '{"kind":"cancel","kind":"cancel"}',
        '{"kind":"run","assignment":"x","assignment":"y"}',
        '{"kind":"approval_reply","id":"a","approved":false,"approved":true}',
        '{"kind":"initial_input_release","release":{"request":{"a":1,"a":2}}}',
        "[" * 100_000,
        '{"kind":"message","text":"\\ud800"}',
    ],
)
def test_invalid_parent_frame_is_refused(text: str) -> None:
    with pytest.raises(BadFrame):
        parse_parent_frame(text.encode())


@contract("FLEET-26")
@pytest.mark.parametrize(
    "data",
    [
        b'{"kind":"event","event":1,"event":{"type":"token"}}',
        b'{"kind":"event","kind":"terminal","event":{}}',
        b'{"kind":"terminal","status":"fine"}',
        b'{"kind":"run","assignment":"x"}',
        b'{"kind":"event"}',
        b'\xff{"kind":"terminal","status":"completed"}',
    ],
)
def test_invalid_child_frame_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        parse_child_frame(data)


def test_unknown_field_may_appear_twice() -> None:
    assert parse_parent_frame(b'{"kind":"run","new":1,"assignment":"x","new":2}') == RunSpec("x")


def test_unknown_fields_are_ignored_and_event_bytes_are_kept() -> None:
    frame = parse_child_frame(b'{"new":1,"kind":"event","event": {"b":1.50,"a":[ 1]} }')
    assert isinstance(frame, EventFrame)
    assert bytes(frame.event) == b'{"b":1.50,"a":[ 1]}'


def test_only_raw_event_payloads_may_be_large() -> None:
    large = b'{"type":"token","content": [%s0]}' % (b"[]," * 1_500_000)
    frame = parse_child_frame(b'{"kind": "event", "event": %s}' % large)
    assert frame == EventFrame(Raw(large))
    with pytest.raises(BadFrame, match="at most"):
        parse_child_frame(b'{"kind":"approval_request","id":"a","body":%s}' % large)
    some = b'{"content":[%s0]}' % (b"[]," * 50_000)
    with pytest.raises(BadFrame, match="twice"):
        parse_child_frame(b'{"kind":"event","event":1,"event":%s}' % some)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for parse in PARSE.values():
        try:
            parse(data)
        except BadFrame:
            continue
