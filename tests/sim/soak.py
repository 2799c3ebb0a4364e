"""More seeds than a test has time for: runs, asks, fleets and trees, as long as one wishes.

`python -m tests.sim.soak [--seeds N] [--from K] [--minutes M] [--jobs J]` tells how far it is, each
seed that fails, and how to repeat it. The exit status is 1 if one did. From seed 0 on, it begins
with every fault at every commit, of which the suite has a part.
"""

import argparse
import logging
import math
import multiprocessing
import os
import sys
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count, islice

from culm.clock import LoopClock
from tests.sim.loop import simulate
from tests.sim.test_asks import one_world as world_of_asks
from tests.sim.test_crashes import ENUMERATED, name_of, survives
from tests.sim.test_fleet import one_world as world_of_fleets
from tests.sim.test_fleet import strange_world
from tests.sim.test_runs import one_world as world_of_runs
from tests.sim.test_tree import one_world as world_of_trees

BATCH = 25  # Seeds between two looks at the clock.
# Each seed is one of each.
WORLDS = (world_of_runs, world_of_asks, world_of_fleets, strange_world, world_of_trees)
Tried = tuple[
    int, list[tuple[int, str]]
]  # How many worlds, and the seeds that failed, each with why.


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=None, help="how many (default: all there is time for)"
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first (default: 0)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=None,
        help="how long (default: 10, or as long as --seeds takes)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if options.seeds is None and options.minutes is None:
        options.minutes = 10.0
    return soak(options.first, options.seeds, options.minutes, options.jobs)


def soak(first: int, seeds: int | None, minutes: float | None, jobs: int) -> int:
    clock = LoopClock()
    began_s = clock.now_s()
    ends_s = began_s + 60 * minutes if minutes is not None else math.inf
    numbers = count(first) if seeds is None else iter(range(first, first + seeds))
    done, failed = 0, list[int]()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Tried]] = set()
        if first == 0:
            running |= {pool.submit(run_enumerated, n) for n in range(len(ENUMERATED))}
        while True:
            while len(running) <= jobs and clock.now_s() < ends_s:
                if not (batch := list(islice(numbers, BATCH))):
                    break
                running.add(pool.submit(run_batch, batch))
            if not running:
                break
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            for tried, bad in (future.result() for future in ready):
                done += tried
                for seed, error in bad:
                    failed.append(seed)
                    say(f"\nseed {seed} failed:\n{error}\n")
            say(f"\r{done} worlds in {clock.now_s() - began_s:.0f} s, {len(failed)} failed ")
    say(f"\n{'failed: ' + ' '.join(map(str, sorted(failed))) if failed else 'all well'}\n")
    if failed:
        first = max(0, min(failed))  # From 0 on, faults at every commit are tried, too.
        say(f"repeat one with: python -m tests.sim.soak --from {first} --seeds 1 --jobs 1\n")
    return 1 if failed else 0


def run_batch(seeds: list[int]) -> Tried:
    logging.disable(logging.CRITICAL)  # Simulated servers have much to complain about.
    bad: list[tuple[int, str]] = []
    for seed in seeds:
        for one_world in WORLDS:
            try:
                simulate(seed, one_world)
            except Exception:  # boundary: one world's end is not the soak's
                bad.append((seed, traceback.format_exc()))
    return len(seeds) * len(WORLDS), bad


def run_enumerated(number: int) -> Tried:
    """One script with every fault at every commit; a failure has the number -1."""
    logging.disable(logging.CRITICAL)
    script, faults = ENUMERATED[number]
    try:
        survives(script, faults)
    except Exception:  # boundary: one world's end is not the soak's
        return 1, [(-1, f"{name_of(script)}, {name_of(faults)}: {traceback.format_exc()}")]
    return 1, []


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
