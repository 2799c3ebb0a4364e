"""Tools that are commands from the configuration (`own_tools` of a trusted configuration).

A command gets its arguments as JSON on its standard input, and answers on its standard output with
JSON or plain text. It needs approval, unless its declaration makes it free.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import cast

import msgspec
from msgspec import Struct

from culm.config.schema import OwnTool
from culm.model.base import ToolSpec
from culm.processes.base import ProcessExit, ProcessOwner, ProcessStartFailed
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, ToolContext
from culm.tools.process.child import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.process.environment import command_env
from culm.tools.process.output import CommandOutput, fit
from culm.wire.codec import Json, clean, encodable, encode
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

log = logging.getLogger(__name__)

OUTPUT_BYTES_MAX = 256 << 10  # Per answer; the model reads less of its content.
METADATA_BYTES_MAX = 64 << 10
DEPTH_MAX = 16  # Nesting of arguments that are checked against their schema.


def own_tools(
    context: ToolContext, declared: Mapping[str, OwnTool], taken: Collection[str]
) -> dict[str, "OwnCommand"]:
    """Make the tools that a configuration declares; names in `taken` are refused."""
    tools: dict[str, OwnCommand] = {}
    for name, own in declared.items():
        if why := _why_not(name, own, taken):
            log.error("the tool %s of the configuration is not used: %s", name, why)
        else:
            tools[name] = OwnCommand(context, name, own)
    return tools


def _why_not(name: str, own: OwnTool, taken: Collection[str]) -> str:
    if name in taken:
        return "a tool of that name already exists"
    if own.parameters.get("type", "object") != "object":
        return "its parameters must be a schema of an object"
    return "" if own.command else "it has no command"


class OwnCommand(Struct, frozen=True):
    """A tool that runs a command from the configuration."""

    context: ToolContext
    name: str
    own: OwnTool

    @property
    def spec(self) -> ToolSpec:
        schema: dict[str, Json] = {"type": "object", "properties": {}, **self.own.parameters}
        return ToolSpec(self.name, self.own.description, schema, ToolFacts(kind="execute"))

    @property
    def parallel(self) -> bool:
        return self.own.parallel

    @property
    def crash(self) -> CrashPolicy:
        return self.own.crash

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        if call.arguments is None:
            return CallResult(f"{self.name}: the arguments are not a JSON object", is_error=True)
        problem = next(schema_problems(call.arguments, self.own.parameters), "")
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
        return str(self.context.paths.root)

    @property
    def _argv(self) -> tuple[str, ...]:
        command = self.own.command
        return ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)

    async def _run(self, call: CallRequest, arguments: dict[str, Json]) -> CallResult:
        message = {"arguments": arguments, "session_id": call.session_id, "cwd": self._cwd}
        data = encode(encodable(message)) + b"\n"  # Not every path is valid text.
        request = ExchangeRequest(
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
            answer = await exchange(self.context.processes, self.context.clock, request)
        except (ProcessStartFailed, OSError) as exc:
            return CallResult(f"{self.name} cannot be started: {exc}", is_error=True)
        if why := _failure(answer, self.own.timeout_s):
            errors = bounded(fit(answer.errors or answer.output)).strip()
            return CallResult(
                f"{self.name} {why}." + (f"\n{errors}" if errors else ""), is_error=True
            )
        return read_output(answer)


def _failure(answer: ExchangeAnswer, within_s: float) -> str:
    """Describe the failure; empty if it succeeded."""
    left = f"; still running: {', '.join(map(str, answer.exit.left))}" if answer.exit.left else ""
    if answer.is_late:
        return f"took longer than {within_s:g} s and was ended{left}"
    match answer.exit:
        case ProcessExit(lost=True):
            return "was lost with its supervisor; whether it finished is unknown"
        case ProcessExit(code=0):
            return ""
        case ProcessExit(code=None, signal=signal):
            return f"was ended by signal {signal}{left}"
        case ProcessExit(code=code):
            return f"failed with exit status {code}{left}"


# --- output


def read_output(answer: ExchangeAnswer) -> CallResult:
    """Return the result of a successful command: JSON with a content, or plain text."""
    fields = None if answer.is_cut else _json_of(answer.output)
    if fields is None or "content" not in fields:
        text = fit(answer.output)
        more = f"\n[… the output has more than {OUTPUT_BYTES_MAX:,} bytes …]"
        return CallResult(bounded(text) + more if answer.is_cut else bounded(text))
    content = fields["content"]
    text = content if isinstance(content, str) else encode(content).decode()
    metadata = encode(fields["metadata"]) if isinstance(fields.get("metadata"), dict) else b""
    if len(metadata) > METADATA_BYTES_MAX:
        metadata = b""  # Clients do not show that much.
    is_error = fields.get("is_error") is True
    return CallResult(bounded(fit(text.encode())), is_error=is_error, metadata=metadata.decode())


def _json_of(output: bytes) -> dict[str, Json] | None:
    try:
        value = msgspec.json.decode(output)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return cast("dict[str, Json]", value) if isinstance(value, dict) else None


def bounded(text: str) -> str:
    """Limit a text for a model: its beginning and its end."""
    output = CommandOutput(None)
    output.feed(text.encode(errors="replace"))
    return output.text()


# --- arguments

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def schema_problems(arguments: dict[str, Json], schema: dict[str, Json]) -> Iterator[str]:
    """Yield the problems of arguments: wrong types, missing and unknown names."""
    yield from _problems(arguments, {"type": "object", **schema}, "", DEPTH_MAX)


def _problems(value: Json, schema: Json, at: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or not depth:
        return
    fields = cast("dict[str, Json]", schema)
    if problem := _wrong_kind(value, fields.get("type")) or _not_listed(value, fields.get("enum")):
        yield f"{at or 'it'} {problem}"
        return
    if isinstance(value, dict):
        yield from _object_problems(cast("dict[str, Json]", value), fields, at, depth)
    elif isinstance(value, list) and "items" in fields:
        for number, item in enumerate(cast("list[Json]", value)):
            yield from _problems(item, fields["items"], f"{at}[{number}]", depth - 1)


def _object_problems(
    arguments: dict[str, Json], schema: dict[str, Json], at: str, depth: int
) -> Iterator[str]:
    known = schema.get("properties")
    properties = cast("dict[str, Json]", known) if isinstance(known, dict) else {}
    required = schema.get("required")
    for name in cast("list[Json]", required) if isinstance(required, list) else []:
        if isinstance(name, str) and name not in arguments:
            yield f"{_step(at, name)} is missing"
    for name, inner in arguments.items():
        if name in properties:
            yield from _problems(inner, properties[name], _step(at, name), depth - 1)
        elif schema.get("additionalProperties") is False:
            yield f"{_step(at, name)} is unknown; known: {', '.join(properties) or 'none'}"


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
