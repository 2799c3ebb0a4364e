"""Named ratios of every benchmark: each figure against a yardstick of the same run.

Owns the names. A benchmark finds its figures by the rows of its table and writes them, beside
those rows, to `bench/out/<name>.json`; `baseline.py` compares them with the frozen ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec import Struct

OUT = Path(__file__).parent / "out"

PLAIN_WORK = "plain work"  # About a millisecond of one core, measured repeatedly in a run.
_US = {"µs": 1.0, "ms": 1e3, "s": 1e6}

# By benchmark: the name of each ratio, and its row in the table.
DECLARED: Mapping[str, Mapping[str, str]] = {
    "fanout": {
        "fanout_100_singly": "fan-out, N = 100, singly: CPU per delivery",
        "fanout_100_bursts": "fan-out, N = 100, bursts of 16: CPU per delivery",
        "fanout_100_p99": "publish to receive, N = 100: p99",
        "fanout_500_singly": "fan-out, N = 500, singly: CPU per delivery",
        "fanout_500_bursts": "fan-out, N = 500, bursts of 16: CPU per delivery",
        "event_500_against_1": "one more event in a turn: N = 500 against N = 1",
        "durable_appends": "durable appends, 20 producers",
    },
    "http": {
        "get_version_tcp": "GET /v1/version, TCP: CPU",
        "get_workspace_tcp": "GET W, TCP: CPU",
        "get_agent_tcp": "GET W/agent, TCP: CPU",
        "get_skip_tcp": "GET W/permissions/skip, TCP: CPU",
        "get_session_tcp": "GET W/sessions/S, from SQLite, TCP: CPU",
        "get_version_unix": "GET /v1/version, unix: CPU",
        "get_workspace_unix": "GET W, unix: CPU",
        "get_agent_unix": "GET W/agent, unix: CPU",
        "get_skip_unix": "GET W/permissions/skip, unix: CPU",
        "get_session_unix": "GET W/sessions/S, from SQLite, unix: CPU",
        "join_and_leave_tcp": "join, attach, detach, release, TCP: wall",
        "join_and_leave_unix": "join, attach, detach, release, unix: wall",
    },
    "runs": {
        "runs_20_token": "20 runs flat out: CPU per token",
        "runs_200_token": "200 runs flat out: CPU per token",
        "runs_200_against_20": "200 runs against 20: CPU per token",
        "runs_paced_time": "20 runs at 100 tokens/s: time against the ideal",
        "subscriber": "100 subscribers: CPU of one more, against the least",
        "post_beyond_commit": "POST → 202, beyond one commit: p50",
        "post_to_model": "POST → model called, beyond one commit: p50",
        "token_latency": "token latency at 200 tokens/s: p50",
        "cancel_beyond_commits": "cancel → run_complete, beyond two commits: p50",
        "wire_paced_twice": "wire bytes, paced at 400 tokens/s: twice the tokens",
        "wire_paced_text": "wire bytes, paced at 400 tokens/s: times the text",
        "wire_flat_twice": "wire bytes, flat out: twice the tokens",
        "wire_flat_text": "wire bytes, flat out: times the text",
    },
    "models": {
        "openai_delta": "one stream flat out: openai, CPU per delta",
        "anthropic_delta": "one stream flat out: anthropic, CPU per delta",
        "openai_wake_up": "200 streams of 50/s: openai, CPU per wake-up",
        "anthropic_wake_up": "200 streams of 50/s: anthropic, CPU per wake-up",
        "openai_first_use": "first use: openai",
        "anthropic_first_use": "first use: anthropic",
        "openai_history": "a history of 200,000 tokens: openai",
        "anthropic_history": "a history of 200,000 tokens: anthropic",
    },
    "tools": {
        "bash_true": "`bash true`",
        "edit": "`edit` of a file of 1 MB",
        "judge": "judging a shell command",
        "judge_worst": "… the worst of them",
        "grep_rare": "grep in 50,000 files, one file in a thousand",
        "grep_frequent": "grep in 50,000 files, a line of every file",
    },
    "fleet": {
        "worker_from_zygote": "assignment → first event, from the zygote: p50",
        "worker_from_pool": "assignment → first event, from the pool: p50",
        "workers_100": "100 workers at once: until the last has answered",
        "frame_sent": "events of 300 bytes, a frame each: sent, CPU",
        "frame_received": "events of 300 bytes, a frame each: received, CPU",
        "numbered_sent": "events of 300 bytes, numbered, a frame each: sent, CPU",
        "numbered_received": "events of 300 bytes, numbered, a frame each: received, CPU",
        "batched_sent": "events of 300 bytes, numbered, up to 64 a frame: sent, CPU",
        "batched_received": "events of 300 bytes, numbered, up to 64 a frame: received, CPU",
        "echo_slowest": "200 echo runs at once in one worker: slowest against median, at worst",
    },
    "tree": {
        "agents_heard": "20 agents of one call, warm: every worker heard",
        "agents_spoke": "20 agents of one call, warm: every agent said or called something",
        "agents_call": "20 agents of one call, warm: the call against its slowest agent",
        "agent_cpu": "20 agents of one call, warm: server CPU each",
        "tree_token": "200 agents of depth 3, flat out: server CPU per token",
        "tree_agent_cpu": "200 agents of depth 3, one word each: server CPU each",
        "list_all": "10,000 agents, all of them: server CPU",
        "list_below_one": "10,000 agents, those below one: server CPU",
        "list_one": "10,000 agents, one without any: server CPU",
        "letter": "a letter delivered, claimed and acknowledged, against a file made as safe",
    },
    "mirror": {
        "mirror_delta": "a delta taken in",
        "mirror_long_delta": "a delta of a long answer taken in",
    },
    "cli": {
        "help": "culm --help",
        "ps": "culm ps, with a server",
        "run_cold": "culm run, no server: first byte",
        "run_warm": "culm run, with a server: first byte",
    },
}


class Ratio(Struct, omit_defaults=True):
    ratio: float
    against: str  # The yardstick.
    at_least: bool = False  # More is better.
    budget: float | None = None  # The target of the same ratio, if it has one.


class NamedRatio(NamedTuple):
    """A row of a table with a ratio."""

    name: str
    ratio: Ratio


def against_work(
    name: str, value: float, unit: str, work_us: Sequence[float]
) -> Iterator[NamedRatio]:
    """Yield a time in units of plain work; nothing for other units."""
    if unit in _US and work_us:
        yield NamedRatio(name, Ratio(value * _US[unit] / median(work_us), PLAIN_WORK))


def ratios_of(bench: str, named: Iterable[NamedRatio]) -> dict[str, Ratio]:
    """Return the declared ratios of a benchmark that were measured."""
    found = {one.name: one.ratio for one in named}
    declared = DECLARED.get(bench, {})  # Some have only figures that are not compared.
    return {name: found[row] for name, row in declared.items() if row in found}


def write_result(bench: str, result: Struct, named: Iterable[NamedRatio]) -> None:
    """Write a result to `bench/out/<bench>.json`, with its named ratios."""
    OUT.mkdir(exist_ok=True)
    content = {**msgspec.to_builtins(result), "ratios": ratios_of(bench, named)}
    (OUT / f"{bench}.json").write_bytes(msgspec.json.format(msgspec.json.encode(content)))
