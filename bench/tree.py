"""The cost of a tree of agents: its start, its tokens, its listing, and its letters.

Usage: python -m bench.tree [--quick] [--only NAME] …
       table on stdout, JSON in bench/out/tree.json

Exit status 1 if an agent did not do its work, a token or a letter was lost, or a process was left
behind; a missed target is only reported, as this machine may be busy. What is measured and how:
docs/benchmarks.md.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

import uvloop
from msgspec import Struct

from bench.fanout import describe_machine
from bench.fleet_bed import Memory, is_alive, memory_of, spawn_bare
from bench.ratios import OUT
from bench.runs_host import Cores, open_model, open_place
from bench.runs_yardstick import work_us
from bench.tools import Result, Row, report
from bench.traffic import cpu_s, raise_file_limit
from bench.tree_bed import (
    OFFLINE,
    Bed,
    Moment,
    Ran,
    leading,
    levels_of,
    open_bed,
    script_of,
    tree_rules,
)
from bench.tree_mail import Letters, measure
from bench.tree_rows import TOP, agent_name, below, fill
from culm.testing.script import Reply

FIRST_S, CALL_RATIO, TOKEN_US, LIST_MS, LETTER_RATIO = 0.5, 1.5, 60.0, 25.0, 2.0
DELIVER_US, ACK_US = 1500.0, 150.0
CROWD = 20  # Agents of one call.
MOMENTS: tuple[tuple[str, Moment, float | None], ...] = (
    ("every agent known to a client", "known", None),
    ("every worker heard", "connected", FIRST_S),
    ("every agent said or called something", "active", FIRST_S),
)
FIRST_MOMENTS: tuple[tuple[str, Moment], ...] = (
    ("its worker heard", "connected"),
    ("its first event", "active"),
)
WIDTHS = (4, 7, 6)  # Children of an agent, by depth: 200 agents; the leaves stream.
PACE = 20.0  # Tokens a second of each of those.
MANY, FEW = 10_000, 100  # Agents that are listed, and for comparison.
ALONE = 2  # Rounds of a call with one agent, for each server.
TYPING_S = 2.0  # From the opening of a workspace to the first call of an agent.
LETTERS = 200  # In one round.
DONE = "Done."
GONE_EVERY_S, GONE_TRIES = 0.05, 100


class Size(Struct, frozen=True):
    """The amount of work; a full run takes about three minutes."""

    firsts: int  # Servers with a single agent.
    servers: int  # Each has one cold call.
    crowds: int  # On each.
    trees: int
    tokens: int  # Of each that streams.
    paced_tokens: int
    lists: int
    letters: int  # Rounds.


FULL = Size(
    firsts=5, servers=3, crowds=5, trees=2, tokens=2000, paced_tokens=400, lists=30, letters=10
)
QUICK = Size(
    firsts=2, servers=1, crowds=3, trees=1, tokens=1000, paced_tokens=100, lists=10, letters=3
)


class Bench:
    def __init__(self, size: Size, folder: Path, model_url: str) -> None:
        self._size = size
        self._folder = folder
        self._model_url = model_url
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.work_us: list[float] = []

    # --- the first agent

    async def first(self) -> None:
        """Call one agent on new servers, once a person would have typed the first prompt."""
        ran: list[Ran] = []
        for number in range(self._size.firsts):
            self._progress(f"the first agent, server {number + 1}")
            with open_place(self._folder, f"first-{number}") as place:
                async with open_bed(place, self._model_url, cold=False) as bed:
                    await asyncio.sleep(TYPING_S)
                    ran.append(await self._call(bed, 1))
            await self._check_gone(ran[-1:])
        for what, moment in FIRST_MOMENTS:
            found = [one.last_s(moment) for one in ran]
            name = f"the first agent, {TYPING_S:.0f} s after its workspace was opened: {what}"
            note = f"fastest {min(found):.3f}, slowest {max(found):.3f}"
            p50 = median(found)
            self.rows.append(Row(name, "s", p50, None, p50, "", FIRST_S, note))

    # --- one call, many agents

    async def crowd(self) -> None:
        """Start twenty agents by one call, on cold and on warm servers."""
        bare_s: list[float] = []
        cold: list[Ran] = []
        warm: list[Ran] = []
        alone: list[Ran] = []
        for number in range(self._size.servers):
            with open_place(self._folder, f"crowd-{number}") as place:
                async with open_bed(place, self._model_url) as bed:
                    self._progress(f"{CROWD} agents of one call, server {number + 1}")
                    cold.append(await self._call(bed, CROWD))
                    for _ in range(self._size.crowds):
                        self.work_us.append(work_us())
                        bare_s.append(_timed_s(lambda: spawn_bare(CROWD)))
                        warm.append(await self._call(bed, CROWD))
                    alone += [await self._call(bed, 1) for _ in range(ALONE)]
                await self._check_gone([*cold, *warm, *alone])
        self._add_crowd(cold, warm, alone, median(bare_s))

    async def _call(self, bed: Bed, agents: int) -> Ran:
        await bed.play(script_of(leading("@lead:", [OFFLINE] * agents), Reply(text=DONE)))
        ran = await bed.run("@lead:", agents)
        count = sum(times for text, times in ran.texts.items() if "One line of notes." in text)
        self._check_done(ran, agents)
        self._check(f"{agents} have read the notes: {count}", count == agents)
        return ran

    def _add_crowd(
        self, cold: Sequence[Ran], warm: Sequence[Ran], alone: Sequence[Ran], bare_s: float
    ) -> None:
        name = f"{CROWD} agents of one call, warm"
        for what, moment, target in MOMENTS:
            found = [ran.last_s(moment) for ran in warm]
            first = [ran.last_s(moment) for ran in cold]
            note = f"fastest {min(found):.2f}, slowest {max(found):.2f}; cold {median(first):.2f}"
            p50 = median(found)
            self.rows.append(Row(f"{name}: {what}", "s", p50, bare_s, p50, "", target, note))
        ratios = [ran.call_s / ran.slowest_s for ran in warm]
        call_s, one_s = (median(ran.call_s for ran in runs) for runs in (warm, alone))
        note = f"at worst {max(ratios):.2f}; a call with one agent takes {one_s:.3f} s; {_load()}"
        slowest_s = median(ran.slowest_s for ran in warm)
        self.rows.append(
            Row(
                f"{name}: the call against its slowest agent",
                *("s", call_s, slowest_s, median(ratios), "×", CALL_RATIO, note),
            )
        )
        cpu_ms = median(ran.cpu_s for ran in warm) / CROWD * 1e3
        self.rows.append(Row(f"{name}: server CPU each", "ms", cpu_ms, None, cpu_ms, "", None))

    # --- a tree that streams

    async def tree(self) -> None:
        size, agents = self._size, sum(levels_of(WIDTHS))
        flat: list[Ran] = []
        with open_place(self._folder, "tree") as place:
            async with open_bed(place, self._model_url) as bed:
                self._progress(f"{agents} agents of depth {len(WIDTHS)}, held")
                await self._play_tree(bed, Reply(tokens=1, hold_after=0))
                sizes: list[Memory] = []
                held = await bed.run_held(
                    "@0:", agents, lambda pids: sizes.extend(map(memory_of, pids))
                )
                self._check_done(held, agents)
                self._progress("… with one word each")
                short = await self._stream(bed, Reply(tokens=1))
                for number in range(size.trees):
                    self._progress(f"… streaming flat out, round {number + 1}")
                    flat.append(await self._stream(bed, Reply(tokens=size.tokens)))
                self._progress(f"… streaming {PACE:.0f} tokens/s each")
                paced = await self._stream(bed, Reply(tokens=size.paced_tokens, rate=PACE))
            await self._check_gone([held, short, *flat, paced])
        name = f"{agents} agents of depth {len(WIDTHS)}"
        self._add_tokens(f"{name}, flat out", flat, short)
        self._add_tokens(f"{name}, {PACE:.0f} tokens/s each", [paced], short)
        each_ms, mb = short.cpu_s / agents * 1e3, mean(one.pss_mb for one in sizes)
        self.rows.append(
            Row(f"{name}, one word each: server CPU each", "ms", each_ms, None, each_ms, "", None)
        )
        note = f"{mean(one.own_mb for one in sizes):.1f} its own"
        self.rows.append(Row(f"{name}, at work: PSS each", "MB", mb, None, mb, "", None, note))

    async def _play_tree(self, bed: Bed, leaf: Reply) -> None:
        await bed.play(script_of(tree_rules("@0:", WIDTHS), leaf))

    async def _stream(self, bed: Bed, leaf: Reply) -> Ran:
        *above, leaves = levels_of(WIDTHS)
        agents, tokens = sum(above) + leaves, leaves * leaf.tokens
        await self._play_tree(bed, leaf)
        ran = await bed.run("@0:", agents)
        self._check_done(ran, agents)
        text = "".join(f"tok{n} " for n in range(leaf.tokens)).strip()
        wanted = {text: leaves, DONE: sum(above) + 1}  # The top session, too.
        self._check(f"all have sent their text: {_shortened(ran)}", ran.texts == wanted)
        self._check(f"{ran.tokens} of {tokens} tokens came", ran.tokens == tokens)
        return ran

    def _add_tokens(self, name: str, runs: Sequence[Ran], short: Ran) -> None:
        """Add the cost of streaming beyond a tree with one word each."""
        us = median((ran.cpu_s - short.cpu_s) / (ran.tokens - short.tokens) * 1e6 for ran in runs)
        whole_us = median(ran.cpu_s / ran.tokens * 1e6 for ran in runs)
        rate = median(ran.tokens / ran.wall_s for ran in runs)
        merged = median(ran.tokens / ran.deltas for ran in runs)
        note = (
            f"{whole_us:.0f} with its start; {rate:,.0f} tokens/s, {merged:.1f} a delta; {_load()}"
        )
        name = f"{name}: server CPU per token"
        self.rows.append(Row(name, "µs", us, None, us, "", TOKEN_US, note))

    # --- listing a large tree

    async def listing(self) -> None:
        few = await self._measure_listing(FEW)
        many = await self._measure_listing(MANY)
        for what, target in (
            ("all of them", LIST_MS),
            ("all below the top", LIST_MS),
            ("those below one", None),
            ("one, with its children", None),
            ("one without any", None),
        ):
            for side, n in (("server CPU", 0), ("as a client sees it", 1)):
                values, before = many[what][n], few[what][n]
                note = f"fastest {min(values):.2f}; yardstick: of {FEW} agents; {_load()}"
                p50 = median(values)
                self.rows.append(
                    Row(
                        f"{MANY:,} agents, {what}: {side}",
                        *("ms", p50, median(before), p50, "", target, note),
                    )
                )

    async def _measure_listing(self, agents: int) -> dict[str, tuple[list[float], list[float]]]:
        self._progress(f"listing {agents:,} agents")
        one = agent_name(0)
        asked = (
            ("all of them", "/agents", agents),
            ("all below the top", f"/agents?below={TOP}", agents),
            ("those below one", f"/agents?below={one}", below(0, agents)),
            ("one, with its children", f"/agents/{one}", 11),
            ("one without any", f"/agents/{agent_name(agents - 1)}", 1),
        )
        found: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what, *_ in asked}
        with open_place(self._folder, f"list-{agents}") as place:
            (place.folder / "data").mkdir(mode=0o700)
            await fill(place.folder / "data", place.folder / "project", agents)
            async with open_bed(place, self._model_url) as bed:
                for _ in range(self._size.lists):
                    self.work_us.append(work_us())
                    for what, path, count in asked:
                        before_s = cpu_s(bed.served.pid)
                        start_s = time.perf_counter()
                        answer = await bed.client.ask("GET", path)
                        found[what][1].append((time.perf_counter() - start_s) * 1e3)
                        found[what][0].append((cpu_s(bed.served.pid) - before_s) * 1e3)
                        shown = answer.body.count(b'"agent_id"')
                        self._check(f"{path} shows {shown} of {count}", shown == count)
        return found

    # --- letters

    def letters(self) -> None:
        rounds: list[Letters] = []
        for number in range(self._size.letters):
            self._progress(f"letters, round {number + 1}")
            rounds.append(measure(self._folder / f"letters-{number}", LETTERS))
            self._check(f"{rounds[-1].lost} letters were lost", not rounds[-1].lost)
        ours, plain, delivered, acked = (
            [median(times) for times in by_round]
            for by_round in (
                [one.ours for one in rounds],
                [one.plain for one in rounds],
                [one.delivered for one in rounds],
                [one.acked for one in rounds],
            )
        )
        ratios = [one / least for one, least in zip(ours, plain, strict=True)]
        p50 = median(ratios)
        note = f"{1 / p50:.2f} of its rate; {min(ratios):.2f} to {max(ratios):.2f} ×; {_load()}"
        name = "a letter delivered, claimed and acknowledged, against a file made as safe"
        self.rows.append(Row(name, "µs", median(ours), median(plain), p50, "×", LETTER_RATIO, note))
        for what, times, target in (
            ("delivered", delivered, DELIVER_US),
            ("acknowledged", acked, ACK_US),
        ):
            us = median(times)
            self.rows.append(Row(f"a letter {what}", "µs", us, None, us, "", target))

    # --- checks

    def _check_done(self, ran: Ran, agents: int) -> None:
        ends = [times.outcome for times in ran.agents_by_session.values()]
        self._check(f"{agents} agents have completed: {ends}", ends == ["completed"] * agents)
        seen = all(
            times.known and times.begun and times.connected
            for times in ran.agents_by_session.values()
        )
        self._check("each was known, started and connected", seen and ran.called > 0 < ran.answered)

    async def _check_gone(self, runs: Sequence[Ran]) -> None:
        """Wait until all workers are gone: a server does not wait for the last of them."""
        left = {pid for ran in runs for pid in ran.pids}
        for _ in range(GONE_TRIES):
            left = set(filter(is_alive, left))
            if not left:
                return
            await asyncio.sleep(GONE_EVERY_S)
        self.wrong.append(f"{len(left)} workers are left")

    def _check(self, what: str, is_right: bool) -> None:  # noqa: FBT001 - reads well
        if not is_right:
            self.wrong.append(what)

    def _progress(self, what: str) -> None:
        self.work_us.append(work_us())
        print(f"  {what} …", file=sys.stderr, flush=True)


def _shortened(ran: Ran) -> str:
    return str({text[:20]: count for text, count in ran.texts.items()})[:200]


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def _timed_s(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure trees of agents, and their mail.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a minute")
    parser.add_argument("--only", action="append", choices=PARTS, help="repeatable")
    return parser.parse_args()


PARTS = ("first", "crowd", "tree", "listing", "letters")


async def run(options: argparse.Namespace) -> Result:
    task = asyncio.current_task()
    assert task is not None, "runs in one"
    # End the servers and their workers first, however this process ends.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    start_s = time.monotonic()
    wanted: Sequence[str] = options.only or PARTS
    with ExitStack() as stack:
        # Not in a temporary directory, which may be in memory: fsync must be real.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=OUT)))
        model = stack.enter_context(open_model(folder, Cores(), 0))
        bench = Bench(QUICK if options.quick else FULL, folder, model.url)
        for part in (bench.first, bench.crowd, bench.tree, bench.listing):
            if part.__name__ in wanted:
                await part()
        if "letters" in wanted:
            bench.letters()
    seconds = time.monotonic() - start_s
    machine = describe_machine() | {"load": " ".join(f"{one:.1f}" for one in os.getloadavg())}
    return Result(bench.rows, bench.wrong, bench.work_us, seconds, machine)


def main() -> int:
    options = parse()
    raise_file_limit()  # Children inherit it.
    OUT.mkdir(exist_ok=True)
    return report(uvloop.run(run(options)), "tree")


if __name__ == "__main__":
    sys.exit(main())
