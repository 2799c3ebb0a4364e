"""The syntax tree of a shell command, from tree-sitter, within bounds.

The only module that knows tree-sitter; it is imported by the first command that is judged, so that
nothing else pays for it.
"""

from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Tree

TEXT_BYTES_MAX = 64 * 1024  # Nobody can read more than that before consenting to it.
DEPTH_MAX = 120  # The walk takes some four frames a level; people nest less than 20 deep.
NODES_MAX = 50_000  # What 64 KiB of short words come to; more is an attack on our time.
# Brackets that never close cost the parser the square of their number: 2,000 take 0.2 s, 20,000
# take 20 s. It has a callback to stop it, which crashes the process (0.25.2), so we count before.
OPENERS_MAX = 2_000


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(source: bytes) -> Tree | None:
    """None if the text is too much to be judged."""
    openers = source.count(b"(") + source.count(b"{") + source.count(b"[") + source.count(b"<")
    if len(source) > TEXT_BYTES_MAX or openers > OPENERS_MAX:
        return None
    tree = _parser().parse(source)
    return tree if _is_bounded(tree) else None


def _is_bounded(tree: Tree) -> bool:
    """Whether the tree is small and flat enough to be walked by recursion."""
    if tree.root_node.descendant_count > NODES_MAX:
        return False
    cursor = tree.walk()
    while True:
        if cursor.goto_first_child():
            if cursor.depth > DEPTH_MAX:
                return False
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return True


__all__ = ["Node", "Tree", "parse"]
