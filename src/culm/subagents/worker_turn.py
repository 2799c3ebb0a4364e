"""The turn of an agent's run in a worker, from its provision to its ending.

Owns the state of one such turn. The run itself belongs to `run/`, which also stops it by cancelling
the task that awaits the turn; that ends the worker, too.
"""

import logging
from collections.abc import Callable

from msgspec import Struct

from culm.errors import AppError
from culm.fleet.executor import DENIED_PREFIX, LIMIT_PREFIX, Outcome
from culm.fleet.host.caller import RunControl
from culm.model.choice import Models
from culm.run.journal import TurnJournal
from culm.run.live_run import LiveRun
from culm.run.runs import Runs
from culm.services import WorkerFleet
from culm.store.agents import StoredAgent
from culm.subagents.provisioning import AgentEnvironment, provision_of, spec_of
from culm.subagents.replay import ReplayContext, WorkerReplay
from culm.subagents.start_policy import AgentTerms
from culm.wire.codec import decode
from culm.wire.runs import Ending

log = logging.getLogger(__name__)


class WorkerTurnResult(Struct, frozen=True):
    """The ending of a turn and the files it changed."""

    ending: Ending
    files: tuple[str, ...] = ()


class WorkerTurns(Struct, frozen=True):
    """Runs the turns of a workspace's agents."""

    fleet: WorkerFleet
    models: Models
    runs: Runs
    environment: Callable[[], AgentEnvironment]
    context: ReplayContext

    async def run_turn(
        self, run: LiveRun, journal: TurnJournal, stored: StoredAgent
    ) -> WorkerTurnResult:
        """Run one turn in a worker; raises `AppError`."""
        agent, terms = stored.agent, decode(stored.terms, AgentTerms)
        history = list(journal.history)
        await journal.begin_step()  # Durable before the worker does anything.
        chosen = await self.models.resolve(self.models.current.get(run.provider, run.model))
        approval = run.asked.approval
        provision = provision_of(agent, terms, chosen, approval, self.environment())
        spec = spec_of(run, [*history, *journal.user_messages], agent.parent_session_id)
        controls = RunControl()
        replay = WorkerReplay(run, journal, self.context, lambda: self._steer(run, controls))
        link = _Link(replay, controls)
        self.runs.connect(run, link)
        try:
            driven = await self.fleet.run(provision, spec, replay, controls)
        finally:
            replay.count()
            link.is_over = True
            self.runs.unshare(run)
        if run.account.is_requesting and not driven.is_from_worker:
            journal.count_unreported()  # The report of its last request died with the worker.
        ending = _ending_of(driven.outcome, replay.ending if driven.is_from_worker else None)
        if ending.outcome == "end_turn" and replay.ending is None:
            await replay.finish(replay.answer or driven.outcome.result or "")
        return WorkerTurnResult(ending, tuple(replay.files))

    def _steer(self, run: LiveRun, controls: RunControl) -> None:
        """Send the worker the prompts that wait to join the run."""
        try:
            self.runs.share(run, lambda other: controls.steer(other.asked.prompt, other.id))
        except AppError as exc:
            log.info("a prompt waits for its own turn: %s", exc.message)


class _Link(Struct):
    """Implements `WorkerLink` for one turn."""

    replay: WorkerReplay
    controls: RunControl
    is_over: bool = False

    @property
    def pid(self) -> int:
        return 0 if self.is_over else self.controls.pid or 0

    def has_read(self, run: LiveRun) -> bool:
        return run.id in self.replay.admitted

    def on_join(self) -> None:
        if not self.is_over:
            self.replay.steer()


def _ending_of(outcome: Outcome, replayed: Ending | None) -> Ending:
    """Prefer the ending of the last answer to the worker's own outcome."""
    error = outcome.error or ""
    match outcome.status:
        case "completed":
            return replayed or Ending("end_turn")
        case "cancelled" | "suspended":
            return Ending("error", "The worker stopped", "It ended its run without being asked to.")
        case "error" if error.startswith(DENIED_PREFIX):
            return Ending("denied", "Denied", error.partition(": ")[2])
        case "error" if replayed is not None and replayed.outcome not in ("end_turn", "canceled"):
            return replayed
        case "error" if error.startswith(LIMIT_PREFIX):
            return Ending("budget", "Limit reached", error.partition(": ")[2] or error)
        case "error":
            return Ending("error", "The worker failed", error)
