"""Hooks: commands of the user that run before a tool call and may refuse or change it.

Parsing the answer of one hook and merging the answers of several are pure functions; `Hooks` runs
the commands. Hooks come from the trusted part of the configuration (`config/layers.py`). A hook
that fails, times out or prints an invalid answer has no effect on the call; that is logged.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

from culm.config.layers import PRE_TOOL_USE
from culm.config.schema import Hook, regex_problem
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.base import CallRequest, ToolContext
from culm.tools.process.child import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.process.environment import command_env
from culm.wire.codec import Json, clean, encodable, encode

log = logging.getLogger(__name__)

HOOK_S = 30.0  # The default timeout. After it the hook has one second to exit by itself.
HOOKS_AT_ONCE = 8
OUTPUT_BYTES_MAX = 64 << 10
REASON_CHARS_MAX = 4_000
CONTEXT_CHARS_MAX = 30_000  # For all hooks together: the model reads it with the result.
NAME_CHARS_MAX = 100
VARIABLES_MAX = 32  # Arguments that are also passed as environment variables.
VARIABLE_BYTES_MAX = 8 << 10  # Longer arguments are not passed as variables.
DENY_STATUS, HALT_STATUS = 2, 49

Decision = Literal["allow", "deny", "none"]
# Includes the spellings of other programs' hooks. `ask` is the default behavior.
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
    """The answer of one hook."""

    decision: Decision = "none"
    halt: bool = False
    reason: str = ""
    context: str = ""
    patch: dict[str, Json] | None = None  # Merged into the arguments.


class HookVerdict(Struct, frozen=True):
    """The merged answer of all hooks to one call; it applies to that call only."""

    decision: Decision
    halt: bool  # Ends the turn.
    reason: str
    context: str  # Appended to the result for the model.
    updated_input: dict[str, Json] | None  # The complete arguments, if a hook changed any.
    metadata: Json  # Shown by clients.


class InvalidHookAnswer(Exception):
    """A hook returned an invalid answer. The message names the problem."""


# --- the answer of one hook


def read_answer(status: int | None, output: bytes, errors: bytes) -> HookAnswer:
    """Parse the exit status and the output of a hook. Raises `InvalidHookAnswer`."""
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
        raise InvalidHookAnswer("its output is not valid JSON") from None
    if not isinstance(answer, dict):
        raise InvalidHookAnswer("its output is not a JSON object")
    return _parse_answer(cast("dict[str, Json]", answer))


def _parse_answer(answer: dict[str, Json]) -> HookAnswer:
    """Parse an answer in our format or in the nested format of Claude Code."""
    inner = answer.get("hookSpecificOutput")
    nested = cast("dict[str, Json]", inner) if isinstance(inner, dict) else {}
    decision = nested.get("permissionDecision", answer.get("decision"))
    if decision is not None and (not isinstance(decision, str) or decision not in _DECISIONS):
        raise InvalidHookAnswer(f"its decision is {str(decision)[:NAME_CHARS_MAX]!r}")
    halt = answer.get("halt") is True or answer.get("continue") is False
    patch = nested.get("updatedInput", answer.get("updated_input"))
    if patch is not None and not isinstance(patch, dict):
        raise InvalidHookAnswer("its updated input is not an object")
    reasons = nested.get("permissionDecisionReason"), answer.get("reason")
    contexts = nested.get("additionalContext"), answer.get("context")
    return HookAnswer(
        _DECISIONS[decision],
        halt,
        _joined(_lines(*reasons, *([answer.get("stopReason")] if halt else [])), REASON_CHARS_MAX),
        _joined(_lines(*contexts), CONTEXT_CHARS_MAX),
        cast("dict[str, Json] | None", patch),
    )


def _lines(*values: Json) -> list[str]:
    """Flatten texts and lists of texts."""
    found: list[str] = []
    for value in values:
        items = cast("list[Json]", value) if isinstance(value, list) else [value]
        found += [item for item in items if isinstance(item, str)]
    return found


def _joined(texts: Sequence[str], chars_max: int) -> str:
    return clean("\n".join(text for text in texts if text))[:chars_max]


# --- merging several answers


def merge(by_hook: Sequence[tuple[Hook, HookAnswer]], arguments: Mapping[str, Json]) -> HookVerdict:
    """Merge the answers in the order of the configuration. A denial outweighs every approval."""
    answers = [one for _, one in by_hook]
    decisions = {one.decision for one in answers}
    decision: Decision = "none"
    if decisions & {"deny", "allow"}:
        decision = "deny" if "deny" in decisions else "allow"
    halt = any(one.halt for one in answers)
    reason = _joined([one.reason for one in answers], REASON_CHARS_MAX)
    patches = [one.patch for one in answers if one.patch is not None]
    updated: dict[str, Json] | None = None
    if patches:
        updated = dict(arguments)
        for patch in patches:
            updated |= patch
    whole = HookAnswer(decision, halt, reason, patch=updated)
    metadata: dict[str, Json] = {"hook_count": len(by_hook), **_fields_of(whole)}
    metadata["hooks"] = [{**_identity_of(hook), **_fields_of(one)} for hook, one in by_hook]
    context = _joined([one.context for one in answers], CONTEXT_CHARS_MAX)
    return HookVerdict(decision, halt, reason, context, updated, metadata)


def _identity_of(hook: Hook) -> dict[str, Json]:
    named: dict[str, Json] = {"name": name_of(hook)}
    return {**named, "matcher": hook.matcher} if hook.matcher else named


def _fields_of(answer: HookAnswer) -> dict[str, Json]:
    fields: dict[str, Json] = {"decision": answer.decision}
    if answer.halt:
        fields["halt"] = True
    if answer.reason:
        fields["reason"] = answer.reason
    if answer.patch is not None:
        fields["input_rewrite"] = True
    return fields


def name_of(hook: Hook) -> str:
    return (hook.name or hook.command)[:NAME_CHARS_MAX]


def matching(hooks: Sequence[Hook], tool: str) -> list[Hook]:
    """Return the hooks that match a tool, in order, each command once."""
    found: dict[str, Hook] = {}
    for hook in hooks:
        if why := regex_problem(hook.matcher):
            log.error("hook %r is skipped: invalid matcher: %s", name_of(hook), why)
        elif re.search(hook.matcher, tool):
            found.setdefault(hook.command, hook)
    return list(found.values())


# --- running


class Hooks:
    """The hooks of one workspace, read from the configuration at every call."""

    def __init__(self, context: ToolContext, present: Callable[[], Sequence[Hook]]) -> None:
        self._context = context
        self._present = present
        self._room = asyncio.Semaphore(HOOKS_AT_ONCE)

    async def run(self, call: CallRequest) -> HookVerdict | None:
        """Run the hooks of a call and merge their answers. Return None if no hook matches.

        Cancelling ends the hook processes.
        """
        hooks = matching(self._present(), call.name)
        if not hooks:
            return None
        data = self._payload(call)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run_one(hook, call, data), name=f"hook {name_of(hook)}")
                for hook in hooks
            ]
        by_hook = [(hook, task.result()) for hook, task in zip(hooks, tasks, strict=True)]
        return merge(by_hook, call.arguments or {})

    def _payload(self, call: CallRequest) -> bytes:
        payload = {
            "event": PRE_TOOL_USE,
            "hook_event_name": PRE_TOOL_USE,  # The name in the hooks of Claude Code.
            "session_id": call.session_id,
            "cwd": self._cwd,
            "tool_name": call.name,
            "tool_input": call.input if call.arguments is None else call.arguments,
        }
        return encode(encodable(payload)) + b"\n"  # A path may contain bytes that are not text.

    @property
    def _cwd(self) -> str:
        return str(self._context.paths.root)

    async def _run_one(self, hook: Hook, call: CallRequest, data: bytes) -> HookAnswer:
        within_s = float(hook.timeout or HOOK_S)
        env = command_env(self._context.env(), self._cwd) | _variables(call, self._cwd)
        owner = ProcessOwner(
            self._context.workspace_id, "hook", call.session_id, call.run_id, call.id
        )
        argv = ("/bin/sh", "-c", hook.command)
        title = name_of(hook)
        request = ExchangeRequest(
            argv, self._cwd, env, owner, title, data, within_s, OUTPUT_BYTES_MAX
        )
        try:
            async with self._room:
                answer = await exchange(self._context.processes, self._context.clock, request)
            return _answer_of(answer, within_s)
        except (ProcessStartFailed, InvalidHookAnswer, OSError) as exc:
            log.warning("hook %r made no decision on %s: %s", title, call.name, exc)
            return HookAnswer()


def _answer_of(answer: ExchangeAnswer, within_s: float) -> HookAnswer:
    if answer.is_late:
        raise InvalidHookAnswer(f"it took longer than {within_s:g} s")
    if answer.is_cut and answer.exit.code == 0:
        raise InvalidHookAnswer(f"its output has more than {OUTPUT_BYTES_MAX} bytes")
    return read_answer(answer.exit.code, answer.output, answer.errors)


def _variables(call: CallRequest, cwd: str) -> dict[str, str]:
    """Build the environment variables of a hook, under the names of Crush and our own."""
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
