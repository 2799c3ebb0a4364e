import pytest

from culm.cli.prompt_options import approve_of, parse_rule, rule_for
from culm.errors import InvalidRequest
from culm.tools.registry import SPECS
from culm.wire.asks import PATTERN_CHARS_MAX, RULES_MAX, CallerApprove, CallerRule

RULES = {
    "edit": CallerRule("allow", tool="edit"),
    "mcp_*": CallerRule("allow", tool="mcp_*"),
    "bash:git status *": CallerRule("allow", tool="bash", match="git status *"),
    "bash: make a:b": CallerRule("allow", tool="bash", match="make a:b"),
    "write:docs/**": CallerRule("allow", tool="write", match="docs/**"),
    "*:src/**": CallerRule("allow", tool="*", match="src/**"),
}


@pytest.mark.parametrize("text", RULES)
def test_rule_is_a_tool_with_an_optional_pattern(text: str) -> None:
    assert parse_rule(text, "allow") == RULES[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a rule") for text in ("", ":", ":x", "bash:", "edit: ")),
        ("x" * PATTERN_CHARS_MAX + "y", "at most"),
    ],
)
def test_text_that_is_not_a_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_rule(text, "deny")
    assert message in refused.value.message


ALLOW, DENY = CallerRule("allow", tool="edit"), CallerRule("deny", tool="bash", match="rm *")


@pytest.mark.parametrize(
    ("options", "deny", "approve"),
    [
        ([], [], None),
        (["ask"], [], None),
        (["auto"], [], "allow"),
        (["deny"], [], "deny"),
        (["deny"], ["bash:rm *"], "deny"),
        (["edit"], ["bash:rm *"], (ALLOW, DENY)),
        (["ask", "edit"], ["bash:rm *"], (ALLOW, DENY)),
        (["edit", "auto"], [], "allow"),
        (["deny", "auto"], ["bash:rm *"], (DENY, CallerRule("allow"))),
    ],
)
def test_approve_and_deny_options_become_rules_of_the_prompt(
    options: list[str], deny: list[str], approve: CallerApprove | None
) -> None:
    assert approve_of(options, deny) == approve


@pytest.mark.parametrize("options", [["deny", "edit"], ["edit"] * RULES_MAX, ["allow"]])
def test_contradictory_or_too_many_options_are_refused(options: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        approve_of(options, [])


@pytest.mark.parametrize(
    ("tool", "given", "rule"),
    [
        ("bash", '{"command":"make test"}', "'bash:make test'"),
        ("bash", '{"command":"make"}', "bash:make"),
        ("bash", '{"command":"make; rm x"}', "'bash:COMMAND' for each of its commands"),
        ("edit", '{"file_path":"src/a.py"}', "edit:src/a.py"),
        ("write", '{"file_path":"it\'s [new]"}', "write"),
        ("fetch", '{"url":"http://a.b"}', "fetch"),
        ("edit", "{", "edit"),
        ("edit", "[1]", "edit"),
    ],
)
def test_hint_names_the_rule_that_allows_the_call(tool: str, given: str, rule: str) -> None:
    facts = next(spec.facts for spec in SPECS if spec.name == tool)
    assert rule_for(tool, given, facts) == rule
