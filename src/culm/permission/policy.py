"""Whether a call may go ahead, must be asked about, or is refused. Pure.

A hook that denies or halts has had its say before. Then, in this order: rules that deny, skip mode,
what is allowed (by being harmless, by `allowed_tools`, by rules), the approval of a hook, grants,
and last what the run's caller said instead of asking. A rule that asks takes away only what is
allowed beforehand. Who is asked, and what happens if nobody is there, is not decided here.

A rule that narrows (deny, ask) matches if any part of an action does; one that allows must cover
all of it. Where it cannot be told what a shell command will do, the one matches and the other does
not. Where there are several places that paths may be from, the one is about all of them, the other
about the first.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

from culm.tools.base import ResolvedAction
from culm.tools.search.patterns import BadPattern, Glob, parse_glob
from culm.wire.codec import strings_in
from culm.wire.rules import Approve, Decision, Rule

GLOBS_KEPT = 2048  # Read globs; more than a few workspaces have.


@dataclass(frozen=True, slots=True)
class Allow:
    by: Literal["free", "skip", "allowed_tools", "rule", "hook", "grant", "approve"]


@dataclass(frozen=True, slots=True)
class Refuse:
    by: Literal["rule", "approve"]
    reason: str  # For the model and whoever reads along.


@dataclass(frozen=True, slots=True)
class AskPerson:
    why: str = ""  # Where that is not plain.


Verdict = Allow | Refuse | AskPerson


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a call of one session is judged by."""

    workspace: str  # Real and absolute; globs that do not begin with `/` or `~/` are from here.
    home: str  # The same, for `~/`.
    rules: Sequence[Rule] = ()
    # Globs in rules that deny or ask are from here, too: whoever works in a copy of a
    # directory may do no more in that directory than those who work there.
    also_from: Sequence[str] = ()
    allowed_tools: Collection[str] = ()  # `tool` or `tool:action`, exactly.
    skip: bool = False
    hook: Literal["allow", "none"] = "none"  # Of exactly this call.
    granted: Collection[str] = ()  # Grains that hold for this tool, action and session.
    approve: Approve | None = None  # What the run's caller said.


def decide(action: ResolvedAction, terms: PolicyInput) -> Verdict:
    deny = _first("deny", terms.rules, action, terms)
    if deny is not None:
        return Refuse("rule", f"a rule denies it: {rule_text(deny)}")
    if terms.approve is not None and not isinstance(terms.approve, str):
        deny = _first("deny", terms.approve, action, terms)
        if deny is not None:
            return Refuse("approve", f"whoever started this run denies it: {rule_text(deny)}")
    if terms.skip:
        return Allow("skip")
    ask = _first("ask", terms.rules, action, terms)
    if ask is None:
        if action.is_free:
            return Allow("free")
        if {action.tool, f"{action.tool}:{action.name}"} & set(terms.allowed_tools):
            return Allow("allowed_tools")
        if _covered(terms.rules, action, terms):
            return Allow("rule")
    if terms.hook == "allow":
        return Allow("hook")
    if action.coverage and all(grain in terms.granted for grain in action.coverage):
        return Allow("grant")
    why = action.why if ask is None else f"a rule wants it asked: {rule_text(ask)}"
    return _approved(action, terms, why)


def _approved(action: ResolvedAction, terms: PolicyInput, why: str) -> Verdict:
    """What the run's caller said, or that somebody is to be asked."""
    match terms.approve:
        case None | "ask":
            return AskPerson(why)
        case "allow":
            return Allow("approve")
        case "deny":
            return Refuse("approve", "whoever started this run denies what would be asked")
        case rules:
            if _first("ask", rules, action, terms) is None and _covered(rules, action, terms):
                return Allow("approve")
            return AskPerson(why)


def rule_text(rule: Rule) -> str:
    """A rule as a person may find it again."""
    named = (("tool", rule.tool), ("action", rule.action))
    said = [f"{name} {pattern}" for name, pattern in named if pattern != "*"]
    said += [f"path {rule.path}"] if rule.path else []
    said += [f"command {rule.command!r}"] if rule.command else []
    return f"{rule.decision} {', '.join(said) or 'everything'}"


# --- rules that narrow: any part of an action that matches is enough


def _first(
    decision: Decision, rules: Iterable[Rule], action: ResolvedAction, terms: PolicyInput
) -> Rule | None:
    return next((r for r in rules if r.decision == decision and _touches(r, action, terms)), None)


def _touches(rule: Rule, action: ResolvedAction, terms: PolicyInput) -> bool:
    if not _applies_to(rule, action):
        return False
    if rule.path and not _touches_path(rule.path, action, terms):
        return False
    if not rule.command:
        return True
    if action.commands is None and _mentions(action, _program(rule.command)):
        return True
    known = (*(action.commands or ()), *action.seen)
    return any(command_matches(rule.command, one, by_name=True) for one in known)


def _touches_path(glob: str, action: ResolvedAction, terms: PolicyInput) -> bool:
    for place in (terms.workspace, *terms.also_from):
        there = replace(terms, workspace=place)
        if any(path_matches(glob, path, there, bad=True) for path in action.paths):
            return True
    return action.commands is None and _mentions(action, _literal(glob))


def _applies_to(rule: Rule, action: ResolvedAction) -> bool:
    return fnmatchcase(action.tool, rule.tool) and fnmatchcase(action.name, rule.action)


def _mentions(action: ResolvedAction, name: str) -> bool:
    """Whether a name stands in what a person would be shown of the action.

    It is what is left to go by if the commands in it cannot be told.
    """
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)" if name else "")
    return any(word.search(text) for _, text in strings_in(action.params))


def _program(pattern: str) -> str:
    """The name of the program a pattern is about; empty if that is left open."""
    name = (pattern.split() or [""])[0].rpartition("/")[2]
    return "" if re.search(r"[*?\[]", name) else name


def _literal(glob: str) -> str:
    """The longest name in a glob that stands for itself."""
    names = [part for part in glob.split("/") if part not in ("", ".", "..", "~")]
    return max((n for n in names if not re.search(r"[*?\[{\\]", n)), key=len, default="")


# --- rules that allow: all of an action is to be covered


def _covered(rules: Iterable[Rule], action: ResolvedAction, terms: PolicyInput) -> bool:
    """Whether the rules that allow cover the action; each command may have one of its own."""
    allowing = [rule for rule in rules if _allows_place(rule, action, terms)]
    if any(not rule.command for rule in allowing):
        return True
    return bool(action.commands) and all(
        any(command_matches(rule.command, one) for rule in allowing) for one in action.commands
    )


def _allows_place(rule: Rule, action: ResolvedAction, terms: PolicyInput) -> bool:
    if rule.decision != "allow" or not _applies_to(rule, action):
        return False
    if not rule.path:
        return True
    # Where a command works does not say what it does.
    runs = action.commands is None or len(action.commands) > 0
    if not action.paths or (runs and not rule.command):
        return False
    return all(path_matches(rule.path, path, terms, bad=False) for path in action.paths)


# --- patterns


def path_matches(glob: str, path: str, terms: PolicyInput, *, bad: bool) -> bool:
    """Whether a real, absolute path is one a glob means; `bad` if the glob cannot be read.

    `**` stands for any number of directories, and at the end for the directory itself, too.
    """
    base, rest = _based(glob, terms)
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


def _based(glob: str, terms: PolicyInput) -> tuple[tuple[str, ...], str]:
    """The directory a glob is from, and the rest of it."""
    if glob.startswith("/"):
        return (), glob.lstrip("/")
    base = terms.workspace
    if glob == "~" or glob.startswith("~/"):
        base, glob = terms.home, glob[1:].lstrip("/")
    parts = PurePosixPath(base).parts[1:]
    while (head := glob.partition("/"))[0] in (".", ".."):
        parts = parts[:-1] if head[0] == ".." else parts
        glob = head[2].lstrip("/")
    return parts, glob


@lru_cache(GLOBS_KEPT)
def _glob(text: str) -> Glob:
    return parse_glob(text, hidden=True)


def command_matches(pattern: str, command: str, *, by_name: bool = False) -> bool:
    """Whether the words of a command are those of a pattern, of which `*` is any number of words.

    With `by_name`, a program that is given by its path counts by its name as well.
    """
    wanted, words = pattern.split(), command.split()
    if _words_match(wanted, words):
        return True
    if not by_name or not words or "/" not in words[0]:
        return False
    return _words_match(wanted, [words[0].rpartition("/")[2], *words[1:]])


def _words_match(wanted: Sequence[str], words: Sequence[str]) -> bool:
    """Match from the left. When stuck, the last `*` takes one word more; that suffices."""
    at = here = taken = 0
    after_star = -1
    while here < len(words):
        if at < len(wanted) and wanted[at] == "*":
            at += 1
            after_star, taken = at, here
        elif at < len(wanted) and fnmatchcase(words[here], wanted[at]):
            at += 1
            here += 1
        elif after_star >= 0:
            taken += 1
            at, here = after_star, taken
        else:
            return False
    return all(word == "*" for word in wanted[at:])
