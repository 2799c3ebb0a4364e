"""The cases of `runs.py`: a function for a round, and one for the figures of all rounds.

A round returns samples; figures are computed from the samples of all rounds.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from statistics import median

from msgspec import Struct

from bench.ipc import Child, Command, Spent, open_child
from bench.runs_bed import SETTLE_S, Bed, run_all
from bench.runs_client import (
    STAMP,
    WAIT_S,
    Asker,
    completes,
    latencies_ms,
    open_streams,
)
from bench.runs_host import parse_url
from culm.testing.script import Reply

DELTA_BYTES = 250  # About the size of a token on the wire.
QUIET_S = 0.02  # Between two single measurements.
RUNS, MANY_RUNS = 20, 200
STREAMS, SHOWN_RUNS = 100, 4
PACED_RATE, LATENCY_RATE, WIRE_RATE = 100.0, 200.0, 400.0
LONE_TARGETS_US = {"delta": 130.0, "crush": 200.0}
KILLED_RUNS, KILLS = 8, 6  # In a round.
CANCELLED_RUNS, CANCEL_WAIT_S = 10, 15.0
PROMPTS_EACH = 10  # In one session.
MESSAGE = {"role": "user", "content": "Say something."}

Samples = dict[str, list[float]]


class Figure(Struct):
    name: str
    unit: str
    value: float
    target: float | None = None  # None: only reported.
    note: str = ""


# --- 1: cost of a token


async def round_cpu(bed: Bed) -> Samples:
    size, found = bed.lab.size, Samples()
    tokens = size.tokens
    for runs in (*(RUNS,) * size.flat_rounds, MANY_RUNS):
        ran = await run_all(bed, runs, Reply(tokens=tokens))
        us = ran.cpu_s / (runs * tokens) * 1e6
        found.setdefault(f"cpu {runs}", []).append(us)
        found.setdefault(f"rate {runs}", []).append(runs * tokens / ran.wall_s)
        found.setdefault(f"merged {runs}", []).append(runs * tokens / max(1, ran.deltas))
    return found


def figures_cpu(samples: Samples) -> list[Figure]:
    few, many = (median(samples[f"cpu {n}"]) for n in (RUNS, MANY_RUNS))
    notes = {
        n: f"lowest {min(samples[f'cpu {n}']):.1f}; {median(samples[f'rate {n}']):,.0f} tokens/s; "
        f"{median(samples[f'merged {n}']):.1f} tokens a delta"
        for n in (RUNS, MANY_RUNS)
    }
    return [
        Figure(f"{RUNS} runs flat out: CPU per token", "µs", few, 45.0, notes[RUNS]),
        Figure(f"{MANY_RUNS} runs flat out: CPU per token", "µs", many, 58.5, notes[MANY_RUNS]),
        Figure(f"{MANY_RUNS} runs against {RUNS}: CPU per token", "×", many / few, 1.3),
    ]


# --- 2: keeping pace


async def round_paced(bed: Bed) -> Samples:
    tokens = bed.lab.size.paced_tokens
    ran = await run_all(bed, RUNS, Reply(tokens=tokens, rate=PACED_RATE))
    us = ran.cpu_s / (RUNS * tokens) * 1e6
    return {"ideal": [ran.wall_s / (tokens / PACED_RATE)], "cpu": [us]}


def figures_paced(samples: Samples) -> list[Figure]:
    name = f"{RUNS} runs at {PACED_RATE:.0f} tokens/s"
    return [
        Figure(f"{name}: time against the ideal", "×", median(samples["ideal"]), 1.15),
        Figure(f"{name}: CPU per token", "µs", median(samples["cpu"]), 60.0),
    ]


# --- 2b: one run alone, where every token wakes the server


async def round_lone(bed: Bed) -> Samples:
    tokens, found = bed.lab.size.lone_tokens, Samples()
    try:
        for view in LONE_TARGETS_US:
            await bed.watch_view(view)
            ran = await run_all(bed, 1, Reply(tokens=tokens, rate=PACED_RATE))
            found[view] = [ran.cpu_s / tokens * 1e6]
    finally:
        await bed.watch_view("delta")
    found["least"] = [await _least_wake_us(bed, tokens // 4)]
    return found


async def _least_wake_us(bed: Bed, writes: int) -> float:
    """Return the CPU time of a bare server that only wakes up at this pace and writes."""
    command = Command("round", bursts=writes, burst=DELTA_BYTES, pace_s=1 / PACED_RATE)
    with _open_bare(bed) as (child, path):
        return await _write_to(child, path, 1, command) / writes * 1e6


@contextmanager
def _open_bare(bed: Bed) -> Generator[tuple[Child, str]]:
    """Start a bare server on the cores of the servers, on the socket at the path."""
    path = f"{bed.place.socket}.bare"
    with open_child("runs_yardstick", path) as child:
        bed.lab.cores.pin_server(int(child.receive(Command).do))
        yield child, path


def figures_lone(samples: Samples) -> list[Figure]:
    name = f"one run at {PACED_RATE:.0f} tokens/s"
    least = median(samples["least"])
    figures: list[Figure] = []
    for view, target in LONE_TARGETS_US.items():
        us = median(samples[view])
        note = f"{us / least:.1f} × a bare server that wakes up and writes ({least:.0f} µs)"
        figures.append(Figure(f"{name}, {view} view: CPU per token", "µs", us, target, note))
    return figures


# --- 3: cost of one more subscriber


async def round_subscribers(bed: Bed) -> Samples:
    # Few runs, so that the tokens themselves cost little compared with their deliveries.
    reply = Reply(tokens=bed.lab.size.shown_tokens, rate=PACED_RATE)
    alone = await run_all(bed, SHOWN_RUNS, reply)
    client = bed.client
    async with open_streams(client.address, client.workspace, STREAMS - 1) as more:
        await asyncio.sleep(SETTLE_S)
        for stream in more:
            stream.begin()
        together = await run_all(bed, SHOWN_RUNS, reply)
        writes = int(median(stream.reads for stream in more))
        each_bytes = int(median(stream.size for stream in more)) // max(1, writes)
        if any(stream.lost or stream.size != more[0].size for stream in more):
            bed.add_error("subscribers did not get the same bytes")
    least_us = await _least_us(bed, writes, each_bytes, together.wall_s / max(1, writes))
    us = (together.cpu_s - alone.cpu_s) / (writes * len(more)) * 1e6
    return {"us": [us], "least": [least_us], "ratio": [us / least_us], "bytes": [each_bytes]}


async def _least_us(bed: Bed, writes: int, each_bytes: int, pace_s: float) -> float:
    """Return the CPU time of one more write in a bare server with the same traffic."""
    command = Command("round", bursts=writes, burst=each_bytes, pace_s=pace_s)
    with _open_bare(bed) as (child, path):
        alone = await _write_to(child, path, 1, command)
        together = await _write_to(child, path, STREAMS, command)
    return (together - alone) / (writes * (STREAMS - 1)) * 1e6


async def _write_to(child: Child, path: str, count: int, command: Command) -> float:
    async with open_streams(parse_url(f"unix://{path}"), "", count):
        # In a thread: this loop must read meanwhile.
        spent = await asyncio.to_thread(child.ask, command, Spent)
        await asyncio.to_thread(child.ask, Command("forget"), Command)
        return spent.cpu_s


def figures_subscribers(samples: Samples) -> list[Figure]:
    note = (
        f"{median(samples['us']):.2f} µs a write of {median(samples['bytes']):.0f} B; "
        f"a bare server {median(samples['least']):.2f} µs"
    )
    name = f"{STREAMS} subscribers: CPU of one more, against the least"
    return [Figure(name, "×", median(samples["ratio"]), 1.5, note)]


# --- 4: time until a prompt is accepted, and the model called


async def round_accept(bed: Bed) -> Samples:
    lab, watch = bed.lab, bed.watch
    lab.model.play(Reply(tokens=1, stamp=True))
    found: Samples = {name: [] for name in ("commit", "post", "called", "direct")}
    # A title belongs to the first prompt of each session.
    sessions = await bed.client.create_sessions(-(-lab.size.prompts // PROMPTS_EACH))
    with closing(Asker(parse_url(lab.model.url))) as model:
        for n in range(lab.size.prompts):
            await asyncio.sleep(QUIET_S)
            found["direct"].append(await _ask_directly(model))
            found["commit"].append(lab.commits.commit_ms())
            watch.begin()
            answer = await bed.client.prompt(sessions[n // PROMPTS_EACH])
            await watch.until_complete(1, WAIT_S)
            stamps = [int(s) for one in watch.received for s in STAMP.findall(one.data)]
            found["post"].append(answer.ms)
            found["called"].append((min(stamps) - answer.sent_ns) / 1e6)
    return found


async def _ask_directly(model: Asker) -> float:
    """Return the time that the scripted model takes from a request to its first token."""
    body = {"model": "demo-1", "stream": True, "messages": [MESSAGE]}
    answer = await model.ask("POST", "/v1/chat/completions", body)
    return (int(STAMP.findall(answer.body)[0]) - answer.sent_ns) / 1e6


def figures_accept(samples: Samples) -> list[Figure]:
    commit, post, called, direct = (
        median(samples[name]) for name in ("commit", "post", "called", "direct")
    )
    posts = sorted(samples["post"])
    note = f"p50 {post:.2f} ms, p90 {percentile(posts, 90):.2f}; a lone commit {commit:.2f} ms"
    asked = f"p50 {called:.2f} ms, of which the model's own {direct:.2f} ms"
    return [
        Figure("POST → 202, beyond one commit: p50", "ms", post - commit, 1.2, note),
        Figure("POST → model called, beyond one commit: p50", "ms", called - commit, 5.5, asked),
    ]


# --- 5: token latency


async def round_latency(bed: Bed) -> Samples:
    tokens = bed.lab.size.timed_tokens
    await run_all(bed, 1, Reply(tokens=tokens, rate=LATENCY_RATE, stamp=True))
    late = latencies_ms(bed.watch.received)
    if len(late) != tokens:
        bed.add_error(f"{len(late)} of {tokens} stamped tokens came")
    return {"late": late}


def figures_latency(samples: Samples) -> list[Figure]:
    late = sorted(samples["late"])
    note = f"p90 {percentile(late, 90):.2f} ms, p99 {percentile(late, 99):.2f} ms"
    name = f"token latency at {LATENCY_RATE:.0f} tokens/s: p50"
    return [Figure(name, "ms", percentile(late, 50), 0.5, note)]


# --- 6: time until a canceled run has ended


async def round_cancel(bed: Bed) -> Samples:
    found: Samples = {"commit": []}
    for name, reply in (
        ("", Reply(tokens=100_000, rate=PACED_RATE)),
        ("flat ", Reply(tokens=1_000_000)),
    ):
        bed.lab.model.play(reply)
        for _ in range(max(1, bed.lab.size.prompts // CANCELLED_RUNS)):
            await _cancel_each(bed, name, found)
    return found


async def _cancel_each(bed: Bed, name: str, found: Samples) -> None:
    """Start some runs, and cancel one after the other while the rest continues."""
    watch = bed.watch
    sessions = await bed.client.create_sessions(CANCELLED_RUNS)
    await bed.client.prompt_all(sessions)
    await asyncio.sleep(SETTLE_S)  # All of them stream.
    for session_id in sessions:
        await asyncio.sleep(QUIET_S)
        if not name:
            found["commit"].append(bed.lab.commits.commit_ms())
        watch.begin()
        answer = await bed.client.cancel(session_id)
        try:
            await watch.until_complete(1, CANCEL_WAIT_S)
        except TimeoutError:
            bed.add_error(f"no run ended within {CANCEL_WAIT_S:.0f} s of its cancel")
            continue
        ended = completes(watch.received)[0]
        if not ended.cancelled or ended.session_id != session_id or not ended.text:
            bed.add_error("a cancel did not end its own streaming run")
        found.setdefault(f"{name}answer", []).append(answer.ms)
        found.setdefault(f"{name}complete", []).append((ended.at_ns - answer.sent_ns) / 1e6)


def figures_cancel(samples: Samples) -> list[Figure]:
    took, flat = (sorted(samples[f"{name}complete"]) for name in ("", "flat "))
    commit = median(samples["commit"])
    p50, p99 = percentile(took, 50), percentile(took, 99)
    note = f"p50 {p50:.2f} ms; a commit {commit:.2f} ms; 200 after {median(samples['answer']):.2f}"
    rest = f"p50 {median(flat):.1f} ms, p90 {percentile(flat, 90):.1f} ms"
    flat_p99 = percentile(flat, 99)
    name = "cancel → run_complete"
    return [
        Figure(f"{name}, beyond one commit: p50", "ms", p50 - commit, 1.5, note),
        Figure(f"{name}: p99", "ms", p99, 30.0, f"of {len(took)}"),
        Figure(f"{name} beside {CANCELLED_RUNS} flat out: p99", "ms", flat_p99, 40.0, rest),
    ]


# --- 7: text lost by a kill


async def round_kill(bed: Bed) -> Samples:
    found: Samples = {"lost": [], "restart": []}
    if not bed.served.is_ours:
        return found
    bed.lab.model.play(Reply(tokens=100_000, rate=PACED_RATE, stamp=True))
    for _ in range(KILLS):
        sessions = await bed.client.create_sessions(KILLED_RUNS)
        await bed.client.prompt_all(sessions)
        await asyncio.sleep(random.uniform(0.8, 1.0))  # At a random moment of its periodic work.
        killed_ns = time.monotonic_ns()
        bed.served.kill()
        await bed.stop()
        await bed.start()
        found["restart"].append((time.monotonic_ns() - killed_ns) / 1e6)
        for session_id in sessions:
            stamps = await bed.client.stored_stamps(session_id)
            if not stamps:
                bed.add_error("nothing of a killed run is left")
            found["lost"].append((killed_ns - max(stamps, default=0)) / 1e6)
    return found


def figures_kill(samples: Samples) -> list[Figure]:
    name = "`kill -9`: text that is missing, at worst"
    lost = sorted(samples["lost"])
    target = 3000 / PACED_RATE  # Tokens that the model has sent, but no client has received.
    if not lost:
        return [Figure(name, "ms", math.nan, target, "not started by us")]
    note = f"p50 {percentile(lost, 50):.0f} ms, of {len(lost)} runs"
    return [Figure(name, "ms", lost[-1], target, note)]


# --- 8: bytes on the wire


async def round_wire(bed: Bed) -> Samples:
    tokens, found = bed.lab.size.wire_tokens, Samples()
    for name, rate in (("paced", WIRE_RATE), ("flat", 0.0)):
        once, twice = [
            await run_all(bed, 1, Reply(tokens=n, rate=rate)) for n in (tokens, 2 * tokens)
        ]
        text = len(twice.ended[0].text.encode())
        found[f"{name} growth"] = [twice.wire_bytes / once.wire_bytes]
        found[f"{name} times"] = [twice.wire_bytes / text]
        found[f"{name} each"] = [twice.wire_bytes / (2 * tokens)]
    return found


def figures_wire(samples: Samples) -> list[Figure]:
    found: list[Figure] = []
    for name, label, target in (
        ("paced", f"paced at {WIRE_RATE:.0f} tokens/s", 40.0),
        ("flat", "flat out", 3.0),
    ):
        note = f"{median(samples[f'{name} each']):.0f} B a token"
        growth, times = (median(samples[f"{name} {what}"]) for what in ("growth", "times"))
        found.append(Figure(f"wire bytes, {label}: twice the tokens", "×", growth, 2.1))
        found.append(Figure(f"wire bytes, {label}: times the text", "×", times, target, note))
    return found


def percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


class Case(Struct, frozen=True):
    name: str
    label: str
    round: Callable[[Bed], Awaitable[Samples]]
    figures: Callable[[Samples], list[Figure]]


CASES = [
    Case("cpu", "CPU per token, flat out", round_cpu, figures_cpu),
    Case("paced", "runs at a pace", round_paced, figures_paced),
    Case("lone", "one run at a pace", round_lone, figures_lone),
    Case("subscribers", f"{STREAMS} subscribers", round_subscribers, figures_subscribers),
    Case("accept", "prompts one by one", round_accept, figures_accept),
    Case("latency", "token latency", round_latency, figures_latency),
    Case("cancel", "cancels", round_cancel, figures_cancel),
    Case("kill", "kill -9 in mid-stream", round_kill, figures_kill),
    Case("wire", "bytes on the wire", round_wire, figures_wire),
]
