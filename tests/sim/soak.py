"""More seeds than a test has time for: the worlds of `test_runs.py`, as long as one wishes.

`python -m tests.sim.soak [--seeds N] [--from K] [--minutes M] [--jobs J]` tells how far it is, each
seed that fails, and how to repeat it. The exit status is 1 if one did.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import traceback
from itertools import count, islice

from culm.clock import LoopClock
from tests.sim.loop import simulate
from tests.sim.test_runs import one_world

BATCH = 25  # Seeds between two looks at the clock.


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=None, help="how many (default: any number)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first (default: 0)")
    parser.add_argument("--minutes", type=float, default=None, help="how long (default: for ever)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if options.seeds is None and options.minutes is None:
        options.minutes = 10.0
    return soak(options.first, options.seeds, options.minutes, options.jobs)


def soak(first: int, seeds: int | None, minutes: float | None, jobs: int) -> int:
    clock = LoopClock()
    began_s = clock.now_s()
    deadline_s = began_s + 60 * minutes if minutes is not None else None
    numbers = count(first) if seeds is None else iter(range(first, first + seeds))
    batches = iter(lambda: list(islice(numbers, BATCH)), [])
    done, failed = 0, list[int]()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for tried, bad in pool.imap_unordered(run_batch, batches):
            done += tried
            for seed, error in bad:
                failed.append(seed)
                say(f"\nseed {seed} failed:\n{error}\n")
            took_s = clock.now_s() - began_s
            say(f"\r{done} worlds in {took_s:.0f} s, {len(failed)} failed ")
            if deadline_s is not None and clock.now_s() > deadline_s:
                pool.terminate()
                break
    say(f"\n{'failed: ' + ' '.join(map(str, sorted(failed))) if failed else 'all well'}\n")
    if failed:
        say(f"repeat one with: python -m tests.sim.soak --from {min(failed)} --seeds 1 --jobs 1\n")
    return 1 if failed else 0


def run_batch(seeds: list[int]) -> tuple[int, list[tuple[int, str]]]:
    logging.disable(logging.CRITICAL)  # Simulated servers have much to complain about.
    bad: list[tuple[int, str]] = []
    for seed in seeds:
        try:
            simulate(seed, one_world)
        except Exception:  # boundary: one world's end is not the soak's
            bad.append((seed, traceback.format_exc()))
    return len(seeds), bad


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
