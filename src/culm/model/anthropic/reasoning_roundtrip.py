"""Storage of Claude's thinking, which must be returned exactly as it was received.

Owns the format of `Reasoning.signature` for Anthropic's dialect. Our messages have one reasoning
part with one text and one signature, to which pieces can only be appended; Anthropic's answers
have any number of thinking blocks, some of them encrypted, between their texts and calls. So each
block begins a line of the signature:

    <signature>                                         a first block, before everything else
    thinking <thought> <said> <called> <signature>      any other block
    redacted <thought> <said> <called> <data>           an encrypted block, without a text

The numbers are the position of the block: after how many characters of reasoning and of text, and
after how many calls. If an answer was cut, its last block has no signature and is dropped.
"""

from typing import Literal, NamedTuple

from culm.wire.messages import Reasoning

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


def thoughts_of(reasoning: Reasoning) -> list[ThinkingBlock]:
    """The blocks with a signature, in order; none if another adapter wrote them."""
    head, *lines = reasoning.signature.split("\n")
    blocks = [_Block("thinking", 0, 0, 0, head)]
    for line in lines:
        block = _parse_block(line)
        if block is None:
            return []
        blocks.append(block)
    thoughts: list[ThinkingBlock] = []
    end = len(reasoning.thinking)
    for block in reversed(blocks):
        text = ""
        if block.kind == "thinking":
            text = reasoning.thinking[block.thought : end]
            end = max(0, block.thought - len(SEPARATOR))
        if block.proof:
            thoughts.append(ThinkingBlock(block.kind, text, block.said, block.called, block.proof))
    return thoughts[::-1]


class _Block(NamedTuple):
    kind: Kind
    thought: int
    said: int
    called: int
    proof: str


def _parse_block(line: str) -> _Block | None:
    match line.split(" ", 4):
        case [("thinking" | "redacted") as kind, thought, said, called, proof]:
            if thought.isdecimal() and said.isdecimal() and called.isdecimal():
                return _Block(kind, int(thought), int(said), int(called), proof)
            return None
        case _:
            return None
