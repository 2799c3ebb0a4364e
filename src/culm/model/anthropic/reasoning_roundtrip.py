"""What Claude thought, kept so that it can go back exactly as it came.

Owns the format of `Reasoning.signature` for Anthropic's dialect. A message of ours has one
reasoning with one text and one signature, to which pieces are only ever appended; an answer of
theirs has any number of blocks of thinking, some of them encrypted, between its texts and calls.
So each block begins a line of the signature:

    <signature>                                         a first block, before everything else
    thinking <thought> <said> <called> <signature>      any other one
    redacted <thought> <said> <called> <data>           one that is encrypted and has no text

The numbers say where the block stood: behind how many characters of reasoning and of text, and
behind how many calls. An answer that was cut has a block without its signature, which is lost.
"""

from typing import Literal, NamedTuple

from culm.wire.messages import Reasoning

SEPARATOR = "\n\n"  # Between the texts of two blocks, where a person reads them as one.

Kind = Literal["thinking", "redacted"]


class ThinkingBlock(NamedTuple):
    """One block of thinking. `proof` is its signature, or what is encrypted."""

    kind: Kind
    text: str
    said: int  # How much of the message's text came before it ...
    called: int  # ... and how many of its calls.
    proof: str


class ThinkingRecorder:
    """Writes the signature while an answer comes."""

    def __init__(self) -> None:
        self.said = 0
        self.called = 0
        self.thought = 0
        self._begun = False

    def on_block(self, kind: Kind) -> tuple[str, str]:
        """A block begins: what goes before its text, and what before its signature."""
        between = SEPARATOR if self.thought and kind == "thinking" else ""
        self.thought += len(between)
        is_first = not self._begun and not self.said and not self.called
        self._begun = True
        if is_first and kind == "thinking":
            return "", ""
        return between, f"\n{kind} {self.thought} {self.said} {self.called} "


def thoughts_of(reasoning: Reasoning) -> list[ThinkingBlock]:
    """The blocks that can prove themselves, in their order; none if another adapter kept them."""
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
