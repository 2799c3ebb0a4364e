"""The words of a command in its syntax tree, and the expansions in them.

An expansion is walked for the commands in it and replaced by a mark; `words.py` parses the rest of
the word. An expansion that could run the value of a variable makes the whole command unclear.
"""

import re
from collections.abc import Callable

from tree_sitter import Node

from culm.shell.words import (
    NUMBER,
    OUTPUT,
    PLAIN,
    UNKNOWN,
    CommandVisitor,
    Directories,
    Outcome,
    UnexpectedWord,
    Word,
    names,
    scan,
)

EXPANSIONS = names(
    "simple_expansion expansion command_substitution arithmetic_expansion process_substitution"
)
WORD_PARTS = names(
    "word number string string_content raw_string ansi_c_string concatenation brace_expression"
    " extglob_pattern regex variable_name special_variable_name"
)
# Their values are harmless to print.
_HARMLESS = names(
    "$? $# $$ $! $PWD $OLDPWD $RANDOM $SECONDS $LINENO ${?} ${PWD}"
    " ${PIPESTATUS[0]} ${PIPESTATUS[1]}"
)
_SIMPLE = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9?#$!@*-])")
# `${name}`, `${#name}` and the operators that insert text; not `${!x}`, `${x@P}`, `${a[i]}` and
# `${x:offset}`, which can run the value of a variable.
_EXPANSION = re.compile(
    r"\$\{(?:#?(?:[A-Za-z_0-9]+|[@*#?$!-])"
    r"|(?:[A-Za-z_0-9]+|[@*])(?::?[-+?=]|##?|%%?|//?|\^\^?|,,?)[^$`]*)\}",
    re.DOTALL,
)
_ARITHMETIC = re.compile(r"[0-9 \t+*/%()<>=!&|^~?:-]*")


class Expander:
    """Parses the words of one command and walks the expansions in them."""

    def __init__(
        self,
        source: bytes,
        visitor: CommandVisitor,
        statement: Callable[[Node, Directories], Outcome],
    ) -> None:
        self._source = source
        self._visitor = visitor
        self._statement = statement

    def text(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode()

    def unknown_node(self, node: Node) -> None:
        """Report a node of an unknown kind."""
        self._visitor.unclear("part of its syntax is not understood")
        # The commands in it are reported all the same, for rules that deny.
        for child in node.children:
            if child.type in EXPANSIONS:
                self.expansion(child, None)
            elif child.is_named and child.children:
                self._statement(child, None)

    def word(self, node: Node, directories: Directories) -> Word:
        raw = self.text(node)
        if PLAIN.fullmatch(raw) and "=~" not in raw and ":~" not in raw:
            return Word(raw, raw)
        try:
            return scan(self.mask(node, directories), raw)
        except UnexpectedWord:
            self._visitor.unclear("a word in it cannot be parsed")
            return Word(raw, None)

    def mask(self, node: Node, directories: Directories) -> str:
        """Walk the expansions of a word and return its text with a mark in place of each."""
        if node.type in EXPANSIONS:
            return self.expansion(node, directories)
        if node.type not in WORD_PARTS and node.type not in ("command_name", "heredoc_body"):
            self.unknown_node(node)
            return UNKNOWN
        out: list[str] = []
        at = node.start_byte
        for child in node.children:
            if not child.children:
                continue
            out.append(self._source[at : child.start_byte].decode())
            out.append(self.mask(child, directories))
            at = child.end_byte
        out.append(self._source[at : node.end_byte].decode())
        return "".join(out)

    def expansion(self, node: Node, directories: Directories) -> str:
        # Between quotes the grammar includes the blanks before an expansion in it.
        raw = self.text(node).lstrip(" \t\n")
        match node.type:
            case "simple_expansion":
                if not _SIMPLE.fullmatch(raw):
                    self._visitor.unclear("an expansion in it cannot be resolved")
            case "command_substitution":
                if raw.startswith("`") and "\\" in raw:
                    self._visitor.unclear("an expansion in it cannot be resolved")
                self._statement(node, directories)
                return OUTPUT
            case "process_substitution":
                self._statement(node, directories)
                return UNKNOWN
            case "arithmetic_expansion" if _ARITHMETIC.fullmatch(raw.lstrip("$")):
                return NUMBER
            case "expansion" if raw not in _HARMLESS:
                masked = raw
                for child in node.children:
                    if child.children:
                        self.mask(child, directories)
                        masked = masked.replace(self.text(child), "", 1)
                if not _EXPANSION.fullmatch(masked):
                    self._visitor.unclear("an expansion in it can run the value of a variable")
            case "expansion":
                pass
            case _:
                for child in node.children:
                    if child.is_named:
                        self.unknown_node(child)
                self._visitor.unclear("arithmetic in it can run the value of a variable")
        return NUMBER if raw in _HARMLESS else UNKNOWN
