"""`bamboo_runtime`: the same loop as a run of the server, with model and tools inside the worker.

Owns what all runs of a worker share: connections to its provider and threads for file work, from
the first run until `close`. What one run has is `runtime_bench.py`'s; what its host hears of it is
`runtime_journal.py`'s; what it may do is `runtime_admission.py`'s.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from msgspec import UNSET

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
    policy_terms_of,
)
from culm.fleet.worker.executors.runtime_history import history_from
from culm.fleet.worker.executors.runtime_host import HostDelegation, HostMeter
from culm.fleet.worker.executors.runtime_journal import EventJournal
from culm.fleet.worker.executors.runtime_model import SingleModel, choose
from culm.fleet.worker.executors.runtime_settings import RuntimeSettings, read_settings
from culm.fleet.worker.executors.runtime_tools import RuntimeTools, ToolOffer, open_runtime_tools
from culm.fleet.worker.executors.runtime_turn import TurnWork, end, find_project_context, run_turn
from culm.ids import RunId, SessionId
from culm.model.choice import ChosenModel, make_model
from culm.permission.hooks import Hooks
from culm.run.budget import FreeMeter
from culm.run.limits import price_of
from culm.run.loop import ActiveModel
from culm.run.setting import JournalSetting
from culm.run.system_prompt import system_prompt
from culm.settings import Settings
from culm.tools.agent_tools import make_agent_tools
from culm.tools.base import CallRequest
from culm.tools.files.file_executor import WALL_S, FileExecutor
from culm.wire.codec import Json
from culm.wire.runs import Limits

log = logging.getLogger(__name__)

_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Of all runs of a worker."""

    http: aiohttp.ClientSession
    work: FileExecutor


@dataclass(frozen=True, slots=True)
class _Run:
    """One run, as far as it is known before anything is opened."""

    id: RunId
    session_id: SessionId
    spec: RunSpec
    capabilities: Capabilities
    chosen: ChosenModel
    steer: SteerInbox
    cancel: CancelToken
    host: RunHost


def make_bamboo_runtime(provision: Provision, services: WorkerServices) -> "BambooRuntime":
    """Raises `BadProvision`. Opens nothing."""
    return BambooRuntime(provision, services, read_settings(provision.culm))


class BambooRuntime:
    """Runs may overlap: they share nothing that one of them can change."""

    def __init__(
        self, provision: Provision, services: WorkerServices, given: RuntimeSettings
    ) -> None:
        self._provision = provision
        self._services = services
        self._given = given
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
        async with open_event_sender(events) as telling:
            try:
                return await self._run_turn(run, telling)
            except ModelFailed as exc:
                return failed(_describe(exc))
            except RunEnded:  # Nobody is left to hear of it.
                return CANCELLED
            except Exception:  # boundary: a bug in one run is that run's error
                log.exception("run %s failed", run.id)
                return failed("Internal error: see the worker's log.")

    async def close(self) -> None:
        """Nothing runs any more: let go of what the runs shared."""
        shared, self._shared = self._shared, None
        if shared is not None:
            try:
                await shared.work.close()
            finally:
                await shared.http.close()

    def _check(self, spec: RunSpec, steer: SteerInbox, cancel: CancelToken, host: RunHost) -> _Run:
        """Raises `ModelFailed` and `BadProvision`, in words for the host."""
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
            chosen=choose(self._provision, self._given.chosen, spec.reasoning_effort),
            steer=steer,
            cancel=cancel,
            host=host,
        )

    def _open_shared(self) -> _Shared:
        """Plain, so that of runs that begin together the first one opens it for all."""
        if self._shared is None:
            http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
            self._shared = _Shared(http, FileExecutor(self._services.clock, WALL_S))
        return self._shared

    async def _run_turn(self, run: _Run, telling: EventSender) -> Outcome:
        for event in self._opening_events(run):
            await telling.send(event)
        services, shared = self._services, self._open_shared()
        try:
            path = await shared.work.run(lambda _: self._find_workspace(run))
        except OSError as exc:  # A disk that does not answer in time is one, without words.
            return failed(f"there is nowhere to work: {str(exc) or 'the disk does not answer'}")
        chosen, models = run.chosen, await self._models(run, shared, path)
        journal = EventJournal(
            telling,
            run.steer,
            run.cancel,
            JournalSetting(
                chosen.settings.model,
                chosen.provider_id,
                chosen.info.context_window,
                compacts=self._provision.culm.compacts,
            ),
            services.clock,
            services.ids,
            run_id=run.id,
            session_id=run.session_id,
            history=history_from(run.spec.messages, run.spec.assignment, run.session_id),
        )
        meter = HostMeter(run.host, telling) if run.host.takes_calls else FreeMeter()
        async with open_runtime_tools(
            services,
            shared.work,
            path,
            self._folder_of(run),
            self._env(),
            run_id=run.id,
            session_id=run.session_id,
            offer=self._offer(run),
        ) as bench:
            admission, limits = self._admission(run, bench, telling), self._limits()
            work = TurnWork(services, telling, journal, bench, admission, models, limits, meter)
            ending = await run_turn(work, run.cancel)
        return await end(work, ending)

    def _opening_events(self, run: _Run) -> Iterator[dict[str, Json]]:
        """Told before anything else: a host waits for a sign of life, and some for the first."""
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
        """The run's own, which goes with it: the next one may be another child's."""
        return self._services.storage / "runs" / run.id

    def _find_workspace(self, run: _Run) -> Path:
        """Where the run works. Blocks as the disk does; raises OSError."""
        make_private(self._services.storage)
        if self._provision.workspace is None:
            return make_private(self._folder_of(run) / "workspace")
        path = Path(self._provision.workspace)
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is no directory")
        return path

    def _env(self) -> Mapping[str, str]:
        """Of processes that tools start. No credential was ever put there by us."""
        given = self._provision.culm.env
        return dict(os.environ) if given is None else given

    def _limits(self) -> Limits:
        return Limits(steps=self._provision.limits.max_rounds or _DEFAULTS.run_steps_max)

    async def _models(self, run: _Run, shared: _Shared, path: Path) -> SingleModel:
        """Raises `ModelFailed`."""
        chosen = run.chosen
        paths, now_s = self._given.context_paths, self._services.clock.now_s()
        around = await find_project_context(shared.work, path, paths, now_s)
        model = make_model(
            chosen,
            shared.http,
            first_byte_s=_DEFAULTS.model_first_byte_s,
            stall_s=_DEFAULTS.model_stall_s,
        )
        price = price_of(chosen.info, flat_rate=chosen.flat_rate)
        words = (system_prompt(around, chosen.system_prefix), self._provision.culm.prompt)
        system = "\n\n".join(filter(None, words))
        return SingleModel(ActiveModel(model, chosen.settings, price, system))

    def _offer(self, run: _Run) -> ToolOffer:
        """What needs a host is offered only where there is one that does it."""
        said, disabled = self._provision.culm, self._provision.disabled_tools or ()
        can = run.capabilities
        # That nobody is asked before one runs does not say that it only reads.
        is_read_only = can.is_read_only or can.mode == "plan"
        own_tools = {} if is_read_only else self._given.own_tools
        if not run.host.takes_calls:
            return ToolOffer(own_tools=own_tools, disabled=disabled)
        refusal = refusal_to_start(can, self._provision.identity.depth)
        delegation = HostDelegation(run.host)
        agent_tools = make_agent_tools(delegation, may_start=not refusal, roles=said.roles)
        withheld = {"agent": refusal} if refusal else {}
        return ToolOffer(agent_tools, own_tools, said.questions, disabled, withheld)

    def _admission(self, run: _Run, bench: RuntimeTools, telling: EventSender) -> RuntimeGate:
        workspace = str(bench.context.inside.root)
        terms, is_read_only = policy_terms_of(
            run.capabilities, self._given, workspace=workspace, home=bench.home
        )
        hooks = Hooks(bench.context, lambda: self._given.hooks)

        def on_allowed(call: CallRequest, by: str) -> None:
            if by in ("approve", "hook"):  # Whoever watches is shown what nobody was asked about.
                told = {"type": "call_allowed", "tool_call_id": call.id, "by": by}
                telling.send_nowait({**told})

        return RuntimeGate(
            run.host,
            self._services.clock,
            terms,
            is_read_only,
            hooks.run,
            self._provision.culm.ask_s or ASK_S,
            on_allowed,
        )


def refusal_to_start(can: Capabilities, depth: int) -> str:
    """Why an agent at this depth starts no others, for its model; empty if it may."""
    if not can.nested_spawn:
        limit = "this one may start no others"
    elif depth >= can.depth_max:
        limit = f"agents nest at most {can.depth_max} deep, and this one is at {depth}"
    else:
        return ""
    return f"agent: {limit}; do it yourself"


def _describe(failure: ModelFailed) -> str:
    return f"{failure.title}: {failure.message}"
