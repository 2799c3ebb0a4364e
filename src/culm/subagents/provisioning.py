"""An agent and its assignment, as a worker is told of them. Pure.

What a worker is provisioned with is the same for all agents that are alike, so that one that waits
can take the next assignment; what differs is said with the run.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import UNSET, Raw

from culm.config.tooling import ToolConfig
from culm.fleet.protocol.frames import LogicalSession, RunSpec
from culm.fleet.provision import (
    PROVISION_VERSION,
    Capabilities,
    CulmExtension,
    Identity,
    ModelName,
    Provision,
    ProvisionContext,
    ProvisionLimits,
    RuntimeKind,
)
from culm.model.choice import ChosenModel
from culm.permission.gate import HEADLESS_WAIT_S, ApprovalPolicy
from culm.run.live_run import LiveRun
from culm.run.project_context import ContextPaths
from culm.subagents.roles import role_text, roles_with
from culm.subagents.start_policy import AgentTerms, allowed_tools, places_of
from culm.wire.agents import Agent
from culm.wire.codec import Json, encode
from culm.wire.messages import (
    BinaryPart,
    ImageUrlPart,
    Message,
    ReasoningPart,
    ToolCallPart,
    ToolResultPart,
    full_text,
)

INTERACTIVE_WAIT_S = 3600  # People who are there are given more time than a call to nobody.


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where agents work, and what holds there."""

    workspace: Path  # Real and absolute.
    discovery_dir: Path
    project_key: str
    env: Mapping[str, str]
    tooling: ToolConfig
    tools: Collection[str]  # The names of all there are.
    context: ContextPaths
    depth_max: int
    steps_max: int
    compacts: bool


def provision_of(
    agent: Agent,
    terms: AgentTerms,
    chosen: ChosenModel,
    approval: ApprovalPolicy,
    place: AgentPlace,
) -> Provision:
    """For a worker that does this agent's assignments, and those of agents that are alike."""
    allowed = allowed_tools(place.tools, terms)
    *elsewhere, own = str(place.workspace), *places_of(agent.worktree, terms)
    return Provision(
        version=PROVISION_VERSION,
        identity=Identity(
            child_id=agent.agent_id,
            parent_id=agent.parent_id or None,
            project_key=place.project_key,
            role=agent.role,
            depth=agent.depth,
        ),
        executor=RuntimeKind(),
        fabric_dir=str(place.discovery_dir),
        workspace=own,
        model=ModelName(chosen.provider_id, chosen.settings.model),
        # Also what is configured away: a worker has every tool that it is not told to leave out.
        disabled_tools=sorted({*place.tooling.disabled_tools, *place.tools} - set(allowed)),
        limits=ProvisionLimits(max_rounds=place.steps_max or None),
        capabilities=Capabilities(
            enforce_permissions=True,
            nested_spawn="agent" in allowed,
            max_spawn_depth=place.depth_max,
            read_only=agent.is_read_only,
        ),
        culm=_extension(terms, chosen, approval, place, elsewhere),
    )


def _extension(
    terms: AgentTerms,
    chosen: ChosenModel,
    approval: ApprovalPolicy,
    place: AgentPlace,
    elsewhere: list[str],
) -> CulmExtension:
    tooling = place.tooling
    return CulmExtension(
        host_calls=True,
        env=dict(place.env),
        prompt=terms.prompt,
        roles=role_text(roles_with(tooling.roles)),
        chosen=_plain(chosen),
        questions=not approval.headless,
        ask_s=HEADLESS_WAIT_S if approval.headless else INTERACTIVE_WAIT_S,
        approve=UNSET if approval.approve is None else _plain(approval.approve),
        rules=_plain(tooling.rules),
        rules_also_from=elsewhere,
        hooks=_plain(tooling.hooks),
        own_tools=_plain(tooling.own_tools),
        allowed_tools=list(tooling.allowed_tools),
        context_paths=ProvisionContext(list(place.context.project), list(place.context.user)),
        compacts=place.compacts,
    )


def _plain(value: object) -> Json:
    plain: Json = msgspec.to_builtins(value, order="deterministic")
    return plain


def spec_of(run: LiveRun, history: Iterable[Message], above: str) -> RunSpec:
    """The assignment, with all that was said before in its session; `above` is the session's."""
    top = run.duty.above[0] if run.duty is not None and run.duty.above else run.session_id
    return RunSpec(
        assignment=run.asked.prompt,
        messages=[Raw(encode(_spoken(message))) for message in history],
        logical_session=LogicalSession(run.session_id, top, above or None),
        activation_run_id=run.id,
        execution_epoch=1,
    )


def _spoken(message: Message) -> dict[str, Json]:
    """A message in the words of the wire between parents and workers."""
    spoken: dict[str, Json] = {"id": message.id, "role": message.role}
    spoken |= {"model": message.model, "provider": message.provider}
    spoken["content"] = full_text(message.parts)
    calls: list[Json] = []
    contents: list[Json] = []
    for part in message.parts:
        match part:
            case ReasoningPart(data=reasoning):
                spoken["reasoning"] = reasoning.thinking
                spoken["reasoning_signature"] = reasoning.signature
            case ToolCallPart(data=call):
                function: Json = {"name": call.name, "arguments": call.input}
                calls.append({"id": call.id, "type": "function", "function": function})
            case ToolResultPart(data=result):
                spoken["tool_call_id"] = result.tool_call_id
                spoken["content"] = result.content
                spoken["tool_success"] = not result.is_error
            case ImageUrlPart(data=image):
                contents.append({"type": "image_url", "image_url": {"url": image.url}})
            case BinaryPart(data=file):
                contents.append(_file(file.path, file.mime_type, file.data))
            case _:
                pass
    if calls:
        spoken["tool_calls"] = calls
    if contents:
        said = {"type": "text", "text": spoken["content"]}
        spoken["content_parts"] = [said, *contents] if spoken["content"] else contents
    return spoken


def _file(path: str, mime_type: str, data: bytes) -> Json:
    if mime_type.startswith("text/"):
        text = data.decode(errors="replace")
        return {"type": "text", "text": f'<file path="{path}">\n{text}\n</file>'}
    content = encode(data).decode().strip('"')
    return {"type": "image_url", "image_url": {"url": f"data:{mime_type};base64,{content}"}}
