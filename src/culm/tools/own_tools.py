"""Tools that are people's own commands, as `own_tools` of a trusted configuration declares them.

A command is told its arguments as JSON on its standard input, and answers on its standard output:
as JSON, or in plain text. Somebody is asked before it runs, unless the declaration says otherwise.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from culm.config.schema import OwnTool
from culm.model.base import ToolSpec
from culm.processes.base import ProcessExit, ProcessOwner, ProcessStartFailed
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.process.environment import command_env
from culm.tools.process.exchange import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.process.output import CommandOutput, fit
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, clean, encodable, encode
from culm.wire.runs import CrashPolicy

log = logging.getLogger(__name__)

OUTPUT_BYTES_MAX = 256 << 10  # Of an answer; of its content the model reads less.
METADATA_BYTES_MAX = 64 << 10
DEPTH_MAX = 16  # Of arguments that are compared with their schema.


def own_tools(
    context: ToolContext, declared: Mapping[str, OwnTool], taken: Collection[str]
) -> dict[str, "OwnCommand"]:
    """The tools that a configuration declares; none of them has a name that is `taken`."""
    tools: dict[str, OwnCommand] = {}
    for name, own in declared.items():
        if why := _why_not(name, own, taken):
            log.error("the tool %s of the configuration is not used: %s", name, why)
        else:
            tools[name] = OwnCommand(context, name, own)
    return tools


def _why_not(name: str, own: OwnTool, taken: Collection[str]) -> str:
    if name in taken:
        return "there is a tool of that name already"
    if own.parameters.get("type", "object") != "object":
        return "its parameters must be a schema of an object"
    return "" if own.command else "it has no command"


@dataclass(frozen=True, slots=True)
class OwnCommand:
    context: ToolContext
    name: str
    own: OwnTool

    @property
    def spec(self) -> ToolSpec:
        schema: dict[str, Json] = {"type": "object", "properties": {}, **self.own.parameters}
        return ToolSpec(self.name, self.own.description, schema)

    @property
    def parallel(self) -> bool:
        return self.own.parallel

    @property
    def crash(self) -> CrashPolicy:
        return self.own.crash

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        if call.arguments is None:
            return CallResult(f"{self.name}: the arguments are no JSON object", is_error=True)
        problem = next(misfits(call.arguments, self.own.parameters), "")
        if problem:
            return CallResult(f"{self.name}: {problem}", is_error=True)
        arguments = call.arguments
        return CallPlan(self._action(arguments), lambda _: self._run(call, arguments))

    def _action(self, arguments: dict[str, Json]) -> ResolvedAction:
        return ResolvedAction(
            self.name,
            "execute",
            description=f"Run {self.name}, a command of your configuration",
            path=clean(self._cwd),
            params=arguments,
            resolved=encodable(
                {"argv": list(self._argv), "cwd": self._cwd, "arguments": arguments}
            ),
            is_free=self.own.is_free,
            coverage=(f"own:{self.name}",),
        )

    @property
    def _cwd(self) -> str:
        return str(self.context.inside.root)

    @property
    def _argv(self) -> tuple[str, ...]:
        command = self.own.command
        return ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)

    async def _run(self, call: CallRequest, arguments: dict[str, Json]) -> CallResult:
        told = {"arguments": arguments, "session_id": call.session_id, "cwd": self._cwd}
        data = encode(encodable(told)) + b"\n"  # Not every path is text.
        telling = ExchangeRequest(
            self._argv,
            self._cwd,
            command_env(self.context.env(), self._cwd),
            ProcessOwner(self.context.workspace_id, "tool", call.session_id, call.run_id, call.id),
            self.name,
            data,
            self.own.timeout_s,
            OUTPUT_BYTES_MAX,
        )
        try:
            answer = await exchange(self.context.processes, self.context.clock, telling)
        except (ProcessStartFailed, OSError) as exc:
            return CallResult(f"{self.name} cannot be started: {exc}", is_error=True)
        if why := _failure(answer, self.own.timeout_s):
            said = bounded(fit(answer.errors or answer.output)).strip()
            return CallResult(f"{self.name} {why}." + (f"\n{said}" if said else ""), is_error=True)
        return read_output(answer)


def _failure(answer: ExchangeAnswer, within_s: float) -> str:
    """How it failed; empty if it did not."""
    left = f"; still running: {', '.join(map(str, answer.exit.left))}" if answer.exit.left else ""
    if answer.is_late:
        return f"took longer than {within_s:g} s and was ended{left}"
    match answer.exit:
        case ProcessExit(lost=True):
            return "was lost with the process that kept it; whether it did its work is not known"
        case ProcessExit(code=0):
            return ""
        case ProcessExit(code=None, signal=signal):
            return f"was ended by signal {signal}{left}"
        case ProcessExit(code=code):
            return f"failed with exit status {code}{left}"


# --- what it says


def read_output(answer: ExchangeAnswer) -> CallResult:
    """The result of a command that went well: JSON with a content, or plain text."""
    said = None if answer.is_cut else _json_of(answer.output)
    if said is None or "content" not in said:
        text = fit(answer.output)
        more = f"\n[… the output has more than {OUTPUT_BYTES_MAX:,} bytes …]"
        return CallResult(bounded(text) + more if answer.is_cut else bounded(text))
    content = said["content"]
    text = content if isinstance(content, str) else encode(content).decode()
    metadata = encode(said["metadata"]) if isinstance(said.get("metadata"), dict) else b""
    if len(metadata) > METADATA_BYTES_MAX:
        metadata = b""  # It is for clients to show, and no client shows as much.
    is_error = said.get("is_error") is True
    return CallResult(bounded(fit(text.encode())), is_error=is_error, metadata=metadata.decode())


def _json_of(output: bytes) -> dict[str, Json] | None:
    try:
        said = msgspec.json.decode(output)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cast("dict[str, Json]", said) if isinstance(said, dict) else None


def bounded(text: str) -> str:
    """As much as a model should read at once: the beginning and the end."""
    output = CommandOutput(None)
    output.feed(text.encode(errors="replace"))
    return output.text()


# --- what it is told

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def misfits(arguments: dict[str, Json], schema: dict[str, Json]) -> Iterator[str]:
    """What is wrong in arguments, as far as kinds, required and known names go, in sentences."""
    yield from _misfits(arguments, {"type": "object", **schema}, "", DEPTH_MAX)


def _misfits(value: Json, schema: Json, at: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not depth:
        return
    fields = cast("dict[str, Json]", schema)
    if problem := _wrong_kind(value, fields.get("type")) or _not_listed(value, fields.get("enum")):
        yield f"{at or 'it'} {problem}"
        return
    if isinstance(value, dict):
        yield from _misfits_inside(cast("dict[str, Json]", value), fields, at, depth)
    elif isinstance(value, list) and "items" in fields:
        for number, item in enumerate(cast("list[Json]", value)):
            yield from _misfits(item, fields["items"], f"{at}[{number}]", depth - 1)


def _misfits_inside(
    given: dict[str, Json], schema: dict[str, Json], at: str, depth: int
) -> Iterator[str]:
    known = schema.get("properties")
    properties = cast("dict[str, Json]", known) if isinstance(known, dict) else {}
    required = schema.get("required")
    for name in cast("list[Json]", required) if isinstance(required, list) else []:
        if isinstance(name, str) and name not in given:
            yield f"{_step(at, name)} is missing"
    for name, inner in given.items():
        if name in properties:
            yield from _misfits(inner, properties[name], _step(at, name), depth - 1)
        elif schema.get("additionalProperties") is False:
            yield f"{_step(at, name)} is not known; there is {', '.join(properties) or 'nothing'}"


def _step(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _wrong_kind(value: Json, wanted: Json) -> str:
    names = cast("list[Json]", wanted) if isinstance(wanted, list) else [wanted]
    kinds = [name for name in names if isinstance(name, str) and name in _KINDS]
    if not kinds or any(_is_of(value, kind) for kind in kinds):
        return ""
    return f"must be of type {' or '.join(kinds)}, not {_kind_of(value)}"


def _is_of(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])


def _kind_of(value: Json) -> str:
    return next((kind for kind in ("integer", *_KINDS) if _is_of(value, kind)), "that")


def _not_listed(value: Json, enum: Json) -> str:
    if not isinstance(enum, list) or value in (listed := cast("list[Json]", enum)):
        return ""
    return f"must be one of {', '.join(encode(one).decode() for one in listed)}"
