"""An answer as a sequence of steps to send. Pure, so that every fault is a value.

Owns the order of the pieces and the positions of the faults.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import zip_longest

from msgspec import Struct, UnsetType

from culm.testing.dialects import Dialect, FilledBlock, ScriptBlock
from culm.testing.script import Reply, ScriptedUsage

PIECE = re.compile(r"\S+\s*|\s+")
ARGUMENT_CHARS = 8  # Per piece of a call's arguments; providers send two or three tokens at once.


class RawStep(Struct, frozen=True, gc=False):
    """Bytes other than deltas, which are neither counted nor paced."""

    data: bytes


class FaultStep(Enum):
    """A fault of the connection, in place of bytes to send."""

    HOLD = auto()
    STALL = auto()
    CUT = auto()
    END = auto()


Step = bytes | RawStep | FaultStep  # Bytes are one delta.


class BlockBegan(Struct, frozen=True, gc=False):
    block: ScriptBlock


class BlockPiece(Struct, frozen=True, gc=False):
    block: ScriptBlock
    text: str


class BlockEnded(Struct, frozen=True, gc=False):
    block: ScriptBlock


def steps(
    reply: Reply, n: int, input_tokens: int, dialect: Dialect, now_ns: Callable[[], int]
) -> Iterator[Step]:
    """A streamed answer to request `n`, generated while it is sent; `now_ns` stamps deltas."""
    yield RawStep(dialect.head(usage_of(reply, input_tokens, 1)))
    faults = _faults(reply, dialect)
    sent = 0
    while faults and not faults[0][0]:
        yield faults.popleft()[1]
    for event in events(reply, n, now_ns):
        if isinstance(event, BlockBegan):
            yield RawStep(dialect.began(event.block))
            if event.block.kind != "text" or not reply.long_line_bytes:
                continue
            yield _long_line(dialect, event.block, reply.long_line_bytes)
        elif isinstance(event, BlockPiece):
            yield dialect.delta(event.block, event.text)
        else:
            yield RawStep(dialect.ended(event.block))
            continue
        sent += 1
        while faults and faults[0][0] <= sent:
            yield faults.popleft()[1]
    for _, step in faults:
        yield step
    yield RawStep(dialect.tail(reply.finish_reason, usage_of(reply, input_tokens, sent)))


def events(
    reply: Reply, n: int, now_ns: Callable[[], int]
) -> Iterator[BlockBegan | BlockPiece | BlockEnded]:
    """The blocks of an answer and their pieces, in the order of sending."""
    index = 0
    if reply.reasoning:
        yield from _one_block(ScriptBlock("reasoning", index), _pieces(reply.reasoning))
        index += 1
    if reply.text or reply.deltas or reply.tokens or reply.long_line_bytes:
        yield from _one_block(ScriptBlock("text", index), _text(reply, now_ns))
        index += 1
    calls = [
        (
            ScriptBlock(
                "call",
                index + number,
                number,
                f"call_{n}_{number}" if call.id is None else call.id,
                call.name,
            ),
            _arguments(call.arguments),
        )
        for number, call in enumerate(reply.calls)
    ]
    if not reply.interleave:
        for block, pieces in calls:
            yield from _one_block(block, pieces)
        return
    for block, _ in calls:
        yield BlockBegan(block)
    for row in zip_longest(*(pieces for _, pieces in calls)):
        for (block, _), piece in zip(calls, row, strict=True):
            if piece is not None:
                yield BlockPiece(block, piece)
    for block, _ in calls:
        yield BlockEnded(block)


def content_of(reply: Reply, n: int, now_ns: Callable[[], int]) -> tuple[list[FilledBlock], int]:
    """The blocks of an answer that is not streamed, and the number of deltas of a stream."""
    found: dict[ScriptBlock, list[str]] = {}
    for event in events(reply, n, now_ns):
        pieces = found.setdefault(event.block, [])
        if isinstance(event, BlockPiece):
            pieces.append(event.text)
    content = [FilledBlock(block, "".join(pieces)) for block, pieces in found.items()]
    return content, sum(map(len, found.values()))


def usage_of(reply: Reply, input_tokens: int, output_tokens: int) -> ScriptedUsage | None:
    """The usage in the script, or a plausible one if there is none."""
    if isinstance(reply.usage, UnsetType):
        return ScriptedUsage(input=input_tokens, output=output_tokens)
    return reply.usage


def _faults(reply: Reply, dialect: Dialect) -> deque[tuple[int, Step]]:
    """The faults, each after a number of deltas; at the same number, the harmless ones first."""
    planned: list[tuple[int | None, Step]] = [
        (1 if reply.unknown_event else None, RawStep(dialect.unknown())),
        (reply.malformed_after, RawStep(dialect.malformed())),
        (reply.hold_after, FaultStep.HOLD),
        (reply.error_after, RawStep(dialect.failed())),
        (reply.error_after, FaultStep.END),
        (reply.stall_after, FaultStep.STALL),
        (reply.cut_after, FaultStep.CUT),
    ]
    faults = [(after, step) for after, step in planned if after is not None]
    return deque(sorted(faults, key=lambda fault: fault[0]))


def _one_block(
    block: ScriptBlock, pieces: Iterator[str]
) -> Iterator[BlockBegan | BlockPiece | BlockEnded]:
    yield BlockBegan(block)
    for text in pieces:
        yield BlockPiece(block, text)
    yield BlockEnded(block)


def _pieces(text: str) -> Iterator[str]:
    return (match[0] for match in PIECE.finditer(text))


def _text(reply: Reply, now_ns: Callable[[], int]) -> Iterator[str]:
    if reply.tokens and reply.stamp:
        return (f"@{now_ns()} " for _ in range(reply.tokens))
    if reply.tokens:
        return (f"tok{n} " for n in range(reply.tokens))
    pieces = iter(reply.deltas) if reply.deltas else _pieces(reply.text)
    return (f"@{now_ns()} {piece}" for piece in pieces) if reply.stamp else pieces


def _arguments(text: str) -> Iterator[str]:
    return (text[at : at + ARGUMENT_CHARS] for at in range(0, len(text), ARGUMENT_CHARS))


def _long_line(dialect: Dialect, block: ScriptBlock, line_bytes: int) -> bytes:
    """A delta whose line has this many bytes, or as few as the dialect can make it."""
    line = dialect.delta(block, "").rstrip(b"\n").rpartition(b"\n")[2]
    return dialect.delta(block, "x" * max(0, line_bytes - len(line)))
