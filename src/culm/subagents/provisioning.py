"""Build the provision and the run spec that a worker gets for an agent and its assignment. Pure.

The provision is the same for all agents with the same settings, so that an idle worker can take the
next assignment; everything else is part of the run spec.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET, Raw, Struct

from culm.config.layers import ToolConfig
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
from culm.subagents.start_policy import (
    AgentTerms,
    allowed_tools,
    places_of,
    role_text,
    roles_with,
)
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

INTERACTIVE_WAIT_S = 3600  # Longer than in a headless run, because people are there to answer.


class AgentEnvironment(Struct, frozen=True):
    """The settings of a workspace that all its agents share."""

    workspace: Path  # Absolute and without links.
    discovery_dir: Path
    project_key: str
    env: Mapping[str, str]
    tooling: ToolConfig
    tools: Collection[str]  # The names of all tools.
    context: ContextPaths
    depth_max: int
    steps_max: int
    compacts: bool


def provision_of(
    agent: Agent,
    terms: AgentTerms,
    chosen: ChosenModel,
    approval: ApprovalPolicy,
    environment: AgentEnvironment,
) -> Provision:
    """Build the provision of a worker for this agent and for others with the same settings."""
    allowed = allowed_tools(environment.tools, terms)
    *elsewhere, own = str(environment.workspace), *places_of(agent.worktree, terms)
    return Provision(
        version=PROVISION_VERSION,
        identity=Identity(
            child_id=agent.agent_id,
            parent_id=agent.parent_id or None,
            project_key=environment.project_key,
            role=agent.role,
            depth=agent.depth,
        ),
        executor=RuntimeKind(),
        fabric_dir=str(environment.discovery_dir),
        workspace=own,
        model=ModelName(chosen.provider_id, chosen.settings.model),
        # Includes the tools disabled in the configuration: a worker has all tools not listed here.
        disabled_tools=sorted(
            {*environment.tooling.disabled_tools, *environment.tools} - set(allowed)
        ),
        limits=ProvisionLimits(max_rounds=environment.steps_max or None),
        capabilities=Capabilities(
            enforce_permissions=True,
            nested_spawn="agent" in allowed,
            max_spawn_depth=environment.depth_max,
            read_only=agent.is_read_only,
        ),
        culm=_extension(terms, chosen, approval, environment, elsewhere),
    )


def _extension(
    terms: AgentTerms,
    chosen: ChosenModel,
    approval: ApprovalPolicy,
    environment: AgentEnvironment,
    elsewhere: list[str],
) -> CulmExtension:
    tooling = environment.tooling
    return CulmExtension(
        host_calls=True,
        env=dict(environment.env),
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
        context_paths=ProvisionContext(
            list(environment.context.project), list(environment.context.user)
        ),
        compacts=environment.compacts,
    )


def _plain(value: object) -> Json:
    plain: Json = msgspec.to_builtins(value, order="deterministic")
    return plain


def spec_of(run: LiveRun, history: Iterable[Message], above: str) -> RunSpec:
    """Build the spec of a run, with the history of its session; `above` is the parent session."""
    top = run.duty.above[0] if run.duty is not None and run.duty.above else run.session_id
    return RunSpec(
        assignment=run.asked.prompt,
        messages=[Raw(encode(_wire_message(message))) for message in history],
        logical_session=LogicalSession(run.session_id, top, above or None),
        activation_run_id=run.id,
        execution_epoch=1,
    )


def _wire_message(message: Message) -> dict[str, Json]:
    """Encode a message in the format of the wire between hosts and workers."""
    wire: dict[str, Json] = {"id": message.id, "role": message.role}
    wire |= {"model": message.model, "provider": message.provider}
    wire["content"] = full_text(message.parts)
    calls: list[Json] = []
    contents: list[Json] = []
    for part in message.parts:
        match part:
            case ReasoningPart(data=reasoning):
                wire["reasoning"] = reasoning.thinking
                wire["reasoning_signature"] = reasoning.signature
            case ToolCallPart(data=call):
                function: Json = {"name": call.name, "arguments": call.input}
                calls.append({"id": call.id, "type": "function", "function": function})
            case ToolResultPart(data=result):
                wire["tool_call_id"] = result.tool_call_id
                wire["content"] = result.content
                wire["tool_success"] = not result.is_error
            case ImageUrlPart(data=image):
                contents.append({"type": "image_url", "image_url": {"url": image.url}})
            case BinaryPart(data=file):
                contents.append(_file(file.path, file.mime_type, file.data))
            case _:
                pass
    if calls:
        wire["tool_calls"] = calls
    if contents:
        text = {"type": "text", "text": wire["content"]}
        wire["content_parts"] = [text, *contents] if wire["content"] else contents
    return wire


def _file(path: str, mime_type: str, data: bytes) -> Json:
    if mime_type.startswith("text/"):
        text = data.decode(errors="replace")
        return {"type": "text", "text": f'<file path="{path}">\n{text}\n</file>'}
    content = encode(data).decode().strip('"')
    return {"type": "image_url", "image_url": {"url": f"data:{mime_type};base64,{content}"}}
