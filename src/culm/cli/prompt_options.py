"""Text, model, budget, permission rules and files of a prompt, parsed from the command line.

All of it is read before anything is started, so that a mistake starts nothing. Only files and stdin
are I/O.
"""

import mimetypes
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from culm.errors import InvalidRequest
from culm.wire.asks import PATTERN_CHARS_MAX, RULES_MAX, CallerApprove, CallerRule, Decision
from culm.wire.codec import Json, printable
from culm.wire.config import ProviderConfig, SelectedModel
from culm.wire.runs import Attachment, Limits
from culm.wire.tools import ToolFacts

T = TypeVar("T", int, float)
FILE_BYTES_MAX = 10 << 20  # The limit of the server; a test compares them.
FILES_BYTES_MAX = 44 << 20  # The limit for all of them, in their encoding on the wire.
FILES_MAX = 100
AMOUNT_MAX = 10**15  # More is a typo, and does not fit on the wire.
_MONEY = re.compile(r"\$?(\d+(?:\.\d+)?)\$?(?:usd)?", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([km]?)\s*tok(?:ens?)?", re.IGNORECASE)
_STEPS = re.compile(r"(\d+)\s*steps?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}
_PLAIN = re.compile(r"[\w./=:,@%+ -]{1,200}")  # Neither quotes nor operators nor patterns.
SPELLING = "TOOL, bash:COMMAND or TOOL:PATHS, as in edit, 'bash:git push *', 'write:docs/**'"
MODES = ("ask", "auto", "deny")


def choose_model(text: str, providers: Mapping[str, ProviderConfig]) -> SelectedModel:
    """Resolve PROVIDER/MODEL, or a MODEL that only one provider has; raises `InvalidRequest`."""
    usable = {name: one for name, one in providers.items() if not one.disable}
    provider, _, model = text.partition("/")
    if provider in usable and model:
        return SelectedModel(model=model, provider=provider)
    owners = [name for name, one in usable.items() if text in {m.id for m in one.models}]
    if len(owners) == 1:
        return SelectedModel(model=text, provider=owners[0])
    if owners:
        hint = "use " + " or ".join(f"{name}/{text}" for name in owners)
        raise InvalidRequest(f"more than one provider has the model {text}", hint=hint)
    known = [f"{name}/{model.id}" for name, one in usable.items() for model in one.models]
    hint = f"known: {', '.join(known[:5])}" if known else "docs/models.md explains how to add one"
    raise InvalidRequest(f"no provider has a model {text}", hint=hint)


def limits_of(budgets: Sequence[str], timeout: str) -> Limits:
    """Parse the limits of a run; raises `InvalidRequest`."""
    limits = Limits(wall_s=_seconds(timeout) if timeout else 0)
    for text in budgets:
        amount = text.strip().replace(",", "")
        if (money := _MONEY.fullmatch(amount)) is not None:
            limits.cost = _positive(_counted(float(money[1]), text), text)
        elif (tokens := _TOKENS.fullmatch(amount)) is not None:
            factor = _FACTORS[tokens[2].lower()]
            limits.tokens = _positive(int(_counted(float(tokens[1]) * factor, text)), text)
        elif (steps := _STEPS.fullmatch(amount)) is not None:
            limits.steps = _positive(int(_counted(float(steps[1]), text)), text)
        else:
            hint = "use 0.50 (USD), 200ktokens or 20steps; one option for each"
            raise InvalidRequest(f"{printable(text)} is not a budget", hint=hint)
    return limits


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"{printable(text)} is not a time", hint="use 90, 90s, 5m or 1h")
    value = float(found[1]) * _SECONDS[(found[2] or "s").lower()]
    return _positive(_counted(value, text), text)


def _counted(value: float, text: str) -> float:
    """Refuse a number with so many digits that it is infinite: on the wire that means no limit."""
    if value > AMOUNT_MAX:
        raise InvalidRequest(f"{printable(text)} is too large", hint="use a smaller number")
    return value


def _positive(value: T, text: str) -> T:
    """Refuse 0: on the wire it means no limit."""
    if value <= 0:
        raise InvalidRequest(f"{printable(text)} is not a positive limit", hint="use more than 0")
    return value


def read_attachments(files: Sequence[Path]) -> list[Attachment]:
    """Read the files; raises `InvalidRequest` with the one that cannot be attached."""
    if len(files) > FILES_MAX:
        raise InvalidRequest(f"at most {FILES_MAX} files can be attached")
    found = [_attachment(file) for file in files]
    if sum(len(one.content) for one in found) > FILES_BYTES_MAX:
        raise InvalidRequest(f"the attached files exceed {FILES_BYTES_MAX >> 20} MiB")
    return found


def _attachment(file: Path) -> Attachment:
    name = printable(str(file))
    try:
        if file.is_dir():
            hint = "attach its files, or name it in the prompt"
            raise InvalidRequest(f"cannot attach {name}: it is a directory", hint=hint)
        if not file.is_file() and file.exists():
            raise InvalidRequest(f"cannot attach {name}: it is not a regular file")
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        hint = "paths are relative to the current directory"
        raise InvalidRequest(f"cannot attach {name}: {exc.strerror}", hint=hint) from exc
    if len(content) > FILE_BYTES_MAX:
        hint = "name it in the prompt, and the agent can read parts of it"
        message = f"cannot attach {name}: it is larger than {FILE_BYTES_MAX >> 20} MiB"
        raise InvalidRequest(message, hint=hint)
    kind = _type_of(file, content)
    if not kind.startswith(("text/", "image/")):
        hint = "attach text or an image"
        raise InvalidRequest(f"cannot attach {name}: {kind} is not supported", hint=hint)
    return Attachment(str(file.absolute()), file.name, kind, content)


def _type_of(file: Path, content: bytes) -> str:
    """The type by the name for an image; otherwise by the content, whatever the name."""
    guessed = mimetypes.guess_type(file.name)[0] or ""
    if guessed.startswith("image/") and guessed != "image/svg+xml":
        return guessed
    try:
        content.decode()
    except UnicodeDecodeError:
        return guessed or "application/octet-stream"
    return guessed if guessed.startswith("text/") else "text/plain"


def read_text(words: Sequence[str], bytes_max: int) -> str:
    """The text from the command line, or from stdin for `-`; raises `InvalidRequest`."""
    if list(words) != ["-"]:
        text = " ".join(words)
    elif sys.stdin is None:
        raise InvalidRequest("cannot read the text: stdin is closed")
    else:
        # One byte over the limit is enough for the text to be refused as too large.
        text = sys.stdin.buffer.read(bytes_max + 1).decode(errors="replace")
    if not text.strip():
        raise InvalidRequest("the text is empty", hint="give a text, or use - to read stdin")
    return text


# --- permission rules


def parse_rule(text: str, decision: Decision) -> CallerRule:
    """Parse one rule; raises `InvalidRequest`."""
    tool, colon, pattern = (piece.strip() for piece in text.partition(":"))
    if not tool or (colon and not pattern):
        raise InvalidRequest(f"{text!r} is not a rule", hint=f"use {SPELLING}")
    if len(text) > PATTERN_CHARS_MAX:
        raise InvalidRequest(f"a rule may have at most {PATTERN_CHARS_MAX} characters")
    return CallerRule(decision, tool=tool, match=pattern)


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
