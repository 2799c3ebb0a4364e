"""Parents with their fleets, clients that start runs and interfere, and faults."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec import Raw

from culm.errors import LimitExceeded, ShuttingDown
from culm.fleet.discovery.base import RENEW_S
from culm.fleet.executor import HostCallFailed, SteerMessage
from culm.fleet.host.caller import RunControl, WorkerAsk
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.pool import PoolBounds
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import CulmExtension, EchoKind, Identity, Provision, ProvisionLimits
from culm.wire.codec import Json
from tests.sim.fleet_executors import ASK_S, ENOUGH
from tests.sim.fleet_network import Line
from tests.sim.fleet_workers import SimLauncher, SimWorker, end_leftovers
from tests.sim.fleet_world import CURRENT_RUN, FleetWorld, Process, SimRun

GOOD = ("echo", "echo", "mute", "slow", "flood", "ask", "ask", "call", "steer", "steer", "cling")
BAD = ("crash", "die", "hang", "deaf")
PATIENCE_S = 220.0  # Longer than any orderly run takes.
PARENTS_MAX = 3
FIRST_FRAME_S = 20.0
CANCEL_S = 12.0  # For a cancelled run to end: 9 s for its worker, and then to end it.


class SimParent:
    """A server with a fleet: from its start to its end, or to a kill."""

    def __init__(self, world: FleetWorld, runs: int) -> None:
        dice = world.dice
        self.world = world
        self.process = Process(world, f"parent{world.number()}")
        self.bounds = FleetBounds(
            runs_max=dice.choice((1, 2, 3, 200)),
            waiting_max=dice.choice((1, 1_000, 1_000)),
            first_frame_s=FIRST_FRAME_S,
            pool=PoolBounds(
                idle_per_key_max=dice.choice((1, 2)),
                idle_max=dice.choice((1, 3)),
                idle_s=dice.choice((5.0, 100.0)),
                sweep_s=10.0,
            ),
        )
        self.launcher = SimLauncher(self.process, self.bounds)
        self.clients = [RunClient(self) for _ in range(runs)]
        self.process.begin(self._main)

    async def _main(self) -> None:
        world, dice = self.world, self.world.dice
        end_leftovers(world)
        async with asyncio.TaskGroup() as tasks:
            async with open_fleet(self.launcher, self.process.clock, self.bounds) as fleet:
                wanting = {tasks.create_task(one.live(fleet)) for one in self.clients}
                hurry_s = 0.5 if world.chance(0.1) else None
                await asyncio.wait(wanting, timeout=hurry_s)
                if hurry_s is None:
                    await asyncio.sleep(dice.choice((0, 0, 0, 0, 10, 150)))
                for one in self.clients:
                    one.on_close()
                self.launcher.is_closing = True
                world.note("close", self.process.name)
            is_done = not fleet.workers or self.process.was_stopped  # Its timeouts ran meanwhile.
            world.expect(is_done, "left:", [worker.id for worker in fleet.workers])
            for worker in self.launcher.workers:
                found = world.discovery.resolve(worker.id)
                world.expect(not worker.is_alive, worker.id, "is alive after the end")
                world.expect(found is None, worker.id, "is found after the end")

    def check_pool(self, fleet: Fleet) -> None:
        """Check that idle workers are not busy and within the pool bounds."""
        idle = [one.worker for one in fleet._parked]  # pyright: ignore[reportPrivateUsage]
        parked = [one for one in self.launcher.workers if one in idle]
        keys = Counter(one.key for one in fleet._parked)  # pyright: ignore[reportPrivateUsage]
        for worker in parked:
            self.world.expect(not worker.is_busy, "parked, and at work:", worker.id)
            # A lease names a time of day, so a change of it matters until the next renewal.
            was_set = self.world.loop.time() < self.world.loop.time_set_at_s + RENEW_S
            self.world.expect(worker.is_found or was_set, "parked, and not to be found:", worker.id)
        most = max(keys.values(), default=0)
        pool = self.bounds.pool
        is_bounded = most <= pool.idle_per_key_max and len(parked) <= pool.idle_max
        self.world.expect(is_bounded, "too many wait:", keys)


class RunClient:
    """Starts one run, follows it and interferes with it. Implements `HostCallbacks`."""

    def __init__(self, parent: SimParent) -> None:
        self.world = world = parent.world
        self._dice = dice = world.dice
        self._parent = parent
        kind = dice.choice(BAD) if world.chance(0.2) else dice.choice(GOOD)
        self.run = SimRun(f"r{world.number()}", kind, dice.choice((0, 1, 1)), parent.process)
        world.runs[self.run.token] = self.run
        self.controls = RunControl()
        self._takes_calls = kind in ("call", "steer") or dice.random() < 0.85
        self._is_slow = dice.random() < 0.25

    async def live(self, fleet: Fleet) -> None:
        CURRENT_RUN.set(self.run.token)
        await asyncio.sleep(self._dice.choice((0, 0, 0.01, 0.2, 3, 3.1)))
        impatience = self.world.loop.call_later(PATIENCE_S, self.cancel, "waited long enough")
        async with asyncio.TaskGroup() as tasks:
            interfering = tasks.create_task(self._interfere())
            await self._run_to_end(fleet)
            impatience.cancel()
            interfering.cancel()

    async def _run_to_end(self, fleet: Fleet) -> None:
        run, dice = self.run, self._dice
        provision = Provision(
            version=2,
            identity=Identity(f"c{dice.randrange(3)}", role=dice.choice(("a", "a", "a", "b"))),
            executor=EchoKind(),
            fabric_dir="/fabric",
            limits=ProvisionLimits(run_timeout_secs=self._draw_limit(0.05, "limited", 1, 30)),
            culm=CulmExtension(host_calls=self._takes_calls),
        )
        spec = RunSpec(f"{run.kind} {run.token} {dice.randint(1, 8)}", execution_epoch=run.epoch)
        try:
            async with asyncio.timeout(self._draw_limit(0.04, "given up", 0, 0.01, 0.3, 5)):
                run.driven.append(await fleet.run(provision, spec, self, self.controls))
        except (LimitExceeded, ShuttingDown) as exc:
            self.world.harm(run.token, "not taken on")
            run.refused = repr(exc)
        except (RuntimeError, TimeoutError) as exc:
            run.refused = repr(exc)
        run.is_over = True
        run.over_s = self.world.loop.time()
        run.back = self.controls.unadmitted
        self.world.note("over", run.token, run.driven, run.refused)
        is_deaf = "not taken on" in run.harms or not self.controls.steer("late")
        self.world.expect(is_deaf, run.token, "is steered after its end")
        links = [line.number for line in self.world.lines if self._holds(line)]
        self.world.expect(not links, run.token, "is over, and holds", links)
        self._parent.check_pool(fleet)

    def _holds(self, line: Line) -> bool:
        return line.token == self.run.token and not line.parent_end.is_closed

    def _draw_limit(self, share: float, why: str, *limits_s: float) -> float | None:
        """A limit for a few runs; a run with a limit need not complete."""
        if not self.world.chance(share):
            return None
        self.world.harm(self.run.token, why)
        return self._dice.choice(limits_s)

    # --- steering and cancelling

    async def _interfere(self) -> None:
        dice, run = self._dice, self.run
        for _ in range(dice.choice((0, 0, 1, 3)) + (run.kind == "steer")):
            await asyncio.sleep(dice.choice((0, 0.001, 0.05, 0.5, 3)))
            if self.world.chance(0.12):
                self.cancel("cancelled")
            self._steer(f"say {self.world.number()}")
        if run.kind == "steer":
            await asyncio.sleep(dice.choice((0, 1)))
            self._steer(ENOUGH)

    def _steer(self, text: str) -> None:
        steer = SteerMessage(text, f"m{self.world.number()}" if self._takes_calls else "")
        if self.controls.steer(steer.text, steer.id):
            self.run.steers.append(steer)

    def cancel(self, why: str) -> None:
        self.world.harm(self.run.token, why)
        self.run.parent.do(self.controls.cancel)
        self.world.loop.call_later(CANCEL_S, self._check_end)

    def _check_end(self) -> None:
        is_able = self.run.parent.is_alive and not self.run.parent.was_stopped
        self.world.expect(self.run.is_over or not is_able, self.run.token, "does not end")

    def on_close(self) -> None:
        if not self.run.is_over:
            self.world.harm(self.run.token, "the fleet closes")

    # --- callbacks

    async def on_event(self, event: Raw) -> None:
        run = self.run
        self.world.expect(not run.is_over, run.token, "receives an event after its end")
        if self.world.chance(0.002):
            self.world.harm(run.token, "its callbacks fail")
            raise RuntimeError("the callback fails")
        run.events.append(msgspec.json.decode(event))
        if self._is_slow:
            await asyncio.sleep(self._dice.choice((0, 0.01, 0.3)))

    async def on_gap(self) -> None:
        self.run.gaps += 1

    async def on_ask(self, ask: WorkerAsk) -> bool:
        run, dice = self.run, self._dice
        asked_again = ask.resource in run.answers
        self.world.expect(not asked_again and not run.is_over, "asked again:", ask.resource)
        run.answers[ask.resource] = False
        if self.world.chance(0.1):
            run.slow_answers.add(ask.resource)
            await asyncio.sleep(2 * ASK_S)
        await asyncio.sleep(dice.choice((0, 0, 0.01, 1)))
        if self.world.chance(0.1):
            raise RuntimeError("nobody knows")
        run.answers[ask.resource] = approved = dice.random() < 0.7
        return approved

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        self.world.expect(not self.run.is_over, "called after the end:", tool_call_id)
        await asyncio.sleep(self._dice.choice((0, 0, 0.1, 20)))
        if self._dice.random() < 0.2:
            raise self._dice.choice((HostCallFailed("not now"), RuntimeError("nobody knows how")))
        return {"did": args["name"]}


# --- faults


class FaultInjector:
    """Kills, stops and cuts, a few times."""

    def __init__(self, world: FleetWorld) -> None:
        self.world = world
        self.parents = [SimParent(world, world.dice.randint(3, 5))]  # Successive parents.

    async def run(self) -> None:
        dice = self.world.dice
        for _ in range(dice.choice((0, 1, 2, 3, 4)) if self.world.faulty else 0):
            await asyncio.sleep(dice.choice((0, 0.003, 0.03, 0.3, 0.3, 2, 30)))
            match dice.randrange(10):
                case 0 | 1 | 2:
                    self._kill_worker()
                case 3 | 4:
                    self._stop_worker()
                case 5 | 6 | 7:
                    self._cut_line()
                case 8:
                    self._stop_parent()
                case _:
                    self._kill_parent()

    @property
    def parent(self) -> SimParent:
        return self.parents[-1]

    def _pick_worker(self) -> SimWorker | None:
        alive = [one for one in self.parent.launcher.workers if one.is_alive]
        return self.world.dice.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        worker = self._pick_worker()
        if worker is not None:
            worker.strike()

    def _stop_worker(self) -> None:
        worker = self._pick_worker()
        if worker is not None and self._stop(worker.process):
            worker.hurt("its worker was stopped")

    def _cut_line(self) -> None:
        lines = [
            line
            for worker in self.parent.launcher.workers
            for line in worker.listener.lines
            if line.is_open
        ]
        if lines:
            self.world.dice.choice(lines).cut("cut")

    def _stop_parent(self) -> None:
        if self.parent.process.is_alive and self._stop(self.parent.process):
            self._hurt_all("its parent was stopped")

    def _kill_parent(self) -> None:
        """Kill the parent; the next one starts at once with its leftovers."""
        if self.parent.process.is_alive and len(self.parents) < PARENTS_MAX:
            self.world.note("kill -9", self.parent.process.name)
            self._hurt_all("its parent was killed")
            self.parent.process.end()
            self.parents.append(SimParent(self.world, 2))

    def _hurt_all(self, why: str) -> None:
        for customer in self.parent.clients:
            if not customer.run.is_over:
                self.world.harm(customer.run.token, why)

    def _stop(self, process: Process) -> bool:
        """Stop a process as by SIGSTOP; return True if the stop is long enough to matter."""
        delay_s = self.world.dice.choice((0.01, 0.5, 4, 70))
        self.world.note("stop", process.name, delay_s)
        process.stop()
        self.world.loop.call_later(delay_s, process.resume)
        return delay_s > 5
