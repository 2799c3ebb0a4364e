"""Storage of reasoning that a provider must receive back exactly as it was sent.

Owns the formats of `Reasoning.signature`, one per dialect; no other module reads them. Our messages
have one reasoning part with one text and one signature, to which pieces can only be appended.

OpenAI's dialect has no common field for such data, so each piece is a JSON object on a line of its
own (`ReasoningLine`). Anthropic's answers have any number of thinking blocks, some of them
encrypted, between their texts and calls. Each block begins a line:

    <signature>                                         a first block, before everything else
    thinking <thought> <said> <called> <signature>      any other block
    redacted <thought> <said> <called> <data>           an encrypted block, without a text

The numbers are the position of the block: after how many characters of reasoning and of text, and
after how many calls. If an answer was cut, its last block has no signature and is dropped.
"""

import re
from typing import Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

from culm.wire.codec import Json, encode
from culm.wire.messages import Reasoning

# --- OpenAI's dialect

Detail = dict[str, Json]

_GROWING = ("text", "summary")  # The fields of a detail that arrive in pieces.


class ReasoningLine(Struct, frozen=True, omit_defaults=True):
    """One line: either the signature of a call, or all details of the reasoning."""

    call: int = 0  # The index of the call in the answer.
    signature: str = ""
    details: tuple[Detail, ...] = ()


def encode_line(line: ReasoningLine) -> str:
    return encode(line).decode() + "\n"


def parse_lines(signature: str) -> list[ReasoningLine]:
    """The lines in our format; the signatures of other adapters are ignored."""
    found: list[ReasoningLine] = []
    for line in signature.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=ReasoningLine))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    return found


class ReasoningDetails:
    """Assembles details of reasoning from their pieces."""

    def __init__(self) -> None:
        self.chars = 0  # Of all details.
        self._all: list[Detail] = []
        # Pieces of the last detail, joined once so that long reasoning takes linear time.
        self._pieces: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, piece: Detail) -> None:
        if not self._all or not _continues(self._all[-1], piece):
            self._join()
            self._all.append({})
        for name, value in piece.items():
            if name in _GROWING and isinstance(value, str):
                self._all[-1].setdefault(name, "")  # Keeps the order of the fields.
                self._pieces.setdefault(name, []).append(value)
                self.chars += len(value)
            elif value is not None or name not in self._all[-1]:
                self._all[-1][name] = value
                self.chars += len(value) if isinstance(value, str) else 0

    def whole(self) -> tuple[Detail, ...]:
        self._join()
        return tuple(self._all)

    def _join(self) -> None:
        for name, pieces in self._pieces.items():
            self._all[-1][name] = (self._all[-1].get(name) or "") + "".join(pieces)
        self._pieces.clear()


def _continues(last: Detail, piece: Detail) -> bool:
    same = all(last.get(name) == piece.get(name) for name in ("type", "index"))
    return same and not piece.get("data")  # Encrypted details are never split.


# --- Anthropic's dialect

SEPARATOR = "\n\n"  # Between the texts of two blocks when they are shown as one.

Kind = Literal["thinking", "redacted"]


class ThinkingBlock(NamedTuple):
    """One block of thinking. `proof` is its signature or its encrypted data."""

    kind: Kind
    text: str
    said: int  # Characters of the message's text before it.
    called: int  # Calls before it.
    proof: str


class ThinkingRecorder:
    """Builds the signature while an answer arrives."""

    def __init__(self) -> None:
        self.said = 0
        self.called = 0
        self.thought = 0
        self._begun = False

    def on_block(self, kind: Kind) -> tuple[str, str]:
        """Begin a block; returns the prefixes of its text and of its signature."""
        between = SEPARATOR if self.thought and kind == "thinking" else ""
        self.thought += len(between)
        is_first = not self._begun and not self.said and not self.called
        self._begun = True
        if is_first and kind == "thinking":
            return "", ""
        return between, f"\n{kind} {self.thought} {self.said} {self.called} "


_BLOCK = re.compile(r"(thinking|redacted) ([0-9]+) ([0-9]+) ([0-9]+) (.*)")


def thoughts_of(reasoning: Reasoning) -> list[ThinkingBlock]:
    """The blocks with a signature, in order; none if another adapter wrote them."""
    head, *lines = reasoning.signature.split("\n")
    blocks = [_BLOCK.fullmatch(line) for line in (f"thinking 0 0 0 {head}", *lines)]
    thoughts: list[ThinkingBlock] = []
    end = len(reasoning.thinking)
    for block in reversed(blocks):
        if block is None:
            return []
        kind, start, text = cast("Kind", block[1]), int(block[2]), ""
        if kind == "thinking":
            text = reasoning.thinking[start:end]
            end = max(0, start - len(SEPARATOR))
        if block[5]:
            thoughts.append(ThinkingBlock(kind, text, int(block[3]), int(block[4]), block[5]))
    return thoughts[::-1]
