"""Hooks: people's own commands, which are asked before a tool is called.

What one says on its standard output or by its exit status, and what several say together, are
plain functions. `Hooks` runs them. They come from the configuration as far as it is trusted
(`config/tooling.py`). One that fails, takes too long or says what nobody understands has no
opinion, and the log says so.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import msgspec

from culm.config.schema import Hook, why_no_regex
from culm.config.tooling import PRE_TOOL_USE
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.base import CallRequest
from culm.tools.process.environment import command_env
from culm.tools.process.exchange import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, clean, encodable, encode

log = logging.getLogger(__name__)

HOOK_S = 30.0  # Unless it says otherwise; then it has another second to end by itself.
HOOKS_AT_ONCE = 8
OUTPUT_BYTES_MAX = 64 << 10
REASON_CHARS_MAX = 4_000
CONTEXT_CHARS_MAX = 30_000  # Of all hooks together: the model reads it with the result.
NAME_CHARS_MAX = 100
VARIABLES_MAX = 32  # Arguments that are put into the environment, too ...
VARIABLE_BYTES_MAX = 8 << 10  # ... if they are no longer than this.
DENY_STATUS, HALT_STATUS = 2, 49

Decision = Literal["allow", "deny", "none"]
# Also as other programs' hooks say it. To ask is what happens anyway.
_DECISIONS: Mapping[Json, Decision] = {
    "allow": "allow",
    "approve": "allow",
    "deny": "deny",
    "block": "deny",
    "ask": "none",
    "none": "none",
    "": "none",
    None: "none",
}


class HookAnswer(NamedTuple):
    """What one hook says."""

    decision: Decision = "none"
    halt: bool = False
    reason: str = ""
    context: str = ""
    patch: dict[str, Json] | None = None  # Laid over the arguments.


@dataclass(frozen=True, slots=True)
class HookVerdict:
    """What all hooks together say of one call; it holds for that call only."""

    decision: Decision
    halt: bool  # The turn ends.
    reason: str
    context: str  # For the model, with the result.
    updated_input: dict[str, Json] | None  # All arguments, if a hook has changed some.
    metadata: Json  # What clients show of it.


class InvalidHookAnswer(Exception):
    """A hook has said something that is no answer. Says what."""


# --- what one says


def read_answer(status: int | None, output: bytes, errors: bytes) -> HookAnswer:
    """Raises `NotUnderstood`."""
    if status in (DENY_STATUS, HALT_STATUS):
        reason = clean(errors.decode(errors="replace")).strip()
        return HookAnswer("deny", halt=status == HALT_STATUS, reason=reason[:REASON_CHARS_MAX])
    if status != 0:
        raise InvalidHookAnswer(f"it ended with status {status}" if status else "it was killed")
    if not output.strip():
        return HookAnswer()
    try:
        answer = msgspec.json.decode(output)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidHookAnswer("its output is no JSON") from None
    if not isinstance(answer, dict):
        raise InvalidHookAnswer("its output is no JSON object")
    return _parse_answer(cast("dict[str, Json]", answer))


def _parse_answer(answer: dict[str, Json]) -> HookAnswer:
    """The answer in our words, or in those of Claude Code's hooks, which are nested."""
    inner = answer.get("hookSpecificOutput")
    nested = cast("dict[str, Json]", inner) if isinstance(inner, dict) else {}
    word = nested.get("permissionDecision", answer.get("decision"))
    if word is not None and (not isinstance(word, str) or word not in _DECISIONS):
        raise InvalidHookAnswer(f"its decision is {str(word)[:NAME_CHARS_MAX]!r}")
    halt = answer.get("halt") is True or answer.get("continue") is False
    patch = nested.get("updatedInput", answer.get("updated_input"))
    if patch is not None and not isinstance(patch, dict):
        raise InvalidHookAnswer("its updated input is no object")
    reasons = nested.get("permissionDecisionReason"), answer.get("reason")
    contexts = nested.get("additionalContext"), answer.get("context")
    return HookAnswer(
        _DECISIONS[word],
        halt,
        _joined(_lines(*reasons, *([answer.get("stopReason")] if halt else [])), REASON_CHARS_MAX),
        _joined(_lines(*contexts), CONTEXT_CHARS_MAX),
        cast("dict[str, Json] | None", patch),
    )


def _lines(*values: Json) -> list[str]:
    """Texts, and lists of texts."""
    found: list[str] = []
    for value in values:
        items = cast("list[Json]", value) if isinstance(value, list) else [value]
        found += [item for item in items if isinstance(item, str)]
    return found


def _joined(texts: Sequence[str], chars_max: int) -> str:
    return clean("\n".join(text for text in texts if text))[:chars_max]


# --- what several say


def merge(said: Sequence[tuple[Hook, HookAnswer]], arguments: Mapping[str, Json]) -> HookVerdict:
    """One verdict of all, in the order of the configuration: who denies has the last word."""
    opinions = [one for _, one in said]
    decisions = {one.decision for one in opinions}
    decision: Decision = "none"
    if decisions & {"deny", "allow"}:
        decision = "deny" if "deny" in decisions else "allow"
    halt = any(one.halt for one in opinions)
    reason = _joined([one.reason for one in opinions], REASON_CHARS_MAX)
    patches = [one.patch for one in opinions if one.patch is not None]
    updated: dict[str, Json] | None = None
    if patches:
        updated = dict(arguments)
        for patch in patches:
            updated |= patch
    whole = HookAnswer(decision, halt, reason, patch=updated)
    metadata: dict[str, Json] = {"hook_count": len(said), **_shown(whole)}
    metadata["hooks"] = [{**_naming(hook), **_shown(one)} for hook, one in said]
    context = _joined([one.context for one in opinions], CONTEXT_CHARS_MAX)
    return HookVerdict(decision, halt, reason, context, updated, metadata)


def _naming(hook: Hook) -> dict[str, Json]:
    named: dict[str, Json] = {"name": name_of(hook)}
    return {**named, "matcher": hook.matcher} if hook.matcher else named


def _shown(said: HookAnswer) -> dict[str, Json]:
    fields: dict[str, Json] = {"decision": said.decision}
    if said.halt:
        fields["halt"] = True
    if said.reason:
        fields["reason"] = said.reason
    if said.patch is not None:
        fields["input_rewrite"] = True
    return fields


def name_of(hook: Hook) -> str:
    return (hook.name or hook.command)[:NAME_CHARS_MAX]


def matching(hooks: Sequence[Hook], tool: str) -> list[Hook]:
    """Those that want to be asked about a tool, in their order, the same command once."""
    found: dict[str, Hook] = {}
    for hook in hooks:
        if why := why_no_regex(hook.matcher):
            log.error("the hook %r is not run, as its matcher is wrong: %s", name_of(hook), why)
        elif re.search(hook.matcher, tool):
            found.setdefault(hook.command, hook)
    return list(found.values())


# --- running them


class Hooks:
    """The hooks of one workspace, as the configuration has them when a call is made."""

    def __init__(self, context: ToolContext, present: Callable[[], Sequence[Hook]]) -> None:
        self._context = context
        self._present = present
        self._room = asyncio.Semaphore(HOOKS_AT_ONCE)

    async def run(self, call: CallRequest) -> HookVerdict | None:
        """What the hooks say of a call; None if none wants to be asked about it.

        Cancelling this ends them.
        """
        hooks = matching(self._present(), call.name)
        if not hooks:
            return None
        data = self._payload(call)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask(hook, call, data), name=f"hook {name_of(hook)}")
                for hook in hooks
            ]
        said = [(hook, task.result()) for hook, task in zip(hooks, tasks, strict=True)]
        return merge(said, call.arguments or {})

    def _payload(self, call: CallRequest) -> bytes:
        about = {
            "event": PRE_TOOL_USE,
            "hook_event_name": PRE_TOOL_USE,  # As hooks of Claude Code know it.
            "session_id": call.session_id,
            "cwd": self._cwd,
            "tool_name": call.name,
            "tool_input": call.input if call.arguments is None else call.arguments,
        }
        return encode(encodable(about)) + b"\n"  # Not every path is text.

    @property
    def _cwd(self) -> str:
        return str(self._context.inside.root)

    async def _ask(self, hook: Hook, call: CallRequest, data: bytes) -> HookAnswer:
        within_s = float(hook.timeout or HOOK_S)
        env = command_env(self._context.env(), self._cwd) | _variables(call, self._cwd)
        owner = ProcessOwner(
            self._context.workspace_id, "hook", call.session_id, call.run_id, call.id
        )
        argv = ("/bin/sh", "-c", hook.command)
        title = name_of(hook)
        telling = ExchangeRequest(
            argv, self._cwd, env, owner, title, data, within_s, OUTPUT_BYTES_MAX
        )
        try:
            async with self._room:
                answer = await exchange(self._context.processes, self._context.clock, telling)
            return _opinion(answer, within_s)
        except (ProcessStartFailed, InvalidHookAnswer, OSError) as exc:
            log.warning("the hook %r has no opinion on %s: %s", title, call.name, exc)
            return HookAnswer()


def _opinion(answer: ExchangeAnswer, within_s: float) -> HookAnswer:
    if answer.is_late:
        raise InvalidHookAnswer(f"it took longer than {within_s:g} s")
    if answer.is_cut and answer.exit.code == 0:
        raise InvalidHookAnswer(f"its output has more than {OUTPUT_BYTES_MAX} bytes")
    return read_answer(answer.exit.code, answer.output, answer.errors)


def _variables(call: CallRequest, cwd: str) -> dict[str, str]:
    """What a hook finds in its environment, under the names a Crush hook expects and our own."""
    known = {
        "EVENT": PRE_TOOL_USE,
        "TOOL_NAME": call.name,
        "SESSION_ID": call.session_id,
        "CWD": cwd,
        "PROJECT_DIR": cwd,
    }
    for name, value in list((call.arguments or {}).items())[:VARIABLES_MAX]:
        if isinstance(value, str | int | float):
            text = clean(value) if isinstance(value, str) else encode(value).decode()
            variable = re.sub(r"\W", "_", name, flags=re.ASCII).upper()[:NAME_CHARS_MAX]
            if "\0" not in text and len(text.encode()) <= VARIABLE_BYTES_MAX:
                known[f"TOOL_INPUT_{variable}"] = text
    return {f"{ours}_{name}": text for ours in ("CRUSH", "CULM") for name, text in known.items()}
