"""Checking a document: each problem with its place, and no invalid value gets through."""

import json
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from culm.config.checking import PROBLEMS_MAX, CheckedDocument, ConfigProblem, check_text, key_of
from culm.config.schema import HOOKS_MAX, OWN_TOOLS_MAX, ProjectFile, UserFile
from culm.wire.asks import RULES_MAX
from culm.wire.codec import Json, fit, strings_in

NOT_JSON = "use JSON; comments and trailing commas are allowed"


def problems_of(text: str, kind: type[Struct] = UserFile) -> list[tuple[int, str, str, str]]:
    checked = check_text(text, kind, "culm.json")
    assert all(problem.file == "culm.json" for problem in checked.problems)
    return [(p.line, p.key, p.text, p.hint) for p in checked.problems]


def test_every_problem_has_its_line_and_key_and_valid_parts_are_kept() -> None:
    text = """{
      // Mine.
      "modles": {},
      "providers": {
        "local": {
          "base_url": "http://127.0.0.1:1/v1",
          "bas_url": "x",
          "models": [
            {"id": "a"},
            {"id": 7, "name": "b"},
            "c",
          ],
        },
        "other": [],
      },
      "options": {"tui": {"compact_mode": "yes", "diff_mode": "split"}},
      "runs_max": 0,
    }"""
    local = {
        "base_url": "http://127.0.0.1:1/v1",
        "models": [{"id": "a"}, {"name": "b"}],
    }
    assert check_text(text, UserFile, "f") == CheckedDocument(
        {"providers": {"local": local}, "options": {"tui": {"diff_mode": "split"}}},
        (
            ConfigProblem("f", 3, "modles", "unknown key", "did you mean 'models'?"),
            ConfigProblem(
                "f", 7, "providers.local.bas_url", "unknown key", "did you mean 'base_url'?"
            ),
            ConfigProblem(
                "f", 10, "providers.local.models[1].id", "expected a string, got a number"
            ),
            ConfigProblem("f", 11, "providers.local.models[2]", "expected an object, got a string"),
            ConfigProblem("f", 14, "providers.other", "expected an object, got a list"),
            ConfigProblem(
                "f", 16, "options.tui.compact_mode", "expected true or false, got a string"
            ),
            ConfigProblem("f", 17, "runs_max", "expected `int` >= 1"),
        ),
    )


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ('{"models": []}', "models", "expected an object, got a list"),
        ('{"models": {"large": "gpt"}}', "models.large", "expected an object, got a string"),
        ('{"options": true}', "options", "expected an object, got true"),
        ('{"hooks": {"a": {}}}', "hooks.a", "expected a list, got an object"),
        ('{"env": {"A": 1}}', "env.A", "expected a string, got a number"),
        ('{"options": {"debug": 1}}', "options.debug", "expected true or false, got a number"),
        ('{"queue_max": "9"}', "queue_max", "expected a whole number, got a string"),
        ('{"linger_s": []}', "linger_s", "expected a number, got a list"),
        ('{"linger_s": -0.5}', "linger_s", "expected `float` >= 0.0"),
    ],
)
def test_a_value_of_the_wrong_type_is_reported(value: str, key: str, message: str) -> None:
    assert problems_of(value) == [(1, key, message, "")]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", '"9"', "[]", "{}", f"{10**30}"])
def test_a_setting_out_of_range_or_of_the_wrong_type_is_ignored(value: str) -> None:
    checked = check_text(f'{{"queue_max": {value}, "runs_max": 7}}', UserFile, "f")
    assert checked.document == {"runs_max": 7}
    assert [problem.key for problem in checked.problems] == ["queue_max"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("larg", "large"), ("LARGE", "large"), ("smal", "small")],
)
@pytest.mark.parametrize("key", ["models", "fallbacks", "recent_models"])
def test_an_unknown_role_is_reported_with_the_nearest_name(
    key: str, name: str, nearest: str
) -> None:
    value = "{}" if key == "models" else "[]"
    hint = f"did you mean {nearest!r}?"
    text = f'{{"{key}": {{"{name}": {value}}}}}'
    assert problems_of(text) == [(1, f"{key}.{name}", "unknown key", hint)]


def test_without_a_near_match_the_known_keys_are_listed() -> None:
    assert problems_of('{"models": {"qqq": {}}}') == [
        (1, "models.qqq", "unknown key", "use one of large, small")
    ]


def test_field_names_ignore_case_and_map_keys_do_not() -> None:
    text = '{"PROVIDERS": {"Demo": {"Base_URL": "u", "API_Key": "k"}}, "Env": {"Path": "p"}}'
    assert check_text(text, ProjectFile, "f") == CheckedDocument(
        {"providers": {"Demo": {"base_url": "u", "api_key": "k"}}, "env": {"Path": "p"}}
    )


def test_server_settings_are_allowed_only_in_the_user_file() -> None:
    text = '{"linger_s": 1}'
    assert check_text(text, UserFile, "f") == CheckedDocument({"linger_s": 1})
    assert [message for _, _, message, _ in problems_of(text, ProjectFile)] == ["unknown key"]


def test_the_last_of_duplicate_keys_is_used() -> None:
    text = '{"queue_max": 0,\n "queue_max": 5,\n "Queue_Max": 6}'
    assert check_text(text, UserFile, "f").document == {"queue_max": 6}


def test_a_free_form_value_is_kept_unchanged() -> None:
    body: Json = {"a": [1, None, {"b": 1.5}], "Ünïcode": "$X", "big": 10**18}
    text = json.dumps({"providers": {"p": {"extra_body": body}}})
    assert check_text(text, ProjectFile, "f") == CheckedDocument(
        {"providers": {"p": {"extra_body": body}}}
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "not valid JSON: "),
        ("{\n  // only\n", 3, "not valid JSON: "),
        ('{\n"a": tru\n}', 2, "not valid JSON: "),
        ("[]", 1, "expected a JSON object"),
        ("null", 1, "expected a JSON object"),
        ('"text"', 1, "expected a JSON object"),
        ("[" * 100_000, 1, "not valid JSON: "),
        ('{"a":' * 50_000, 1, "not valid JSON: "),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_text_without_a_json_object_gives_an_empty_document(
    text: str, line: int, message: str
) -> None:
    checked = check_text(text, UserFile, "f")
    (problem,) = checked.problems
    assert (checked.document, checked.is_json) == ({}, False)
    assert (problem.line, problem.key) == (line, "")
    assert problem.text.startswith(message)
    assert problem.hint == (NOT_JSON if message.startswith("not") else "")


def test_a_file_full_of_problems_lists_the_first_ones() -> None:
    lines = [f'  "x{n}": 1,' for n in range(15_000)]
    text = "\n".join(["{", *lines, '  "queue_max": 3', "}"])
    assert 200 << 10 < len(text) <= 256 << 10
    checked = check_text(text, UserFile, "f")  # Pytest's timeout is the bound.
    assert checked.document == {"queue_max": 3}
    *first, last = checked.problems
    assert [problem.line for problem in first] == list(range(2, 2 + PROBLEMS_MAX))
    assert last.text == f"and {15_000 - PROBLEMS_MAX} more problems"


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (ConfigProblem("f", 3, "a.b", "unknown key", "h"), "f:3: a.b: unknown key"),
        (ConfigProblem("f", 3, "", "not valid JSON"), "f:3: not valid JSON"),
        (ConfigProblem("f", 0, "", "cannot be read"), "f: cannot be read"),
    ],
)
def test_a_problem_is_formatted_like_a_compiler_message(
    problem: ConfigProblem, sentence: str
) -> None:
    assert str(problem) == sentence


# --- entries that are used as a whole or not at all


@pytest.mark.parametrize(
    ("rule", "key", "message", "hint"),
    [
        ({"decision": "Deny"}, ".decision", "expected one of allow, ask, deny, got 'Deny'", ""),
        ({"decision": 1}, ".decision", "expected one of allow, ask, deny, got a number", ""),
        ({"tool": "bash"}, "", "decision is missing", ""),
        ({"decision": None}, "", "decision is missing", ""),
        ({"decision": "allow", "comand": "ls"}, ".comand", "unknown key", "command"),
        ({"decision": "ask", "path": ["a"]}, ".path", "expected a string, got a list", ""),
        ({"decision": "ask", "path": "a" * 1001}, ".path", "expected `str` of length <= 1000", ""),
        ("deny", "", "expected an object, got a string", ""),
        (None, "", "expected an object, got null", ""),
    ],
)
def test_an_invalid_rule_is_reported_and_dropped_entirely(
    rule: Json, key: str, message: str, hint: str
) -> None:
    good: Json = {"decision": "deny", "command": "rm *"}
    text = json.dumps({"permission_rules": [good, rule]})
    expected_hint = f"did you mean {hint!r}?" if hint else ""
    problem = ConfigProblem("f", 1, f"permission_rules[1]{key}", message, expected_hint)
    assert check_text(text, ProjectFile, "f") == CheckedDocument(
        {"permission_rules": [good]}, (problem,)
    )


@pytest.mark.parametrize(
    ("hook", "key", "message"),
    [
        ({"command": "a", "matcher": "("}, ".matcher", "invalid regular expression: "),
        ({"command": "a", "matcher": "a{99999999999}"}, ".matcher", "invalid regular "),
        ({"command": "a", "timeout": -1}, ".timeout", "expected `int` >= 0"),
        ({"command": ""}, ".command", "expected `str` of length >= 1"),
        ({"matcher": "bash"}, "", "command is missing"),
    ],
)
def test_an_invalid_hook_is_reported_and_dropped_entirely(
    hook: Json, key: str, message: str
) -> None:
    text = json.dumps({"hooks": {"PreToolUse": [hook, {"command": "b", "matcher": "^b"}]}})
    checked = check_text(text, ProjectFile, "f")
    (problem,) = checked.problems
    assert checked.document == {"hooks": {"PreToolUse": [{"command": "b", "matcher": "^b"}]}}
    assert problem.key == f"hooks.PreToolUse[0]{key}"
    assert problem.text.startswith(message)


@pytest.mark.parametrize(
    ("name", "tool", "key", "message"),
    [
        ("Bad", {}, "", "invalid name"),
        ("a-b", {}, "", "invalid name"),
        ("a" * 65, {}, "", "invalid name"),
        ("t", {"command": 5}, ".command", "expected a string or a list of strings, got a number"),
        ("t", {"command": ["a", 5]}, ".command", "expected a string or a list of strings, got a "),
        ("t", {"crash": "maybe"}, ".crash", "expected one of again, ask, never, got 'maybe'"),
        ("t", {"timeout_s": 0}, ".timeout_s", "expected `float` > 0.0"),
        ("t", {"description": None}, "", "description is missing"),
        ("t", {"parameters": []}, ".parameters", "expected an object, got a list"),
    ],
)
def test_an_invalid_tool_is_reported_and_dropped(
    name: str, tool: dict[str, Json], key: str, message: str
) -> None:
    good: Json = {"command": ["./a", "b"], "description": "d", "parameters": {"type": "object"}}
    text = json.dumps({"own_tools": {"good": good, name: {**good, **tool}}})
    checked = check_text(text, ProjectFile, "f")
    (problem,) = checked.problems
    assert checked.document == {"own_tools": {"good": good}}
    assert problem.key == f"own_tools.{name}{key}"
    assert problem.text.startswith(message)


def test_too_many_rules_hooks_or_tools_are_all_dropped() -> None:
    rules = [{"decision": "deny"}] * (RULES_MAX + 1)
    hooks = [{"command": f"{n}"} for n in range(HOOKS_MAX + 1)]
    tools = {f"t{n}": {"command": "a", "description": "d"} for n in range(OWN_TOOLS_MAX + 1)}
    text = json.dumps({"permission_rules": rules, "hooks": {"x": hooks}, "own_tools": tools})
    assert [(key, message) for _, key, message, _ in problems_of(text)] == [
        ("permission_rules", f"it may have at most {RULES_MAX} entries"),
        ("hooks.x", f"it may have at most {HOOKS_MAX} entries"),
        ("own_tools", f"it may have at most {OWN_TOOLS_MAX} entries"),
    ]


# --- any text, any value

FIELDS = [
    *("permission_rules", "own_tools", "PreToolUse", "decision", "matcher", "crash", "tool"),
    *("models", "fallbacks", "providers", "options", "permissions", "mcp", "lsp", "hooks", "env"),
    *("large", "small", "tui", "debug", "command", "args", "base_url", "queue_max", "linger_s"),
    *("max_tokens", "temperature", "context_paths", "OPTIONS", "$schema", "", "a.b", "x"),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.text() | st.text(st.sampled_from('{}[]:,"/*\\ntrue0.eE-\n \ufeff')))
@example("{" * 2000)
@example('{"a": "\ud800"}')
def test_the_check_never_raises(text: str) -> None:
    checked = check_text(text, UserFile, "f")
    assert checked.is_json or (checked.document == {} and len(checked.problems) == 1)


@given(VALUES)
@example({"models": {"large": {"max_tokens": 10**30, "temperature": 10**400}}})
def test_a_checked_document_is_valid_and_passes_again(value: Json) -> None:
    checked = check_text(json.dumps(value), UserFile, "f")
    if not isinstance(value, dict):
        assert not checked.is_json
        return
    fit(cast("Json", checked.document), UserFile)
    assert check_text(json.dumps(checked.document), UserFile, "f") == CheckedDocument(
        checked.document
    )
    assert all(problem.line == 1 for problem in checked.problems)


@given(VALUES)
def test_every_string_of_a_document_is_found_by_its_path(value: Json) -> None:
    for path, text in strings_in(value):
        inner = value
        for step in path:
            inner = inner[step]
        assert inner == text
        assert key_of(path).count("[") >= sum(isinstance(step, int) for step in path)
    assert [text for _, text in strings_in(value)] == _strings(value)


def _strings(value: Json) -> list[str]:
    if isinstance(value, dict):
        value = list(cast("dict[str, Json]", value).values())
    if isinstance(value, list):
        return [text for item in cast("list[Json]", value) for text in _strings(item)]
    return [value] if isinstance(value, str) else []
