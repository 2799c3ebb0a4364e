"""The cost of a mirror in a client: deltas per second on one core, and memory of a history.

python -m bench.mirror            the figures of docs/benchmarks.md; JSON in bench/out/mirror.json
python -m bench.mirror --quick    smaller, to check that it works
"""

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec

from bench.fanout import describe_machine
from bench.ratios import NamedRatio, against_work, write_result
from bench.runs_yardstick import work_us
from bench.tables import aligned_table, format_number, print_footer
from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent, SseParser
from culm.events.views import encode_delta
from culm.ids import MessageId, SessionId
from culm.wire.codec import decode, encode
from culm.wire.events import MessageDelta
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Role,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from culm.wire.workspaces import Snapshot, StoreHealth

DELTA = "word "  # The length of a typical token.
READ_BYTES = 1 << 16  # The size of one read.
LONGER = 5
TARGET_DELTAS = 50_000
TARGET_MB = 40.0
_SESSION = SessionId("01234567-0123-0123-0123-0123456789ab")


@dataclass(frozen=True, slots=True)
class Size:
    messages: int  # That grow in parallel ...
    chars: int  # ... to so many characters each.
    history: int  # Messages that are only kept.
    rounds: int


FULL = Size(messages=8, chars=20_000, history=10_000, rounds=7)
QUICK = Size(messages=2, chars=2_000, history=500, rounds=2)


# --- growing


def frames(size: Size) -> list[bytes]:
    """Return the data that a server sends while several answers grow, in reads of a socket."""
    ids = [MessageId(f"{_SESSION[:-2]}{n:02d}") for n in range(size.messages)]
    whole = b"".join(
        encode_delta(MessageDelta(message_id, _SESSION, 1, 0, "text", offset, DELTA))
        for offset in range(0, size.chars, len(DELTA))
        for message_id in ids
    )
    return [whole[at : at + READ_BYTES] for at in range(0, len(whole), READ_BYTES)]


def empty_mirror(size: Size) -> Mirror:
    """A mirror with the answers, which are empty yet."""
    mirror = Mirror()
    for n in range(size.messages):
        message_id = MessageId(f"{_SESSION[:-2]}{n:02d}")
        mirror.put_message(Message(message_id, "assistant", _SESSION, rev=1))
    return mirror


def follow(mirror: Mirror, data: list[bytes]) -> int:
    """Apply all events; return their number."""
    parser, count = SseParser(), 0
    for piece in data:
        for event in parser.feed(piece):
            assert mirror.apply(event) is None, "a delta did not fit"
            count += 1
    return count


def deltas_s(size: Size, data: list[bytes]) -> float:
    """Return deltas per second of CPU, from bytes to a mirror."""
    mirror = empty_mirror(size)
    start_s = time.process_time()
    count = follow(mirror, data)
    took_s = time.process_time() - start_s
    for message in mirror.messages.values():
        (part,) = message.parts
        assert isinstance(part, TextPart)
        assert len(part.data.text) == size.chars, "text is missing"
    return count / took_s


# --- memory


def history(count: int) -> Iterator[Message]:
    """A conversation: a prompt, an answer that calls a tool, its result, an answer, and so on."""
    roles: tuple[Role, ...] = ("user", "assistant", "tool", "assistant")
    for n in range(count):
        yield Message(
            id=MessageId(f"{n:08x}{_SESSION[8:]}"),
            role=roles[n % 4],
            session_id=_SESSION,
            parts=_parts(n),
            model="a-model-of-somebody",
            provider="somebody",
            created_at=1_800_000_000 + n,
            updated_at=1_800_000_000 + n,
            rev=1,
        )


def _parts(n: int) -> list[Part]:
    text = f"{n:05d} " + "some words of a real length " * 36  # About 1 KB.
    done = FinishPart(Finish("end_turn", 1_800_000_000 + n))
    match n % 4:
        case 1:
            call = ToolCall(f"call_{n}", "bash", '{"command": "ls"}', finished=True)
            return [TextPart(Text(text)), ToolCallPart(call), done]
        case 2:
            return [ToolResultPart(ToolResult(f"call_{n - 1}", "bash", text))]
        case _:
            return [TextPart(Text(text)), done]


def event_history(count: int) -> Iterator[ServerEvent]:
    for n, message in enumerate(history(count)):
        yield ServerEvent("message", "created", msgspec.Raw(encode(message)), f"epoch.{n + 1}")


def snapshot_of(count: int) -> bytes:
    return encode(
        Snapshot(
            cursor="epoch.1",
            sessions=[],
            messages=list(history(count)),
            runs=[],
            agents=[],
            presence=[],
            store=StoreHealth("ok"),
        )
    )


def rss_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def measure_mb(count: int, way: str) -> float:
    """Return the MB that a mirror of so many messages adds to this process."""
    mirror = Mirror()
    gc.collect()
    before = rss_mb()
    if way == "events":
        for event in event_history(count):
            mirror.apply(event)
    else:
        mirror.load(decode(snapshot_of(count), Snapshot[Message]))
    gc.collect()
    assert len(mirror.messages) == count
    return rss_mb() - before


def held_mb(count: int, way: str) -> float:
    """Measure it in a new process, in which nothing was freed before."""
    command = [sys.executable, "-m", "bench.mirror", "--hold", str(count), "--way", way]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# --- results


class Result(msgspec.Struct):
    rates: list[float]
    long_rates: list[float]
    events_mb: float
    loaded_mb: float
    machine: dict[str, str]


def named_ratios(
    rates: list[float], long_rates: list[float], work: list[float]
) -> Iterator[NamedRatio]:
    """Convert rates to the time of one delta."""
    yield from against_work("a delta taken in", 1e6 / median(rates), "µs", work)
    yield from against_work(
        "a delta of a long answer taken in", 1e6 / median(long_rates), "µs", work
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the mirror of a client.")
    parser.add_argument("--quick", action="store_true", help="smaller, to check that it works")
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--way", default="events", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        print(measure_mb(given.hold, given.way))
        return
    size = QUICK if given.quick else FULL
    start_s = time.monotonic()
    # A text is copied when it grows: longer ones show whether that matters.
    long = replace(size, chars=size.chars * LONGER)
    data, long_data = frames(size), frames(long)
    work: list[float] = []
    rates: list[float] = []
    long_rates: list[float] = []
    for _ in range(size.rounds):
        work.append(work_us())
        rates.append(deltas_s(size, data))
        long_rates.append(deltas_s(long, long_data))
    events_mb, loaded_mb = (held_mb(size.history, way) for way in ("events", "snapshot"))
    lines = [
        ("", "measured", "target"),
        ("deltas a second on one core", format_number(median(rates)), f"≥ {TARGET_DELTAS:,}"),
        ("  the slowest round", format_number(min(rates)), ""),
        (f"  of answers {LONGER} times as long", format_number(median(long_rates)), ""),
        (f"{size.history:,} messages as events (MB)", f"{events_mb:.1f}", f"≤ {TARGET_MB:g}"),
        (f"{size.history:,} messages as a snapshot (MB)", f"{loaded_mb:.1f}", f"≤ {TARGET_MB:g}"),
    ]
    write_result(
        "mirror",
        Result(rates, long_rates, events_mb, loaded_mb, describe_machine()),
        named_ratios(rates, long_rates, work),
    )
    print(aligned_table(lines, "<>>"))
    print_footer(work, [], time.monotonic() - start_s)


if __name__ == "__main__":
    main()
