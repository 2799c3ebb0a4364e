"""Profiles of command-line agents: their command lines and the parsers of their output.

Pure: a line goes in, the parsed output comes out. `claude`, `codex` and `crush` follow the
documentation of these programs and are tested with stand-ins; they are not verified against the
real programs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast

import msgspec
from msgspec import Struct, field

from culm.fleet.provision import BadProvision, ClaudeKind, CliKind, CodexKind
from culm.wire.codec import Json

Event = Mapping[str, Json]


class AgentOutput(Struct, frozen=True):
    """The parsed content of one line."""

    events: list[Event] = field(default_factory=list[Event])
    text: str = ""  # Part of the result, unless a line has the whole result.
    result: str | None = None  # The whole result.
    error: str | None = None  # The program reports that it failed.
    usage: tuple[int, int] | None = None  # Tokens in and out.


NOTHING: Final = AgentOutput()
Reader = Callable[[str], AgentOutput]


class CliProfile(Struct, frozen=True):
    """A program's command line and the parser of its output."""

    argv: list[str]
    read: Reader
    in_argument: bool = False  # The assignment is the last argument, not the standard input.
    forward_env: tuple[str, ...] = ()


# --- command lines


def profile_of(kind: CliKind | ClaudeKind | CodexKind, *, read_only: bool) -> CliProfile:
    """Return the profile of an executor kind; raises `BadProvision`."""
    match kind:
        case CliKind():
            return _profile_of_cli(kind, read_only=read_only)
        case ClaudeKind():
            return _profile_of_claude(kind, read_only=read_only)
        case CodexKind():
            return _profile_of_codex(kind, read_only=read_only)


def _profile_of_cli(kind: CliKind, *, read_only: bool) -> CliProfile:
    if not kind.command:
        raise BadProvision("executor.command is empty")
    match kind.profile:
        case "claude":
            claude = _profile_of_claude(ClaudeKind(kind.command), read_only=read_only)
            return CliProfile([*claude.argv, *kind.args], claude.read)
        case "codex":
            *argv, stdin = _profile_of_codex(CodexKind(kind.command), read_only=read_only).argv
            return CliProfile([*argv, *kind.args, stdin], read_codex)
        case "crush" | "":
            if read_only:
                raise BadProvision("a command cannot be kept from writing: read_only is refused")
            if kind.profile:
                return CliProfile([kind.command, "run", "--quiet", *kind.args], read_text)
            read = read_json if kind.output == "json" else read_text
            return CliProfile([kind.command, *kind.args], read, kind.input == "argument")
        case _:
            raise BadProvision("executor.profile is not one of claude, codex, crush")


def _profile_of_claude(kind: ClaudeKind, *, read_only: bool) -> CliProfile:
    argv = [kind.binary or "claude", "-p", "--output-format", "stream-json", "--verbose"]
    # Always set: by default, without a terminal, the program may allow everything.
    argv += ["--permission-mode", "plan" if read_only else kind.permission_mode or "default"]
    if kind.model:
        argv += ["--model", kind.model]
    if not kind.inherit_user_config:
        argv += ["--strict-mcp-config", "--setting-sources", "project"]
    return CliProfile(argv, read_claude, forward_env=tuple(kind.forward_env))


def _profile_of_codex(kind: CodexKind, *, read_only: bool) -> CliProfile:
    for name, is_given in (
        ("mode", kind.mode not in (None, "exec")),
        ("auth_mode", kind.auth_mode not in (None, "inherit", "api_key")),
        ("base_url", kind.base_url is not None),
        ("provider_key_ref", kind.provider_key_ref is not None),
    ):
        if is_given:
            raise BadProvision(f"this value of executor.{name} is not supported for codex")
    argv = [kind.binary or "codex", "exec", "--json"]
    if kind.model:
        argv += ["--model", kind.model]
    if read_only or kind.sandbox:
        argv += ["--sandbox", "read-only" if read_only else kind.sandbox or ""]
    elif kind.allow_danger_bypass:
        argv.append("--dangerously-bypass-approvals-and-sandbox")
    if kind.approval_policy:
        argv += ["-c", f"approval_policy={_toml(kind.approval_policy)}"]
    if kind.network_access is not None and not read_only:
        allowed = str(kind.network_access).lower()
        argv += ["-c", f"sandbox_workspace_write.network_access={allowed}"]
    if kind.workspace_owned:
        argv.append("--skip-git-repo-check")
    return CliProfile([*argv, "-"], read_codex, forward_env=tuple(kind.forward_env))


def _toml(text: str) -> str:
    return msgspec.json.encode(text).decode()


# --- output


def read_text(line: str) -> AgentOutput:
    """Parse plain text: each line is part of the answer."""
    return _text_of(f"{line}\n")


# Only events about the program's own text and tools; all others are sent by the worker.
_PASSED: Final = frozenset(
    {
        "token",
        "reasoning_token",
        "tool_token",
        "tool_start",
        "tool_complete",
        "tool_error",
        "tool_lifecycle",
        "runner_progress",
    }
)


def read_json(line: str) -> AgentOutput:
    """Parse events in the format of a worker, one per line, plus `result` and `error`.

    A line that is not a JSON object is part of the answer.
    """
    found = _find_object(line)
    if found is None:
        return read_text(line) if line.strip() else NOTHING
    match found.get("type"):
        case "token":
            content = _text(found.get("content"))
            return AgentOutput([{"type": "token", "content": content}], text=content)
        case "result":
            return AgentOutput(result=_text(found.get("result")) or _text(found.get("text")))
        case "error":
            return AgentOutput(error=_text(found.get("message")) or "it failed without a message")
        case str(kind) if kind in _PASSED:
            return AgentOutput([found])
        case _:
            return NOTHING


def read_claude(line: str) -> AgentOutput:
    found = _find_object(line) or {}
    match found.get("type"):
        case "assistant" | "user":
            return _merged(_read_claude_block(block) for block in _blocks(found.get("message")))
        case "result":
            text = _text(found.get("result"))
            if found.get("is_error"):
                return AgentOutput(error=text or _text(found.get("subtype")) or "it failed")
            return AgentOutput(result=text, usage=_usage(found))
        case _:
            return NOTHING


def _blocks(message: Json) -> list[dict[str, Json]]:
    content = _object(message).get("content")
    if isinstance(content, str):
        return []  # The prompt, not output of the program.
    return [_object(block) for block in _list(content)]


def _read_claude_block(block: dict[str, Json]) -> AgentOutput:
    match block.get("type"):
        case "text":
            return _text_of(_text(block.get("text")) + "\n")
        case "thinking":
            return AgentOutput(
                [{"type": "reasoning_token", "content": _text(block.get("thinking"))}]
            )
        case "tool_use":
            name, arguments = _text(block.get("name")), _object(block.get("input"))
            return AgentOutput([_started(_text(block.get("id")), name, arguments)])
        case "tool_result":
            content = block.get("content")
            pieces = [_text(_object(piece).get("text")) for piece in _list(content)]
            text = content if isinstance(content, str) else "\n".join(pieces)
            is_error = bool(block.get("is_error"))
            return AgentOutput([_ended(_text(block.get("tool_use_id")), text, is_error=is_error)])
        case _:
            return NOTHING


def read_codex(line: str) -> AgentOutput:
    found = _find_object(line) or {}
    item = _object(found.get("item"))
    match found.get("type"), item.get("type"):
        case "item.completed", "agent_message":
            text = _text(item.get("text"))
            # The last message is the answer.
            return AgentOutput([{"type": "token", "content": f"{text}\n"}], result=text)
        case "item.completed", "reasoning":
            return AgentOutput([{"type": "reasoning_token", "content": _text(item.get("text"))}])
        case "item.started", "command_execution":
            arguments = {"command": _text(item.get("command"))}
            return AgentOutput([_started(_text(item.get("id")), "command_execution", arguments)])
        case "item.completed", "command_execution":
            is_error = item.get("exit_code") not in (0, None) or item.get("status") == "failed"
            text = _text(item.get("aggregated_output"))
            return AgentOutput([_ended(_text(item.get("id")), text, is_error=is_error)])
        case "turn.completed", _:
            return AgentOutput(usage=_usage(found))
        case "turn.failed", _:
            return AgentOutput(
                error=_text(_object(found.get("error")).get("message")) or "it failed"
            )
        case _:
            return NOTHING


def _text_of(text: str) -> AgentOutput:
    return AgentOutput([{"type": "token", "content": text}], text=text)


def _started(call_id: str, name: str, arguments: Json) -> Event:
    return {
        "type": "tool_start",
        "tool_call_id": call_id,
        "tool_name": name,
        "arguments": arguments,
    }


def _ended(call_id: str, text: str, *, is_error: bool) -> Event:
    if is_error:
        return {"type": "tool_error", "tool_call_id": call_id, "error": text}
    result = {"success": True, "result": text}
    return {"type": "tool_complete", "tool_call_id": call_id, "result": result}


def _merged(several: Iterator[AgentOutput]) -> AgentOutput:
    outputs = list(several)
    events = [event for one in outputs for event in one.events]
    return AgentOutput(events, text="".join(one.text for one in outputs))


# --- untrusted JSON: a value of the wrong type counts as missing


def _find_object(line: str) -> dict[str, Json] | None:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return cast("dict[str, Json]", value) if isinstance(value, dict) else None


def _object(value: Json) -> dict[str, Json]:
    return cast("dict[str, Json]", value) if isinstance(value, dict) else {}


def _list(value: Json) -> list[Json]:
    return cast("list[Json]", value) if isinstance(value, list) else []


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _usage(found: dict[str, Json]) -> tuple[int, int] | None:
    usage = _object(found.get("usage"))
    tokens_in, tokens_out = usage.get("input_tokens"), usage.get("output_tokens")
    if not isinstance(tokens_in, int) or not isinstance(tokens_out, int):
        return None
    return tokens_in, tokens_out
