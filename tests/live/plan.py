"""What a publisher does in one session, as a seeded list, and what must be left of it.

Pure: the publisher carries a plan out, a test holds what survived against the same plan.
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

WORDS = ("bamboo ", "stem ", "grüße ", "🌱", "竹 ", "root\n", 'quote" ', "\\ ", "a", "node ")
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
    """Deltas. Told at once, and durable only when something after it says so."""

    name: str
    part: int
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Keep:
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
    """Grow word by word until the publisher is told to rest, or dies."""

    name: str
    part: int


Op = Add | Open | Grow | Keep | Put | Clear | End | Delete | DeleteSession | Drip

FINISH = Finish("end_turn", 1)


def make_plan(seed: int, session: int, *, messages: int, deletes: bool = True) -> list[Op]:
    """The life of one session. Names are unique in it and become the messages' model names."""
    chance = random.Random(f"{seed}/{session}")
    ops: list[Op] = []
    for number in range(messages):
        name = f"m{number}"
        if chance.random() < 0.3:
            ops.append(Add(f"u{number}", f"u{number}: {_text(chance)}"))
        ops += [Open(name), *_growth(chance, name)]
        if deletes and chance.random() < 0.2:
            ops.append(Delete(name))  # Open as it is: what is on its way to it is dropped.
            continue
        ops.append(End(name))
        if deletes and chance.random() < 0.1:
            ops.append(Delete(name))
    if deletes and chance.random() < 0.2:
        ops.append(DeleteSession())
    return ops


KEPT_FIRST = ("kept text 🌱 ",) * 100


def make_drip() -> list[Op]:
    """A session whose one message is open for as long as the process lives."""
    return [
        Open("drip"),
        Grow("drip", 0, KEPT_FIRST),
        Keep("drip"),
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
                ops.append(Keep(name))
            call = ToolCall(f"{name}.{attempt}.{turn}", "bash", '{"command":"ls"}', finished=True)
            ops.append(Put(name, 2 * turn + 1, ToolCallPart(call)))
    return ops


def _pieces(chance: random.Random) -> tuple[str, ...]:
    # Now and then more than a chunk (4096 code points) and more than a row (8 KiB) holds.
    long = 100 if chance.random() < 0.1 else 1
    return tuple(chance.choice(WORDS) * long for _ in range(chance.choice((3, 10, 30))))


def _text(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randint(1, 40)))


# --- what must be left


@dataclass(slots=True)
class Left:
    """One message after some of the plan: its parts, and how much of the last may be missing."""

    parts: list[Part] = field(default_factory=list[Part])
    sure: int = 0  # Code points of the last part that are durable; earlier parts are all.
    dripping: bool = False
    ended: bool = False


@dataclass(slots=True)
class World:
    """One session after some of its plan; `messages` is None once it is deleted."""

    messages: dict[str, Left] | None = field(default_factory=dict[str, Left])

    def apply(self, op: Op) -> None:
        assert self.messages is not None, "a plan ends with its session"
        match op:
            case Add(name, text):
                self.messages[name] = Left([TextPart(Text(text))], ended=True)
            case Open(name):
                self.messages[name] = Left()
            case Grow(name, part, pieces):
                left = self.messages[name]
                if part == len(left.parts):
                    left.parts.append(TextPart(Text()))
                    left.sure = 0
                _last_text(left).text += "".join(pieces)
            case Drip(name):
                self.messages[name].dripping = True
            case Keep(name):
                left = self.messages[name]
                left.sure = len(_last_text(left).text)
            case Put(name, _, call):
                left = self.messages[name]
                left.parts.append(call)
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


def world_after(ops: Sequence[Op]) -> World:
    world = World()
    for op in ops:
        world.apply(op)
    return world


def find_difference(world: World, found: Sequence[Message] | None) -> str:
    """Why `found` (None: no such session) cannot be what is left of `world`; empty if it can.

    A message that was open at the kill must be finished as interrupted, its last part cut at
    most down to what was durable.
    """
    if world.messages is None or found is None:
        gone = world.messages is None, found is None
        return "" if gone[0] == gone[1] else f"session gone: wanted {gone[0]}, found {gone[1]}"
    by_name = {_name(message): message for message in found}
    if by_name.keys() != world.messages.keys():
        return f"messages {sorted(by_name)} instead of {sorted(world.messages)}"
    for name, left in world.messages.items():
        if why := _differs(left, by_name[name]):
            return f"{name}: {why}"
    return ""


def _differs(left: Left, message: Message) -> str:
    *parts, finish = message.parts
    if not isinstance(finish, FinishPart):
        return "not finished"
    reason = finish.data.culm_reason or "planned"
    if reason != ("planned" if left.ended else "interrupted"):
        return f"finished as {reason}"
    if parts == left.parts:
        return ""
    last = left.parts[-1] if left.parts else None
    if left.ended or not isinstance(last, TextPart):
        return f"{parts} instead of {left.parts}"
    if not left.sure and parts == left.parts[:-1]:
        return ""  # Nothing of the last part was durable yet.
    found = parts[-1] if parts else None
    if parts[:-1] != left.parts[:-1] or not isinstance(found, TextPart):
        return f"{parts} instead of {left.parts}"
    known, text = last.data.text, found.data.text
    if left.dripping:
        # How often it dripped is not known, only what a drip is.
        known += DRIP_WORD * (len(text) // len(DRIP_WORD))
    if not known.startswith(text):
        return f"text {text[-40:]!r} was never sent"
    return "" if len(text) >= left.sure else f"{len(text)} of {left.sure} durable code points"


def _last_text(left: Left) -> Text:
    part = left.parts[-1]
    assert isinstance(part, TextPart), "only text grows in a plan"
    return part.data


def _name(message: Message) -> str:
    """Messages are named by their model; those added whole, by how their text begins."""
    if message.model:
        return message.model
    first = message.parts[0]
    assert isinstance(first, TextPart), "a plan adds nothing but text"
    return first.data.text.partition(":")[0]
