"""More seeds than a test has time for: runs, asks, fleets and trees.

`python -m tests.sim.soak [--seeds N] [--from K] [--minutes M] [--jobs J]` prints its progress,
each failing seed and how to repeat it. The exit status is 1 after a failure. From seed 0 on, it
begins with every fault at every commit, of which the suite has a part.
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
from tests.sim.test_asks import one_world as asks_world
from tests.sim.test_crashes import ENUMERATED, name_of, survives
from tests.sim.test_fleet import foreign_world
from tests.sim.test_fleet import one_world as fleet_world
from tests.sim.test_runs import one_world as runs_world
from tests.sim.test_tree import one_world as tree_world

BATCH = 25  # Seeds between two looks at the clock.
# Each seed runs every world once.
WORLDS = (runs_world, asks_world, fleet_world, foreign_world, tree_world)
Tried = tuple[
    int, list[tuple[int, str]]
]  # The number of worlds, and the failed seeds with their errors.


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
                    write(f"\nseed {seed} failed:\n{error}\n")
            write(f"\r{done} worlds in {clock.now_s() - began_s:.0f} s, {len(failed)} failed ")
    write(f"\n{'failed: ' + ' '.join(map(str, sorted(failed))) if failed else 'all well'}\n")
    if failed:
        first = max(0, min(failed))  # From 0 on, faults at every commit are tried, too.
        write(f"repeat one with: python -m tests.sim.soak --from {first} --seeds 1 --jobs 1\n")
    return 1 if failed else 0


def run_batch(seeds: list[int]) -> Tried:
    logging.disable(logging.CRITICAL)  # Simulated servers log a lot.
    bad: list[tuple[int, str]] = []
    for seed in seeds:
        for one_world in WORLDS:
            try:
                simulate(seed, one_world)
            except Exception:  # boundary: a failed world does not end the soak
                bad.append((seed, traceback.format_exc()))
    return len(seeds) * len(WORLDS), bad


def run_enumerated(number: int) -> Tried:
    """One script with every fault at every commit; a failure has the number -1."""
    logging.disable(logging.CRITICAL)
    script, faults = ENUMERATED[number]
    try:
        survives(script, faults)
    except Exception:  # boundary: a failed world does not end the soak
        return 1, [(-1, f"{name_of(script)}, {name_of(faults)}: {traceback.format_exc()}")]
    return 1, []


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
