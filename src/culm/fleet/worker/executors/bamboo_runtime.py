"""`bamboo_runtime`: the same loop as in a run of the server, with model and tools in the worker.

Owns the resources that all runs of a worker share, from the first run until `close`: connections to
the provider and threads for file work. The tools of one run belong to `runtime_tools.py`, its
events to `runtime_journal.py`, its permissions to `runtime_gate.py`.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
from msgspec import UNSET, Struct

from culm.errors import ModelFailed
from culm.fleet.executor import (
    CANCELLED,
    CancelToken,
    EventSink,
    Outcome,
    RunEnded,
    RunHost,
    SteerInbox,
    failed,
)
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import BadProvision, Capabilities, Provision, check_provision
from culm.fleet.worker.executors.base import WorkerServices, execution_started, make_private
from culm.fleet.worker.executors.runtime_events import EventSender, open_event_sender
from culm.fleet.worker.executors.runtime_gate import (
    ASK_S,
    RuntimeGate,
    capabilities_of,
    policy_input_of,
)
from culm.fleet.worker.executors.runtime_history import history_from
from culm.fleet.worker.executors.runtime_host import HostDelegation, HostMeter
from culm.fleet.worker.executors.runtime_journal import EventJournal
from culm.fleet.worker.executors.runtime_settings import (
    SingleModel,
    choose,
    read_settings,
)
from culm.fleet.worker.executors.runtime_tools import RuntimeTools, ToolOffer, open_runtime_tools
from culm.fleet.worker.executors.runtime_turn import TurnWork, end, find_project_context, run_turn
from culm.ids import RunId, SessionId
from culm.model.choice import ChosenModel, make_model
from culm.permission.hooks import Hooks
from culm.run.budget import FreeMeter
from culm.run.journal import JournalSetting
from culm.run.limits import price_of
from culm.run.loop import ActiveModel
from culm.run.project_context import system_prompt
from culm.settings import Settings
from culm.tools.agent_tools import make_agent_tools
from culm.tools.base import CallRequest
from culm.tools.files.file_executor import WALL_S, FileExecutor
from culm.wire.codec import Json
from culm.wire.runs import Limits

log = logging.getLogger(__name__)

_DEFAULTS = Settings()


class _Shared(Struct, frozen=True):
    """The resources shared by all runs of a worker."""

    http: aiohttp.ClientSession
    work: FileExecutor


class _Run(Struct, frozen=True):
    """The checked parameters of one run."""

    id: RunId
    session_id: SessionId
    spec: RunSpec
    capabilities: Capabilities
    chosen: ChosenModel
    steer: SteerInbox
    cancel: CancelToken
    host: RunHost


class BambooRuntime:
    """Implements `Executor`. Runs may overlap: they share no state that one of them can change."""

    def __init__(self, provision: Provision, services: WorkerServices) -> None:
        """Open nothing yet; raises `BadProvision`."""
        self._provision = provision
        self._services = services
        self._settings = read_settings(provision.culm)
        self._shared: _Shared | None = None

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        if cancel.is_set():
            return CANCELLED
        try:
            run = self._check(spec, steer, cancel, host)
        except ModelFailed as exc:
            return failed(_describe(exc))
        except BadProvision as exc:
            return failed(str(exc))
        async with open_event_sender(events) as sender:
            try:
                return await self._run_turn(run, sender)
            except ModelFailed as exc:
                return failed(_describe(exc))
            except RunEnded:  # The host is gone.
                return CANCELLED
            except Exception:  # boundary: a bug in one run is an error of that run only
                log.exception("run %s failed", run.id)
                return failed("Internal error: see the worker's log.")

    async def close(self) -> None:
        """Release the shared resources. No run may be active."""
        shared, self._shared = self._shared, None
        if shared is not None:
            try:
                await shared.work.close()
            finally:
                await shared.http.close()

    def _check(self, spec: RunSpec, steer: SteerInbox, cancel: CancelToken, host: RunHost) -> _Run:
        """Check the run's parameters; raises `ModelFailed` and `BadProvision` for the host."""
        policy = spec.permission_policy
        capabilities = capabilities_of(self._provision.capabilities, policy)
        if policy is not None:
            if policy.environment_lease not in (UNSET, None):
                raise BadProvision("permission_policy: an environment_lease is not supported")
            try:
                check_provision(msgspec.structs.replace(self._provision, capabilities=capabilities))
            except BadProvision as exc:
                raise BadProvision(f"permission_policy: {exc}") from exc
        ids, logical = self._services.ids, spec.logical_session
        return _Run(
            id=ids.run(),
            session_id=ids.session() if logical is None else SessionId(logical.session_id),
            spec=spec,
            capabilities=capabilities,
            chosen=choose(self._provision, self._settings.chosen, spec.reasoning_effort),
            steer=steer,
            cancel=cancel,
            host=host,
        )

    def _open_shared(self) -> _Shared:
        """Open the shared resources once. Not async, so that runs starting together do not race."""
        if self._shared is None:
            http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
            self._shared = _Shared(http, FileExecutor(self._services.clock, WALL_S))
        return self._shared

    async def _run_turn(self, run: _Run, sender: EventSender) -> Outcome:
        for event in self._opening_events(run):
            await sender.send(event)
        services, shared = self._services, self._open_shared()
        try:
            path = await shared.work.run(lambda _: self._find_workspace(run))
        except OSError as exc:  # Includes the timeout of a slow disk, which has no message.
            return failed(f"cannot open the workspace: {str(exc) or 'the disk does not answer'}")
        chosen, models = run.chosen, await self._models(run, shared, path)
        journal = EventJournal(
            sender,
            run.steer,
            run.cancel,
            JournalSetting(
                chosen.settings.model,
                chosen.provider_id,
                chosen.info.context_window if self._provision.culm.compacts else 0,
                price=models.current.price,
            ),
            services.clock,
            services.ids,
            run_id=run.id,
            session_id=run.session_id,
            history=history_from(run.spec.messages, run.spec.assignment, run.session_id),
        )
        meter = HostMeter(run.host, sender) if run.host.takes_calls else FreeMeter()
        async with open_runtime_tools(
            services,
            shared.work,
            path,
            self._folder_of(run),
            self._env(),
            run_id=run.id,
            session_id=run.session_id,
            offer=self._offer(run),
        ) as tools:
            gate, limits = self._gate(run, tools, sender), self._limits()
            work = TurnWork(services, sender, journal, tools, gate, models, limits, meter)
            ending = await run_turn(work, run.cancel)
        return await end(work, ending)

    def _opening_events(self, run: _Run) -> Iterator[dict[str, Json]]:
        """Build the first events of a run: hosts wait for them, some for the very first one."""
        policy = run.spec.permission_policy
        if policy is not None:
            effective = run.capabilities.mode
            yield {
                "type": "permission_posture_activated",
                "session_id": policy.session_id,
                "policy_revision": policy.revision,
                "requested_mode": run.capabilities.permission_requested_mode or effective,
                "effective_mode": effective,
                "executor_mapping": f"bamboo_runtime:{effective}",
            }
        run_id = run.spec.activation_run_id or run.id
        yield execution_started(run_id, run.session_id, self._services.clock.now_s())

    def _folder_of(self, run: _Run) -> Path:
        """Return the run's own folder, removed at its end: the next run may be for another host."""
        return self._services.storage / "runs" / run.id

    def _find_workspace(self, run: _Run) -> Path:
        """Find or create the workspace of a run. Blocks on disk I/O; raises OSError."""
        make_private(self._services.storage)
        if self._provision.workspace is None:
            return make_private(self._folder_of(run) / "workspace")
        path = Path(self._provision.workspace)
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a directory")
        return path

    def _env(self) -> Mapping[str, str]:
        """Return the environment of processes that tools start; culm puts no credentials there."""
        provided = self._provision.culm.env
        return dict(os.environ) if provided is None else provided

    def _limits(self) -> Limits:
        return Limits(steps=self._provision.limits.max_rounds or _DEFAULTS.run_steps_max)

    async def _models(self, run: _Run, shared: _Shared, path: Path) -> SingleModel:
        """Build the model with its system prompt; raises `ModelFailed`."""
        chosen = run.chosen
        paths, now_s = self._settings.context_paths, self._services.clock.now_s()
        context = await find_project_context(shared.work, path, paths, now_s)
        model = make_model(
            chosen,
            shared.http,
            first_byte_s=_DEFAULTS.model_first_byte_s,
            stall_s=_DEFAULTS.model_stall_s,
        )
        price = price_of(chosen.info, flat_rate=chosen.flat_rate)
        prompts = (system_prompt(context, chosen.system_prefix), self._provision.culm.prompt)
        system = "\n\n".join(filter(None, prompts))
        return SingleModel(ActiveModel(model, chosen.settings, price, system))

    def _offer(self, run: _Run) -> ToolOffer:
        """Offer the tools that need a host only if the host takes calls."""
        extension, disabled = self._provision.culm, self._provision.disabled_tools or ()
        can = run.capabilities
        # An own tool may write even if it runs without an approval request.
        is_read_only = can.is_read_only or can.mode == "plan"
        own_tools = {} if is_read_only else self._settings.own_tools
        if not run.host.takes_calls:
            return ToolOffer(own_tools=own_tools, disabled=disabled)
        refusal = refusal_to_start(can, self._provision.identity.depth)
        delegation = HostDelegation(run.host)
        agent_tools = make_agent_tools(delegation, may_start=not refusal, roles=extension.roles)
        withheld = {"agent": refusal} if refusal else {}
        return ToolOffer(agent_tools, own_tools, extension.questions, disabled, withheld)

    def _gate(self, run: _Run, tools: RuntimeTools, sender: EventSender) -> RuntimeGate:
        workspace = str(tools.context.paths.root)
        policy_input, is_read_only = policy_input_of(
            run.capabilities, self._settings, workspace=workspace, home=tools.home
        )
        hooks = Hooks(tools.context, lambda: self._settings.hooks)

        def on_allowed(call: CallRequest, by: str) -> None:
            if by in ("approve", "hook"):  # Clients show calls that were allowed without a request.
                event = {"type": "call_allowed", "tool_call_id": call.id, "by": by}
                sender.send_nowait({**event})

        return RuntimeGate(
            run.host,
            self._services.clock,
            policy_input,
            is_read_only,
            hooks.run,
            self._provision.culm.ask_s or ASK_S,
            on_allowed,
        )


def refusal_to_start(can: Capabilities, depth: int) -> str:
    """Return why an agent at this depth cannot start others, for its model; empty if it can."""
    if not can.nested_spawn:
        limit = "this one may start no others"
    elif depth >= can.depth_max:
        limit = f"agents nest at most {can.depth_max} deep, and this one is at {depth}"
    else:
        return ""
    return f"agent: {limit}; do it yourself"


def _describe(failure: ModelFailed) -> str:
    return f"{failure.title}: {failure.message}"
