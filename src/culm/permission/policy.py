"""The permission policy: allow a call, refuse it, or ask a person. Pure.

A hook that denies or halts has already ended the call. The order is: deny rules, skip mode, advance
permission (free actions, `allowed_tools`, allow rules), the approval of a hook, grants, and last
the approval setting of the run's caller. An ask rule cancels advance permission only. The choice of
the person to ask, and the case that nobody is available, belong to `gate.py`.

A restrictive rule (deny, ask) matches if any part of an action matches; an allow rule must cover
the whole action. If the commands of a shell line cannot be determined, restrictive rules match and
allow rules do not. If relative paths have several possible base directories, restrictive rules
apply to all of them, allow rules to the first.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from culm.errors import InvalidRequest
from culm.tools.base import ResolvedAction
from culm.tools.search.patterns import BadPattern, Glob, parse_glob
from culm.wire.asks import Approve, CallerApprove, CallerRule, Decision, Rule
from culm.wire.codec import strings_in
from culm.wire.tools import ToolFacts

GLOB_CACHE_SIZE = 2048  # Cached parsed globs; more than a few workspaces use.


class Allow(Struct, frozen=True):
    by: Literal["free", "skip", "allowed_tools", "rule", "hook", "grant", "approve"]


class Refuse(Struct, frozen=True):
    by: Literal["rule", "approve"]
    reason: str  # For the model and for readers of the transcript.


class AskPerson(Struct, frozen=True):
    why: str = ""  # Only if it is not obvious.


Verdict = Allow | Refuse | AskPerson


class PolicyInput(Struct, frozen=True):
    """The inputs of the decision about one call."""

    workspace: str  # Real and absolute; the base of globs without a leading `/` or `~/`.
    home: str  # Real and absolute; the base of `~/`.
    rules: Sequence[Rule] = ()
    # Further bases for the globs of deny and ask rules: an agent in a copy of a directory must not
    # do more in the original than an agent that works there.
    also_from: Sequence[str] = ()
    allowed_tools: Collection[str] = ()  # `tool` or `tool:action`, compared exactly.
    skip: bool = False
    hook: Literal["allow", "none"] = "none"  # For exactly this call.
    granted: Collection[str] = ()  # Granted coverage for this tool, action and session.
    approve: Approve | None = None  # The setting of the run's caller.


def decide(action: ResolvedAction, inputs: PolicyInput) -> Verdict:
    deny = _first("deny", inputs.rules, action, inputs)
    if deny is not None:
        return Refuse("rule", f"a rule denies it: {rule_text(deny)}")
    if inputs.approve is not None and not isinstance(inputs.approve, str):
        deny = _first("deny", inputs.approve, action, inputs)
        if deny is not None:
            return Refuse("approve", f"the caller of this run denies it: {rule_text(deny)}")
    if inputs.skip:
        return Allow("skip")
    ask = _first("ask", inputs.rules, action, inputs)
    if ask is None:
        if action.is_free:
            return Allow("free")
        if {action.tool, f"{action.tool}:{action.name}"} & set(inputs.allowed_tools):
            return Allow("allowed_tools")
        if _covered(inputs.rules, action, inputs):
            return Allow("rule")
    if inputs.hook == "allow":
        return Allow("hook")
    if action.coverage and all(item in inputs.granted for item in action.coverage):
        return Allow("grant")
    why = action.why if ask is None else f"a rule requires approval: {rule_text(ask)}"
    return _approved(action, inputs, why)


def _approved(action: ResolvedAction, inputs: PolicyInput, why: str) -> Verdict:
    """Apply the setting of the run's caller; the default is to ask."""
    match inputs.approve:
        case None | "ask":
            return AskPerson(why)
        case "allow":
            return Allow("approve")
        case "deny":
            return Refuse("approve", "the caller of this run denies calls that need approval")
        case rules:
            if _first("ask", rules, action, inputs) is None and _covered(rules, action, inputs):
                return Allow("approve")
            return AskPerson(why)


def resolve_approve(
    approve: CallerApprove | None, facts_of: Callable[[str], ToolFacts]
) -> Approve | None:
    """Replace the `match` of every rule by a pattern for commands or paths.

    Raises `InvalidRequest` for a tool that has neither: a deny rule would silently do nothing.
    """
    if approve is None or isinstance(approve, str):
        return approve
    return tuple(_resolve_match(rule, facts_of(rule.tool)) for rule in approve)


def _resolve_match(rule: CallerRule, facts: ToolFacts) -> Rule:
    path, command = rule.path, rule.command
    if rule.match and (path or command):
        raise InvalidRequest("a rule with match cannot have a path or a command, too")
    if rule.match and facts.command_argument:
        command = rule.match
    elif rule.match:
        if not facts.path_arguments and not set(rule.tool) & set("*?["):
            message = f"{rule.tool} has no command and no path to match"
            raise InvalidRequest(message, hint=f"use just {rule.tool}")
        path = rule.match
    return Rule(rule.decision, rule.tool, rule.action, path, command)


def rule_text(rule: Rule) -> str:
    """Format a rule so that a person can find it in the configuration."""
    named = (("tool", rule.tool), ("action", rule.action))
    parts = [f"{name} {pattern}" for name, pattern in named if pattern != "*"]
    parts += [f"path {rule.path}"] if rule.path else []
    parts += [f"command {rule.command!r}"] if rule.command else []
    return f"{rule.decision} {', '.join(parts) or 'everything'}"


# --- restrictive rules: one matching part is enough


def _first(
    decision: Decision, rules: Iterable[Rule], action: ResolvedAction, inputs: PolicyInput
) -> Rule | None:
    return next((r for r in rules if r.decision == decision and _touches(r, action, inputs)), None)


def _touches(rule: Rule, action: ResolvedAction, inputs: PolicyInput) -> bool:
    if not _applies_to(rule, action):
        return False
    if rule.path and not _touches_path(rule.path, action, inputs):
        return False
    if not rule.command:
        return True
    if action.commands is None and _mentions(action, _program(rule.command)):
        return True
    known = (*(action.commands or ()), *action.seen)
    return any(command_matches(rule.command, one, by_name=True) for one in known)


def _touches_path(glob: str, action: ResolvedAction, inputs: PolicyInput) -> bool:
    for base in (inputs.workspace, *inputs.also_from):
        based = replace(inputs, workspace=base)
        if any(path_matches(glob, path, based, bad=True) for path in action.paths):
            return True
    return action.commands is None and _mentions(action, _literal(glob))


def _applies_to(rule: Rule, action: ResolvedAction) -> bool:
    return fnmatchcase(action.tool, rule.tool) and fnmatchcase(action.name, rule.action)


def _mentions(action: ResolvedAction, name: str) -> bool:
    """Return True if a name occurs in the parameters shown to a person.

    This is the fallback if the commands of the action cannot be determined.
    """
    whole = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)" if name else "")
    return any(whole.search(text) for _, text in strings_in(action.params))


def _program(pattern: str) -> str:
    """Return the program name of a pattern, or an empty string if it has wildcards."""
    name = (pattern.split() or [""])[0].rpartition("/")[2]
    return "" if re.search(r"[*?\[]", name) else name


def _literal(glob: str) -> str:
    """Return the longest component of a glob without wildcards."""
    names = [part for part in glob.split("/") if part not in ("", ".", "..", "~")]
    return max((n for n in names if not re.search(r"[*?\[{\\]", n)), key=len, default="")


# --- allow rules: the whole action must be covered


def _covered(rules: Iterable[Rule], action: ResolvedAction, inputs: PolicyInput) -> bool:
    """Return True if allow rules cover the action. Each command may match a different rule."""
    allowing = [rule for rule in rules if _allows_paths(rule, action, inputs)]
    if any(not rule.command for rule in allowing):
        return True
    return bool(action.commands) and all(
        any(command_matches(rule.command, one) for rule in allowing) for one in action.commands
    )


def _allows_paths(rule: Rule, action: ResolvedAction, inputs: PolicyInput) -> bool:
    if rule.decision != "allow" or not _applies_to(rule, action):
        return False
    if not rule.path:
        return True
    # The directory of a command does not limit its effects.
    runs = action.commands is None or len(action.commands) > 0
    if not action.paths or (runs and not rule.command):
        return False
    return all(path_matches(rule.path, path, inputs, bad=False) for path in action.paths)


# --- patterns


def path_matches(glob: str, path: str, inputs: PolicyInput, *, bad: bool) -> bool:
    """Match a real, absolute path against a glob. Return `bad` if the glob is invalid.

    `**` matches any number of directories, and at the end also the directory itself.
    """
    base, rest = _split_base(glob, inputs)
    parts = PurePosixPath(path).parts[1:]
    if parts[: len(base)] != base:
        return False
    inner = parts[len(base) :]
    if rest in ("", "**"):
        return not inner or rest == "**"
    try:
        return _glob(rest).matches(inner) or _glob(rest.removesuffix("/**")).matches(inner)
    except BadPattern:
        return bad


def _split_base(glob: str, inputs: PolicyInput) -> tuple[tuple[str, ...], str]:
    """Return the base directory of a glob and the rest of the glob."""
    if glob.startswith("/"):
        return (), glob.lstrip("/")
    base = inputs.workspace
    if glob == "~" or glob.startswith("~/"):
        base, glob = inputs.home, glob[1:].lstrip("/")
    parts = PurePosixPath(base).parts[1:]
    while (head := glob.partition("/"))[0] in (".", ".."):
        parts = parts[:-1] if head[0] == ".." else parts
        glob = head[2].lstrip("/")
    return parts, glob


@lru_cache(GLOB_CACHE_SIZE)
def _glob(text: str) -> Glob:
    return parse_glob(text, hidden=True)


def command_matches(pattern: str, command: str, *, by_name: bool = False) -> bool:
    """Match a command against a pattern, token by token; `*` matches any number of tokens.

    With `by_name`, a program given by its path also matches by its file name.
    """
    wanted, tokens = pattern.split(), command.split()
    if _tokens_match(wanted, tokens):
        return True
    if not by_name or not tokens or "/" not in tokens[0]:
        return False
    return _tokens_match(wanted, [tokens[0].rpartition("/")[2], *tokens[1:]])


def _tokens_match(wanted: Sequence[str], tokens: Sequence[str]) -> bool:
    """Match from the left; on a mismatch, extend the last `*` by one token, which is sufficient."""
    at = here = taken = 0
    after_star = -1
    while here < len(tokens):
        if at < len(wanted) and wanted[at] == "*":
            at += 1
            after_star, taken = at, here
        elif at < len(wanted) and fnmatchcase(tokens[here], wanted[at]):
            at += 1
            here += 1
        elif after_star >= 0:
            taken += 1
            at, here = after_star, taken
        else:
            return False
    return all(token == "*" for token in wanted[at:])
