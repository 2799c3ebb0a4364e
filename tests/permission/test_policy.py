"""The permission policy: refusals, approvals and asks, and the scope of rules."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from culm.errors import InvalidRequest
from culm.permission.policy import (
    Allow,
    AskPerson,
    PolicyInput,
    Refuse,
    command_matches,
    decide,
    path_matches,
    resolve_approve,
)
from culm.tools.base import ResolvedAction
from culm.wire.asks import (
    PATTERN_CHARS_MAX,
    RULES_MAX,
    Rule,
    parse_approve,
    parse_caller_approve,
    parse_rules,
)
from culm.wire.codec import Json
from culm.wire.tools import ToolFacts
from tests.support import contract

INPUT = PolicyInput("/project", "/home/me")
EDIT = ResolvedAction("edit", "write", paths=("/project/src/a.py",), coverage=("write:/project",))
LOOK = ResolvedAction("view", "read", paths=("/project/src/a.py",), is_free=True)
NOTHING = AskPerson()
BY_RULE = Allow("rule")


def shell(*commands: str) -> ResolvedAction:
    coverage = tuple(f"bash:{one}" for one in commands)
    params: Json = {"command": "; ".join(commands)}
    return ResolvedAction("bash", "execute", params=params, commands=commands, coverage=coverage)


def unresolved(text: str) -> ResolvedAction:
    """A command that cannot be resolved."""
    return ResolvedAction("bash", "execute", params={"command": text}, commands=None)


def by(*rules: Rule) -> PolicyInput:
    return replace(INPUT, rules=rules)


def denied(rule: str) -> Refuse:
    return Refuse("rule", f"a rule denies it: deny {rule}")


def asked(rule: str) -> AskPerson:
    return AskPerson(f"a rule requires approval: ask {rule}")


# --- the order


DENY, ASK, ALLOW = (Rule(one, tool="edit") for one in ("deny", "ask", "allow"))
GRANTED = frozenset(EDIT.coverage)
EVERYTHING = replace(
    by(ALLOW), allowed_tools=("edit",), skip=True, hook="allow", granted=GRANTED, approve="allow"
)


@pytest.mark.parametrize(
    ("policy_input", "verdict"),
    [
        (INPUT, NOTHING),
        (by(ALLOW, ASK, DENY), denied("tool edit")),
        (replace(EVERYTHING, rules=(DENY,)), denied("tool edit")),
        (by(ALLOW, ASK), asked("tool edit")),
        (by(ALLOW), BY_RULE),
        (replace(INPUT, skip=True), Allow("skip")),
        (replace(by(ASK), skip=True), Allow("skip")),
        (replace(INPUT, allowed_tools=("edit",)), Allow("allowed_tools")),
        (replace(INPUT, allowed_tools=("edit:write",)), Allow("allowed_tools")),
        (replace(by(ASK), allowed_tools=("edit",)), asked("tool edit")),
        (replace(by(ASK), hook="allow"), Allow("hook")),
        (replace(by(ASK), granted=GRANTED), Allow("grant")),
        (replace(INPUT, granted=GRANTED, hook="allow"), Allow("hook")),
        (replace(by(ALLOW), hook="allow", granted=GRANTED), BY_RULE),
        (replace(INPUT, granted={"write:/other"}), NOTHING),
        (replace(INPUT, approve="ask"), NOTHING),
        (replace(by(ASK), approve="allow"), Allow("approve")),
        (replace(INPUT, approve=(ALLOW,)), Allow("approve")),
        (replace(INPUT, approve=(ALLOW, ASK)), NOTHING),
        (replace(INPUT, approve=(Rule("allow", tool="write"),)), NOTHING),
        (replace(INPUT, approve=()), NOTHING),
        (
            replace(INPUT, approve="deny"),
            Refuse("approve", "the caller of this run denies calls that need approval"),
        ),
        (
            replace(INPUT, approve=(ALLOW, DENY)),
            Refuse("approve", "the caller of this run denies it: deny tool edit"),
        ),
        (replace(INPUT, approve="deny", granted=GRANTED), Allow("grant")),
    ],
)
def test_first_matching_decision_in_order_wins(
    policy_input: PolicyInput, verdict: Allow | Refuse | AskPerson
) -> None:
    assert decide(EDIT, policy_input) == verdict


def test_harmless_call_is_asked_about_only_by_rule() -> None:
    assert decide(LOOK, INPUT) == Allow("free")
    assert decide(LOOK, replace(INPUT, approve="deny")) == Allow("free")
    assert decide(LOOK, by(Rule("ask", path="src/**"))) == asked("path src/**")
    assert decide(LOOK, by(Rule("deny", path="src/**"))) == denied("path src/**")


def test_denial_by_the_caller_overrides_everything() -> None:
    deny = Rule("deny", path="src/**")
    refused = Refuse("approve", "the caller of this run denies it: deny path src/**")
    assert decide(LOOK, replace(INPUT, approve=(deny,))) == refused
    assert decide(LOOK, replace(INPUT, approve=(deny,), skip=True, hook="allow")) == refused


@pytest.mark.parametrize("path", ["/project/src/a.py", "/other/src/a.py", "/copy/src/a.py"])
def test_deny_and_ask_rules_apply_in_copies_and_allow_rules_do_not(
    path: str,
) -> None:
    policy_input = replace(INPUT, also_from=("/other", "/copy"))
    edit = replace(EDIT, paths=(path,))
    for glob in ("src/**", "./src/a.py", "**/a.py", "../*/src/**"):
        deny, ask, allow = (Rule(one, path=glob) for one in ("deny", "ask", "allow"))
        all_of = replace(policy_input, skip=True, rules=(deny, allow))
        assert decide(edit, all_of) == denied(f"path {glob}")
        assert decide(edit, replace(policy_input, rules=(ask, allow))) == asked(f"path {glob}")
        reason = f"the caller of this run denies it: deny path {glob}"
        assert decide(edit, replace(policy_input, approve=(deny, allow))) == Refuse(
            "approve", reason
        )
        is_first = path.startswith(INPUT.workspace) or glob.startswith("..")
        assert decide(edit, replace(policy_input, rules=(allow,))) == (
            BY_RULE if is_first else NOTHING
        )


def test_absolute_path_rule_does_not_apply_to_copies() -> None:
    policy_input = replace(by(Rule("deny", path="/other/src/**")), also_from=("/other",))
    assert decide(EDIT, policy_input) == NOTHING


def test_reason_of_an_action_is_kept_unless_a_rule_asks() -> None:
    action = replace(EDIT, why="it is outside the workspace")
    assert decide(action, INPUT) == AskPerson("it is outside the workspace")
    assert decide(action, by(Rule("ask"))) == asked("everything")


def test_grant_must_cover_every_part_of_an_action() -> None:
    both = shell("git log", "git show")
    assert decide(both, replace(INPUT, granted={"bash:git log", "bash:git show"})) == Allow("grant")
    assert decide(both, replace(INPUT, granted={"bash:git log"})) == NOTHING
    assert decide(replace(both, coverage=()), replace(INPUT, granted={""})) == NOTHING


@contract("INV-74")
@pytest.mark.parametrize(
    "entry",
    ["*", "ed*", "Edit", "EDIT", "edit:", ":write", "edit:*", "edit:read", "edit ", "edit,view"],
)
def test_allowed_tools_entry_must_match_exactly(
    entry: str,
) -> None:
    assert decide(EDIT, replace(INPUT, allowed_tools=(entry,))) == NOTHING


# --- tools and actions


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (Rule("allow"), True),
        (Rule("allow", tool="e?it"), True),
        (Rule("allow", tool="*dit", action="wr*"), True),
        (Rule("allow", tool="[de]dit"), True),
        (Rule("allow", tool="Edit"), False),
        (Rule("allow", tool="edit", action="read"), False),
        (Rule("allow", tool=""), False),
        (Rule("allow", tool="edit", command="*"), False),  # It runs no command.
    ],
)
def test_rule_applies_to_tools_and_actions_its_globs_match(rule: Rule, *, matches: bool) -> None:
    assert (decide(EDIT, by(rule)) == BY_RULE) is matches


# --- paths


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("src/a.py", "/project/src/a.py", True),
        ("./src/*.py", "/project/src/a.py", True),
        ("src/*", "/project/src/in/a.py", False),
        ("src/**", "/project/src/in/a.py", True),
        ("src/**", "/project/src/.hidden", True),
        ("src/**", "/project/src", True),
        ("src/**", "/project/srcs", False),
        ("**", "/project/any/where", True),
        ("**", "/project", True),
        ("**", "/workshop/a", False),
        ("**", "/elsewhere", False),
        ("**/.env", "/project/.env", True),
        ("**/.env", "/project/a/b/.env", True),
        ("**/.env", "/project/.env/x", False),
        ("**/.env", "/other/.env", False),
        ("*.{pem,key}", "/project/a.key", True),
        ("../lib/**", "/lib/a", True),
        ("../../../etc/*", "/etc/passwd", True),
        (".", "/project", True),
        (".", "/project/a", False),
        ("/etc/**", "/etc/passwd", True),
        ("/**", "/", True),
        ("/**/*.py", "/project/src/a.py", True),
        ("/project", "/project/a", False),
        ("~/.ssh/**", "/home/me/.ssh/id", True),
        ("~/**", "/home/me", True),
        ("~", "/home/me", True),
        ("~other/**", "/home/me/a", False),
        ("~other/**", "/project/~other/a", True),
        ("a[1]", "/project/a1", True),
        (r"a\*b", "/project/a*b", True),
        (r"a\*b", "/project/axb", False),
        ("a/../src/**", "/project/src/a", False),
    ],
)
def test_path_glob_is_relative_to_workspace_root_or_home(
    glob: str, path: str, *, matches: bool
) -> None:
    for bad in (True, False):
        assert path_matches(glob, path, INPUT, bad=bad) is matches


def test_one_path_suffices_to_restrict_and_all_must_match_to_allow() -> None:
    two = replace(EDIT, paths=("/project/src/a.py", "/project/secrets/key"))
    assert decide(two, by(Rule("deny", path="secrets/**"))) == denied("path secrets/**")
    assert decide(two, by(Rule("ask", path="secrets/**"))) == asked("path secrets/**")
    assert decide(two, by(Rule("allow", path="src/**"))) == NOTHING
    assert decide(two, by(Rule("allow", path="{src,secrets}/**"))) == BY_RULE


def test_path_rule_does_not_apply_to_an_action_without_paths() -> None:
    for rule in (Rule("allow", path="**"), Rule("deny", path="**")):
        assert decide(replace(EDIT, paths=()), by(rule)) == NOTHING


def test_invalid_glob_denies_everywhere_and_allows_nowhere() -> None:
    bad = "{a,b}" * 10
    assert isinstance(decide(EDIT, by(Rule("deny", path=bad))), Refuse)
    assert decide(EDIT, by(Rule("allow", path=bad))) == NOTHING


# --- commands


@pytest.mark.parametrize(
    ("pattern", "command", "matches"),
    [
        ("npm test", "npm test", True),
        ("npm test", "npm test --watch", False),
        ("npm test", "npm", False),
        ("npm  test", "npm test", True),
        ("git push *", "git push", True),
        ("git push *", "git push --force origin", True),
        ("git push *", "git pushy", False),
        ("git * push *", "git -C x push", True),
        ("git * --force", "git push origin --force", True),
        ("git * --force", "git push origin --force now", False),
        ("npm run test:*", "npm run test:unit", True),
        ("npm run test:*", "npm run test:unit x", False),
        ("*", "", True),
        ("*", "anything at all", True),
        ("rm", "RM", False),
        ("rm *", "/bin/rm -r x", False),
        ("./run *", "./run x", True),
        ("* * b * *", "a b", True),
        ("a?", "ab", True),
    ],
)
def test_pattern_matches_a_command_word_by_word(
    pattern: str, command: str, *, matches: bool
) -> None:
    assert command_matches(pattern, command) is matches


def test_program_given_by_path_is_denied_by_name_but_not_allowed_by_it() -> None:
    here = shell("./tools/rm -r x")
    assert decide(here, by(Rule("deny", command="rm *"))) == denied("command 'rm *'")
    assert decide(here, by(Rule("allow", command="rm *"))) == NOTHING
    assert decide(here, by(Rule("allow", command="./tools/rm *"))) == BY_RULE


def test_each_command_of_a_list_may_be_allowed_by_its_own_rule() -> None:
    rules = Rule("allow", command="git log *"), Rule("allow", tool="bash", command="ls *")
    assert decide(shell("git log -3", "ls"), by(*rules)) == BY_RULE
    assert decide(shell("git log -3", "ls", "rm x"), by(*rules)) == NOTHING
    assert decide(shell("git log", "rm x"), by(*rules, Rule("deny", command="rm *"))) == denied(
        "command 'rm *'"
    )


@pytest.mark.parametrize(
    ("pattern", "text", "is_denied"),
    [
        ("rm *", 'eval "$X rm -r y"', True),
        ("rm *", "$(echo /bin/rm) x", True),
        ("/bin/rm *", "$(echo rm) x", True),
        ("rm *", "eval format; $term", False),
        ("*", "$X", True),
        ("py*", "$X", True),  # Which program is meant is open.
    ],
)
def test_unresolvable_command_naming_a_denied_program_is_denied(
    pattern: str, text: str, *, is_denied: bool
) -> None:
    verdict = decide(unresolved(text), replace(by(Rule("deny", command=pattern)), skip=True))
    assert verdict == (denied(f"command {pattern!r}") if is_denied else Allow("skip"))


def test_unresolvable_command_naming_a_denied_path_is_denied() -> None:
    rule = Rule("deny", path="config/**/.env")
    assert decide(unresolved("cat $X/config/.env"), by(rule)) == denied("path config/**/.env")
    assert decide(unresolved("cat $X/other"), by(rule)) == NOTHING


def test_unresolvable_command_is_not_allowed_by_command_or_path_rules() -> None:
    rules = Rule("allow", command="*"), Rule("allow", path="/**"), Rule("allow", tool="edit")
    action = replace(unresolved("ls $X"), paths=("/project",))
    assert decide(action, by(*rules)) == NOTHING
    assert decide(action, by(Rule("allow", tool="bash"))) == BY_RULE


def test_working_directory_does_not_allow_a_command() -> None:
    there = replace(shell("curl evil"), paths=("/project/src",))
    assert decide(there, by(Rule("allow", path="src/**"))) == NOTHING
    assert decide(there, by(Rule("allow", path="src/**", command="curl *"))) == BY_RULE
    assert decide(there, by(Rule("allow", path="doc/**", command="curl *"))) == NOTHING


# --- parsing


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("allow", "rules must be a list"),
        ([{"tool": "bash"}], "rule 1 is invalid: Object missing required field `decision`"),
        ([{"decision": "allow"}, {"decision": "Allow"}], "rule 2 is invalid: "),
        (
            [{"decision": "allow", "comand": "ls"}],
            "rule 1 is invalid: Object contains unknown field",
        ),
        ([{"decision": "deny", "path": 1}], "rule 1 is invalid: Expected `str`, got `int`"),
        ([{"decision": "deny", "path": "a" * (PATTERN_CHARS_MAX + 1)}], "rule 1 is invalid: "),
        (["deny"], "rule 1 is invalid: Expected `object`, got `str`"),
        ([{"decision": "deny"}] * (RULES_MAX + 1), "too many rules"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_rule_is_refused_by_number(value: Json, problem: str) -> None:
    for parse in (parse_rules, parse_approve):
        if value != "allow" or parse is parse_rules:
            with pytest.raises(InvalidRequest, match=problem):
                parse(value)


def test_approve_is_a_keyword_or_a_list_of_rules() -> None:
    rules: Json = [{"decision": "allow", "tool": "edit", "path": None}]
    assert parse_approve(rules) == parse_rules(rules) == (Rule("allow", tool="edit"),)
    keywords: list[Json] = ["ask", "allow", "deny", "", None, []]
    assert [parse_approve(one) for one in keywords] == ["ask", "allow", "deny", None, None, ()]
    others: list[Json] = ["yes", 1, {}, True]
    for wrong in others:
        with pytest.raises(InvalidRequest, match="approve must be"):
            parse_approve(wrong)


FACTS = {
    "bash": ToolFacts(command_argument="command", path_arguments=("cwd",)),
    "edit": ToolFacts(path_arguments=("file_path",)),
    "fetch": ToolFacts(shown_arguments=("url",)),
}


def facts_of(tool: str) -> ToolFacts:
    return FACTS.get(tool, ToolFacts())


@pytest.mark.parametrize(
    ("tool", "resolved"),
    [
        ("bash", Rule("deny", "bash", command="a *")),
        ("edit", Rule("deny", "edit", path="a *")),
        ("*", Rule("deny", "*", path="a *")),
        ("fe?ch", Rule("deny", "fe?ch", path="a *")),
    ],
)
def test_match_is_for_the_command_of_a_tool_or_else_for_its_paths(
    tool: str, resolved: Rule
) -> None:
    sent = parse_caller_approve([{"decision": "deny", "tool": tool, "match": "a *"}])
    assert resolve_approve(sent, facts_of) == (resolved,)


def test_rule_without_match_is_unchanged_and_keywords_are_kept() -> None:
    rule = {"decision": "ask", "tool": "fetch", "action": "f*", "path": "a", "command": "b"}
    sent = parse_caller_approve([rule])
    assert resolve_approve(sent, facts_of) == (Rule("ask", "fetch", "f*", "a", "b"),)
    assert [resolve_approve(one, facts_of) for one in (None, "allow")] == [None, "allow"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        # It would never match, and a deny rule would silently do nothing.
        ({"tool": "fetch", "match": "a.b"}, "fetch has no command and no path to match"),
        ({"tool": "no_tool", "match": "a.b"}, "no_tool has no command and no path to match"),
        ({"tool": "edit", "match": "a", "path": "b"}, "a rule with match cannot have a path"),
    ],
)
def test_match_that_has_no_meaning_is_refused(rule: dict[str, Json], problem: str) -> None:
    sent = parse_caller_approve([{"decision": "deny", **rule}])
    with pytest.raises(InvalidRequest, match=problem):
        resolve_approve(sent, facts_of)


def test_match_is_not_allowed_in_configured_rules() -> None:
    with pytest.raises(InvalidRequest, match="unknown field `match`"):
        parse_rules([{"decision": "deny", "tool": "edit", "match": "a"}])


# --- properties of all rules

NAMES = st.sampled_from(["*", "bash", "edit", "view", "b*", "exec*", "write", ""])
PATHS = ["", "**", "src/**", "/project/src/a.py", "/etc/**", "~/**", "*.py", "{a,b}" * 10]
COMMANDS = ["", "*", "git *", "git push", "rm *", "* x", "npm test"]
DECISIONS = st.sampled_from(["allow", "ask", "deny"])
RULES = st.builds(Rule, DECISIONS, NAMES, NAMES, st.sampled_from(PATHS), st.sampled_from(COMMANDS))
REAL_PATHS = st.lists(
    st.sampled_from(["/project/src/a.py", "/project/b.py", "/etc/passwd", "/project"])
)
LINES = ["git push", "git log", "rm x", "/bin/rm x", "npm test", "echo"]
ACTIONS = st.builds(
    ResolvedAction,
    tool=st.sampled_from(["bash", "edit", "view"]),
    name=st.sampled_from(["execute", "write", "read"]),
    params=st.sampled_from([None, {"command": "eval rm git"}]),
    is_free=st.booleans(),
    paths=REAL_PATHS.map(tuple[str, ...]),
    commands=st.none() | st.lists(st.sampled_from(LINES), max_size=3).map(tuple[str, ...]),
    coverage=st.lists(st.sampled_from(["a", "b"])).map(tuple[str, ...]),
)
SEVERAL = st.lists(RULES, max_size=4).map(tuple[Rule, ...])
ALL_INPUTS = st.builds(
    PolicyInput,
    st.just("/project"),
    st.just("/home/me"),
    rules=SEVERAL,
    allowed_tools=st.lists(st.sampled_from(["bash", "edit:write", "view", "*"])),
    skip=st.booleans(),
    hook=st.sampled_from(["allow", "none"]),
    granted=st.lists(st.sampled_from(["a", "b"])),
    approve=st.none() | st.sampled_from(["ask", "allow", "deny"]) | SEVERAL,
)


def width(action: ResolvedAction, policy_input: PolicyInput) -> Literal[0, 1, 2]:
    match decide(action, policy_input):
        case Refuse():
            return 0
        case AskPerson():
            return 1
        case Allow():
            return 2


@given(ACTIONS, ALL_INPUTS)
def test_denial_by_rule_is_never_overridden(
    action: ResolvedAction, policy_input: PolicyInput
) -> None:
    alone = PolicyInput(policy_input.workspace, policy_input.home, policy_input.rules)
    if isinstance(verdict := decide(action, alone), Refuse):
        assert decide(action, policy_input) == verdict
    assert policy_input.skip is False or width(action, policy_input) in (0, 2)


@given(ACTIONS, ALL_INPUTS, RULES, st.integers(0, 4))
def test_restricting_rule_never_widens_and_allow_rule_never_narrows(
    action: ResolvedAction, policy_input: PolicyInput, rule: Rule, at: int
) -> None:
    more = replace(policy_input, rules=(*policy_input.rules[:at], rule, *policy_input.rules[at:]))
    if rule.decision == "allow":
        assert width(action, more) >= width(action, policy_input)
    else:
        assert width(action, more) <= width(action, policy_input)


@given(ACTIONS, ALL_INPUTS)
def test_rule_order_does_not_matter(action: ResolvedAction, policy_input: PolicyInput) -> None:
    assert width(action, replace(policy_input, rules=policy_input.rules[::-1])) == width(
        action, policy_input
    )


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=4), SEVERAL)
def test_command_list_is_allowed_only_if_each_command_is(
    commands: list[str], rules: tuple[Rule, ...]
) -> None:
    allowed = decide(shell(*commands), by(*rules)) == BY_RULE
    assert allowed == all(decide(shell(one), by(*rules)) == BY_RULE for one in commands)


@contract("INV-74")
@given(st.text(max_size=12) | st.sampled_from(["bash", "bash:execute"]))
def test_only_exact_allowed_tools_entries_allow(entry: str) -> None:
    allowed = decide(shell("ls"), replace(INPUT, allowed_tools=(entry,)))
    assert (allowed == Allow("allowed_tools")) is (entry in ("bash", "bash:execute"))
