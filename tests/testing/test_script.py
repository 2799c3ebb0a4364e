"""Scripts: the format, its errors, and the choice of a reply."""

import re
from pathlib import Path

import msgspec
import pytest

from culm.errors import InvalidRequest
from culm.testing.dialects import RequestShape
from culm.testing.script import (
    Player,
    Reply,
    ReplyRule,
    Script,
    ScriptedCall,
    ScriptedUsage,
    parse_script,
    read_script,
)
from culm.wire.codec import Json, encode

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


def reply_texts(player: Player, *texts: str) -> list[str | None]:
    replies = [player.find_reply(lambda text=text: text) for text in texts]
    return [reply and reply.text for reply in replies]


def test_a_json_script_equals_a_python_script() -> None:
    call = ScriptedCall(id="c1", name="bash", input={"command": "ls"})
    usage = ScriptedUsage(input=1, output=2, cache_read=3, cache_write=4)
    assert parse_script(
        b"""{
          "replies": [
            {"text": "a", "usage": null, "finish": "max_tokens"},
            {"calls": [{"id": "c1", "name": "bash", "input": {"command": "ls"}}],
             "usage": {"input": 1, "output": 2, "cache_read": 3, "cache_write": 4}}
          ],
          "rules": [{"when": "x", "reply": {"status": 429, "headers": {"Retry-After": "1"}}}],
          "otherwise": {"tokens": 5, "rate": 2.5}
        }"""
    ) == Script(
        [Reply(text="a", usage=None, finish="max_tokens"), Reply(calls=[call], usage=usage)],
        [ReplyRule("x", Reply(status=429, headers={"Retry-After": "1"}))],
        Reply(tokens=5, rate=2.5),
    )


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"replys": []}', "unknown field `replys`"),
        (b'{"replies": [{"txt": "a"}]}', "unknown field `txt` - at `$.replies[0]`"),
        (b'{"replies": [{}, {"rate": -1}]}', "`rate` must be a number of deltas per second"),
        (b'{"replies": [{}, {"rate": -1}]}', "at `$.replies[1]`"),
        (b'{"rules": [{"when": "x"}]}', "missing required field `reply` - at `$.rules[0]`"),
        (b'{"otherwise": {"calls": [{}]}}', "missing required field `name`"),
        (b'{"otherwise": {"text": "\xff"}}', "invalid script"),
    ],
)
def test_an_invalid_script_is_refused_with_the_problem_and_its_place(
    data: bytes, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(problem)):
        parse_script(data)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text": "a", "tokens": 1}, "exclude each other"),
        ({"tokens": -1}, "`tokens`"),
        ({"tokens": 1_000_001}, "`tokens`"),
        ({"long_line_bytes": 1 << 30}, "`long_line_bytes`"),
        ({"rate": float("inf")}, "`rate`"),
        ({"rate": float("nan")}, "`rate`"),
        ({"delay_s": -0.1}, "`delay_s`"),
        ({"status": 100}, "`status`"),
        ({"cut_after": -1}, "`cut_after`"),
        ({"headers": {"Content-Length": "3"}}, "is set by the server"),
        ({"headers": {"X": "a\r\nSet-Cookie: b"}}, "cannot be sent"),
        ({"headers": {"X Y": "a"}}, "cannot be sent"),
    ],
)
def test_an_invalid_reply_is_refused_in_python_too(fields: dict[str, Json], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Reply(**fields)


def test_a_missing_script_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot read the script .*gone\.json: No such file"):
        read_script(tmp_path / "gone.json")


def test_rules_come_first_then_replies_in_order_then_otherwise() -> None:
    rule = ReplyRule("red", Reply(text="rule"), times=2)
    script = Script([Reply(text="1"), Reply(text="2")], [rule], Reply(text="otherwise"))
    texts = ["red", "blue", "red", "red", "blue", "red"]
    assert reply_texts(Player(script), *texts) == [
        "rule",
        "1",
        "rule",
        "2",
        "otherwise",
        "otherwise",
    ]


def test_a_script_without_otherwise_is_exhausted_until_a_reply_is_added() -> None:
    player = Player(Script([Reply(text="1")]))
    assert reply_texts(player, "a", "b") == ["1", None]
    player.add(Reply(text="2"))
    assert reply_texts(player, "c", "d") == ["2", None]


@pytest.mark.parametrize(
    "when", ['say "hé"', "two\nlines", '"role":"tool"', "Be brief", r"two\nlines"]
)
def test_a_rule_matches_text_in_any_json_spelling(when: str) -> None:
    body = rb"""{"system": "Be brief", "messages": [
        {"role" : "tool", "content" : "say \"h\u00e9\" in two\nlines"}]}"""
    asked = msgspec.json.decode(body, type=RequestShape)
    player = Player(Script(rules=[ReplyRule(when, Reply(text="found"))]))
    assert reply_texts(player, asked.text) == ["found"]


def test_the_documentation_lists_every_field_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", PAGE, re.MULTILINE)
    for kind in (Reply, ScriptedCall, ScriptedUsage, ReplyRule, Script):
        assert {name for name, _ in rows} >= set(kind.__struct_fields__), kind
    written = {name: default for name, default in rows if name in Reply.__struct_fields__}
    fresh = msgspec.to_builtins(Reply())
    made = {name: encode(value).decode() for name, value in fresh.items()}
    assert written == made | {"usage": "counted"}


def test_every_script_in_the_documentation_is_valid() -> None:
    scripts = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert scripts
    for script in scripts:
        parse_script(script.encode())
