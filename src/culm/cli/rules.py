"""Permission rules of the command line: `--approve` and `--deny`. Pure.

A rule is a tool, or a tool with the command or files it works on, such as `edit`, `edit:src/**` or
`bash:git push *`. The server knows what the pattern of a tool means and which calls it matches.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from culm.errors import InvalidRequest
from culm.wire.asks import PATTERN_CHARS_MAX, RULES_MAX, CallerApprove, CallerRule, Decision
from culm.wire.codec import Json
from culm.wire.tools import ToolFacts

_PLAIN = re.compile(r"[\w./=:,@%+ -]{1,200}")  # Neither quotes nor operators nor patterns.
SPELLING = "TOOL, bash:COMMAND or TOOL:PATHS, as in edit, 'bash:git push *', 'write:docs/**'"


def parse_rule(text: str, decision: Decision) -> CallerRule:
    """Parse one rule; raises `InvalidRequest`."""
    tool, colon, pattern = (piece.strip() for piece in text.partition(":"))
    if not tool or (colon and not pattern):
        raise InvalidRequest(f"{text!r} is not a rule", hint=f"use {SPELLING}")
    if len(text) > PATTERN_CHARS_MAX:
        raise InvalidRequest(f"a rule may have at most {PATTERN_CHARS_MAX} characters")
    return CallerRule(decision, tool=tool, match=pattern)


MODES = ("ask", "auto", "deny")


def approve_of(approve: Sequence[str], deny: Sequence[str]) -> CallerApprove | None:
    """The approval policy to send with the prompt; raises `InvalidRequest`.

    `approve` has modes and rules that allow; the last mode applies to calls that match no rule.
    """
    modes = [text for text in approve if text in MODES]
    allow = [text for text in approve if text not in MODES]
    if "allow" in allow:
        raise InvalidRequest("allow is not a tool", hint="use --approve auto to allow everything")
    rules = (
        *(parse_rule(text, "allow") for text in allow),
        *(parse_rule(text, "deny") for text in deny),
    )
    if len(rules) >= RULES_MAX:
        raise InvalidRequest(f"too many rules: at most {RULES_MAX - 1}")
    match modes[-1] if modes else "ask":
        case "deny" if allow:
            hint = "leave it out: without a terminal, calls that no rule allows are refused anyway"
            raise InvalidRequest("--approve deny denies what the rules allow", hint=hint)
        case "deny":
            return "deny"
        case "auto" if deny:
            return (*rules, CallerRule("allow"))
        case "auto":
            return "allow"
        case _:
            return rules or None


def rule_for(tool: str, input_text: str, facts: ToolFacts) -> str:
    """The rule that would allow a call, quoted for a shell."""
    pattern = arguments_of(input_text).get(next(iter(facts.subject), ""))
    if isinstance(pattern, str) and _PLAIN.fullmatch(pattern):
        return shlex.quote(f"{tool}:{pattern}")
    # Each command of a longer text is judged separately, so no single pattern would allow it.
    if facts.command_argument:
        return f"'{tool}:COMMAND' for each of its commands"
    return shlex.quote(tool)


def arguments_of(input_text: str) -> Mapping[str, Json]:
    """The arguments of a tool call; empty if they are not an object."""
    try:
        value = msgspec.json.decode(input_text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Json]", value) if isinstance(value, dict) else {}
