"""The seeded operations of a publisher in one session, and the state they must leave.

Pure: the publisher runs a plan, a test compares what survived with the same plan.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
)

FRAGMENTS = ("bamboo ", "stem ", "grüße ", "🌱", "竹 ", "root\n", 'quote" ', "\\ ", "a", "node ")
DRIP_WORD = "drip "


@dataclass(frozen=True, slots=True)
class Add:
    """A message that is complete from the start; its text begins with its name and a colon."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Open:
    name: str


@dataclass(frozen=True, slots=True)
class Grow:
    """Deltas: published at once, durable only after a later operation."""

    name: str
    part: int
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until all text so far is durable."""

    name: str


@dataclass(frozen=True, slots=True)
class Put:
    name: str
    part: int
    call: ToolCallPart


@dataclass(frozen=True, slots=True)
class Clear:
    name: str


@dataclass(frozen=True, slots=True)
class End:
    name: str


@dataclass(frozen=True, slots=True)
class Delete:
    name: str


@dataclass(frozen=True, slots=True)
class DeleteSession:
    pass


@dataclass(frozen=True, slots=True)
class Drip:
    """Append one word at a time until the publisher reads `rest`, or is killed."""

    name: str
    part: int


Op = Add | Open | Grow | Flush | Put | Clear | End | Delete | DeleteSession | Drip

FINISH = Finish("end_turn", 1)


def make_plan(seed: int, session: int, *, messages: int, deletes: bool = True) -> list[Op]:
    """All operations of one session. Names are unique in it and become the model names."""
    chance = random.Random(f"{seed}/{session}")
    ops: list[Op] = []
    for number in range(messages):
        name = f"m{number}"
        if chance.random() < 0.3:
            ops.append(Add(f"u{number}", f"u{number}: {_text(chance)}"))
        ops += [Open(name), *_growth(chance, name)]
        if deletes and chance.random() < 0.2:
            ops.append(Delete(name))  # While it is open: pending text for it is dropped.
            continue
        ops.append(End(name))
        if deletes and chance.random() < 0.1:
            ops.append(Delete(name))
    if deletes and chance.random() < 0.2:
        ops.append(DeleteSession())
    return ops


FLUSHED_FIRST = ("kept text 🌱 ",) * 100


def make_drip() -> list[Op]:
    """A session whose only message stays open while the process lives."""
    return [
        Open("drip"),
        Grow("drip", 0, FLUSHED_FIRST),
        Flush("drip"),
        Drip("drip", 0),
        End("drip"),
    ]


def _growth(chance: random.Random, name: str) -> list[Op]:
    ops: list[Op] = []
    for attempt in range(chance.choice((1, 1, 2))):
        if attempt:
            ops.append(Clear(name))
        for turn in range(chance.randint(1, 3)):
            ops.append(Grow(name, 2 * turn, _pieces(chance)))
            if chance.random() < 0.4:
                ops.append(Flush(name))
            call = ToolCall(f"{name}.{attempt}.{turn}", "bash", '{"command":"ls"}', finished=True)
            ops.append(Put(name, 2 * turn + 1, ToolCallPart(call)))
    return ops


def _pieces(chance: random.Random) -> tuple[str, ...]:
    # Sometimes more than a chunk (4096 code points) and more than a row (8 KiB) holds.
    long = 100 if chance.random() < 0.1 else 1
    return tuple(chance.choice(FRAGMENTS) * long for _ in range(chance.choice((3, 10, 30))))


def _text(chance: random.Random) -> str:
    return "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 40)))


# --- the expected state


@dataclass(slots=True)
class ExpectedMessage:
    """A message after a part of the plan: its parts, and how much of the last is durable."""

    parts: list[Part] = field(default_factory=list[Part])
    durable: int = 0  # Code points of the last part; earlier parts are durable as a whole.
    dripping: bool = False
    ended: bool = False


@dataclass(slots=True)
class SessionState:
    """A session after a part of its plan; `messages` is None once it is deleted."""

    messages: dict[str, ExpectedMessage] | None = field(default_factory=dict[str, ExpectedMessage])

    def apply(self, op: Op) -> None:
        assert self.messages is not None, "a plan ends with its session"
        match op:
            case Add(name, text):
                self.messages[name] = ExpectedMessage([TextPart(Text(text))], ended=True)
            case Open(name):
                self.messages[name] = ExpectedMessage()
            case Grow(name, part, pieces):
                expected = self.messages[name]
                if part == len(expected.parts):
                    expected.parts.append(TextPart(Text()))
                    expected.durable = 0
                _last_text(expected).text += "".join(pieces)
            case Drip(name):
                self.messages[name].dripping = True
            case Flush(name):
                expected = self.messages[name]
                expected.durable = len(_last_text(expected).text)
            case Put(name, _, call):
                expected = self.messages[name]
                expected.parts.append(call)
            case Clear(name):
                self.messages[name].parts.clear()
            case End(name):
                self.messages[name].ended = True
            case Delete(name):
                del self.messages[name]
            case DeleteSession():
                self.messages = None
            case _:
                assert_never(op)


def state_after(ops: Sequence[Op]) -> SessionState:
    state = SessionState()
    for op in ops:
        state.apply(op)
    return state


def find_difference(state: SessionState, found: Sequence[Message] | None) -> str:
    """Explain why `found` (None: no such session) cannot come from `state`; empty if it can.

    A message that was open at the kill must be finished as interrupted, its last part cut at
    most down to what was durable.
    """
    if state.messages is None or found is None:
        gone = state.messages is None, found is None
        return "" if gone[0] == gone[1] else f"session gone: wanted {gone[0]}, found {gone[1]}"
    by_name = {_name(message): message for message in found}
    if by_name.keys() != state.messages.keys():
        return f"messages {sorted(by_name)} instead of {sorted(state.messages)}"
    for name, expected in state.messages.items():
        if why := _differs(expected, by_name[name]):
            return f"{name}: {why}"
    return ""


def _differs(expected: ExpectedMessage, message: Message) -> str:
    *parts, finish = message.parts
    if not isinstance(finish, FinishPart):
        return "not finished"
    reason = finish.data.culm_reason or "planned"
    if reason != ("planned" if expected.ended else "interrupted"):
        return f"finished as {reason}"
    if parts == expected.parts:
        return ""
    last = expected.parts[-1] if expected.parts else None
    if expected.ended or not isinstance(last, TextPart):
        return f"{parts} instead of {expected.parts}"
    if not expected.durable and parts == expected.parts[:-1]:
        return ""  # Nothing of the last part was durable yet.
    found = parts[-1] if parts else None
    if parts[:-1] != expected.parts[:-1] or not isinstance(found, TextPart):
        return f"{parts} instead of {expected.parts}"
    known, text = last.data.text, found.data.text
    if expected.dripping:
        # The number of appended words is unknown, only the word itself.
        known += DRIP_WORD * (len(text) // len(DRIP_WORD))
    if not known.startswith(text):
        return f"text {text[-40:]!r} was never sent"
    return (
        ""
        if len(text) >= expected.durable
        else f"{len(text)} of {expected.durable} durable code points"
    )


def _last_text(expected: ExpectedMessage) -> Text:
    part = expected.parts[-1]
    assert isinstance(part, TextPart), "only text grows in a plan"
    return part.data


def _name(message: Message) -> str:
    """The model name of a message; of one that was added whole, the start of its text."""
    if message.model:
        return message.model
    first = message.parts[0]
    assert isinstance(first, TextPart), "a plan adds nothing but text"
    return first.data.text.partition(":")[0]
