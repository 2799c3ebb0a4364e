"""The walk over a command's syntax tree: every simple command in it, and where each would run.

Owns the parser and the rules of the shell between commands: order, directories, expansions,
redirections. An unknown node, and text that the grammar skipped, make the whole command unclear.
The effect of a simple command is not decided here; each is reported to the `CommandVisitor`.

Imports tree-sitter, which is slow to load, so `judge.py` imports this module on first use.
"""

import re
from collections.abc import Callable
from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Tree

from culm.shell.words import (
    NUMBER,
    OUTPUT,
    PLAIN,
    UNKNOWN,
    CommandVisitor,
    Directories,
    Outcome,
    SimpleCommand,
    UnexpectedWord,
    VariableAssignment,
    Word,
    names,
    scan,
    union,
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


# --- the walk


TEXT_BYTES_MAX = 64 * 1024  # More than a person reads before approving it.
DEPTH_MAX = 120  # The walk takes about four frames a level; people nest less than 20 deep.
NODES_MAX = 50_000  # About 64 KiB of short words; more would cost too much time.
# Unclosed brackets cost the parser quadratic time: 2,000 take 0.2 s, 20,000 take 20 s. Its callback
# for stopping early crashes the process (0.25.2), so they are counted before parsing.
OPENERS_MAX = 2_000

_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_BLANK = re.compile(rb"(?:[ \t\n]|\\\n)*")
_BLANK_IN_LINE = re.compile(rb"(?:[ \t]|\\\n)*")
_DELIMITER = re.compile(r"\\?([\w.-]+)|'([\w.-]+)'|\"([\w.-]+)\"")
_LEFT_OVER = re.compile(r"(?<!\\)(?:\\\\)*[$`][A-Za-z0-9_({@*#?$!`-]")
_LOOP_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*|[A-Z]")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEPARATORS = names("; & ;; ;& ;;&") | {"\n"}
_KEYWORDS = names(
    "if then elif else fi while until for select in do done case esac | ( ) { } function !"
)


def walk(text: str, directories: Directories, visitor: CommandVisitor) -> Outcome:
    """Report everything that the text would run to the visitor."""
    try:
        source = text.encode()
    except UnicodeEncodeError:
        visitor.unclear("it is not valid Unicode text")
        return None, None
    if _CONTROL.search(source):
        visitor.unclear("it contains control characters")
        return None, None
    tree = _parse(source)
    if tree is None:
        visitor.unclear("it is too long or too deeply nested to be analyzed")
        return None, None
    return _Walker(source, visitor).program(tree.root_node, directories)


class _Walker:
    def __init__(self, source: bytes, visitor: CommandVisitor) -> None:
        self._source = source
        self._visitor = visitor
        self._words = Expander(source, visitor, self._statement)

    def program(self, root: Node, directories: Directories) -> Outcome:
        if root.has_error:
            self._visitor.unclear("its syntax is not understood")
        if root.type != "program":
            return None, None
        outside = self._source[: root.start_byte] + b"\n" + self._source[root.end_byte :]
        if not _BLANK.fullmatch(outside):
            self._visitor.unclear("its syntax is not understood")
        return self._block(root, directories)

    # Statements.

    def _statement(self, node: Node, directories: Directories) -> Outcome:
        match node.type:
            case "command":
                return self._command(node, directories)
            case "list":
                return self._list(node, directories)
            case "redirected_statement":
                return self._redirected(node, directories)
            case "negated_command":
                outcome = self._block(node, directories)
                return outcome[1], outcome[0]
            case "compound_statement" if self._words.text(node).startswith("{"):
                return self._block(node, directories)
            case "pipeline" | "subshell" | "command_substitution" | "process_substitution":
                self._block(node, directories, piped=node.type == "pipeline")
                return directories, directories
            case "if_statement" | "elif_clause" | "else_clause" | "case_statement" | "case_item":
                return self._branches(node, directories)
            case "while_statement" | "for_statement" | "do_group":
                after = self._branches(node, directories)
                if after[0] != directories:
                    self._visitor.unclear("it changes directory in a loop")
                return after
            case "function_definition":
                self._function(node, directories)
            case "variable_assignment" | "variable_assignments":
                self._assignments(node, directories)
            case "declaration_command" | "unset_command":
                self._declaration(node, directories)
            case "test_command":
                self._test(node, directories)
            case _:
                self._words.unknown_node(node)
        return directories, directories

    def _block(self, node: Node, directories: Directories, *, piped: bool = False) -> Outcome:
        """Walk statements that run one after the other."""
        outcome: Outcome = (directories, directories)
        children = self._children(node)
        separated = True
        for index, child in enumerate(children):
            kind = child.type
            if kind == "comment":
                self._comment(child)
            elif kind == "file_redirect" and node.type == "command_substitution":
                self._file_redirect(child, directories)  # `$(< file)`
            elif not child.is_named:
                separated = True
            else:
                if not separated and b"\n" not in self._gap(children[index - 1], child):
                    self._visitor.unclear("part of its syntax is not understood")
                separated = False
                before = directories if piped else union(*outcome)
                outcome = self._statement(child, before)
                follows = children[index + 1].type if index + 1 < len(children) else ""
                if follows == "&":
                    outcome = (before, before)
        return outcome

    def _list(self, node: Node, directories: Directories) -> Outcome:
        parts = [child for child in self._children(node) if child.type != "comment"]
        if len(parts) != 3:  # It contains a syntax error.
            self._words.unknown_node(node)
            return None, None
        left, operator, right = parts
        good, bad = self._statement(left, directories)
        if operator.type == "&&":
            then = self._statement(right, good)
            return then[0], union(bad, then[1])
        if operator.type == "||":
            then = self._statement(right, bad)
            return union(good, then[0]), then[1]
        self._visitor.unclear("part of its syntax is not understood")
        return None, None

    def _branches(self, node: Node, directories: Directories) -> Outcome:
        """Walk statements each of which may run or not, in the order of the text."""
        current = directories
        header = node.type in ("for_statement", "case_statement", "case_item")
        for child in self._children(node):
            kind = child.type
            if kind == "comment":
                self._comment(child)
            elif kind == "variable_name":
                self._loop_variable(node, child, directories)
            elif not child.is_named:
                if kind not in _KEYWORDS and kind not in _SEPARATORS:
                    self._visitor.unclear("part of its syntax is not understood")
            elif header and (kind in WORD_PARTS or kind in EXPANSIONS):
                self._words.word(child, current)
            else:
                current = union(current, *self._statement(child, current))
        return current, current

    def _loop_variable(self, node: Node, variable: Node, directories: Directories) -> None:
        """Report `for PATH in ./bin` as an assignment; a name such as `file` affects no program."""
        name = self._words.text(variable)
        if _LOOP_VARIABLE.fullmatch(name):
            return
        body = next((one for one in node.children if one.type == "do_group"), node)
        raw = self._source[node.start_byte : body.start_byte].decode().rstrip("; \t\n")
        self._visitor.simple(
            SimpleCommand((), (VariableAssignment(name, Word(raw, None), raw),), directories)
        )

    def _function(self, node: Node, directories: Directories) -> None:
        for child in self._children(node):
            if child.type == "word":
                self._visitor.define(self._words.text(child))
            elif child.is_named and self._statement(child, directories) != (
                directories,
                directories,
            ):
                self._visitor.unclear("a function in it changes directory")

    def _redirected(self, node: Node, directories: Directories) -> Outcome:
        outcome: Outcome = (directories, directories)
        around = directories
        redirects: list[Node] = []
        for child in self._children(node):
            if child.type.endswith("_redirect"):
                redirects.append(child)
            else:
                outcome = self._statement(child, directories)
                around = union(directories, *outcome)
                # After a list it belongs to the last command, and applies in its directory.
                if child.type == "list" and "cd" not in self._words.text(child.children[-1]):
                    around = outcome[0]
        for child in redirects:
            self._redirect(child, around)
        return outcome

    # Simple commands.

    def _command(self, node: Node, directories: Directories) -> Outcome:
        words: list[Word] = []
        assignments: list[VariableAssignment] = []
        end = node.start_byte
        for child in node.children:
            gap = self._source[end : child.start_byte]
            if not _BLANK_IN_LINE.fullmatch(gap) or (not gap and end > node.start_byte):
                self._visitor.unclear("its words cannot be separated")
            end = child.end_byte
            kind = child.type
            if kind == "variable_assignment":
                assignments.append(self._assignment(child, directories))
            elif kind.endswith("_redirect"):
                self._redirect(child, directories)
            elif kind == "command_name":
                words.append(self._words.word(child, directories))
            elif kind in ("==", "=~"):
                words.append(Word(kind, kind))
            else:
                words.append(self._words.word(child, directories))
        return self._visitor.simple(SimpleCommand(tuple(words), tuple(assignments), directories))

    def _assignments(self, node: Node, directories: Directories) -> None:
        nodes = [node] if node.type == "variable_assignment" else self._children(node)
        found = tuple(self._assignment(child, directories) for child in nodes)
        self._visitor.simple(SimpleCommand((), found, directories))

    def _assignment(self, node: Node, directories: Directories) -> VariableAssignment:
        raw = self._words.text(node)
        children = self._children(node)
        name = self._words.text(children[0]) if children else ""
        if node.type != "variable_assignment" or not _ASSIGNED.fullmatch(name):
            # The subscript of an array is arithmetic, which can run the value of a variable.
            self._visitor.unclear("an assignment in it cannot be resolved")
            self._words.unknown_node(node)
            return VariableAssignment(name, Word(raw, None), raw)
        value = Word("", "")
        for child in children[2:]:
            if child.type == "array":
                for part in self._children(child):
                    if part.is_named:
                        self._words.word(part, directories)
                value = Word(raw, None)
            else:
                value = self._words.word(child, directories)
        if not raw.startswith((f"{name}=", f"{name}+=")):
            self._visitor.unclear("an assignment in it cannot be resolved")
        return VariableAssignment(name, value, raw)

    def _declaration(self, node: Node, directories: Directories) -> None:
        """Report `export`, `declare`, `unset` and similar as simple commands."""
        words: list[Word] = []
        for child in self._children(node):
            text = self._words.text(child)
            if child.type == "variable_assignment":
                value = self._assignment(child, directories).value.text
                words.append(Word(text, text if value is not None else None))
            elif child.is_named and child.type != "variable_name":
                words.append(self._words.word(child, directories))
            else:
                words.append(Word(text, text))
        self._visitor.simple(SimpleCommand(tuple(words), (), directories))

    def _test(self, node: Node, directories: Directories) -> None:
        words: list[Word] = []
        pending = [node]
        while pending:
            inner = pending.pop()
            if inner.type in WORD_PARTS or inner.type in EXPANSIONS:
                words.append(self._words.word(inner, directories))
            elif inner.children:
                pending.extend(reversed(self._children(inner)))
            else:
                words.append(Word(self._words.text(inner), self._words.text(inner)))
        self._visitor.test(words, directories)

    # Redirections.

    def _redirect(self, node: Node, directories: Directories) -> None:
        if node.type == "file_redirect":
            self._file_redirect(node, directories)
        elif node.type == "herestring_redirect":
            for child in self._children(node):
                if child.is_named:
                    self._visitor.redirect("<<<", self._words.word(child, directories), directories)
        elif node.type == "heredoc_redirect":
            self._heredoc(node, directories)
        else:
            self._words.unknown_node(node)

    def _file_redirect(self, node: Node, directories: Directories) -> None:
        operator = ""
        target: Word | None = None
        for child in self._children(node):
            if child.type == "file_descriptor":
                if not self._words.text(child).isdigit():
                    self._visitor.unclear("a redirection in it cannot be resolved")
            elif not child.is_named:
                operator = child.type
            elif target is None:
                target = self._words.word(child, directories)
            else:
                # The grammar lets a redirection have several targets; the shell does not.
                self._visitor.unclear("a redirection in it cannot be resolved")
                self._words.word(child, directories)
        if operator not in (">&-", "<&-"):
            self._visitor.redirect(operator, target or Word("", None), directories)
        elif target is not None:
            self._visitor.unclear("a redirection in it cannot be resolved")

    def _heredoc(self, node: Node, directories: Directories) -> None:
        start = body = ""
        operator = "<<"
        named = begins = ends = 0
        for child in self._children(node):
            match child.type:
                case "<<-":
                    operator = "<<-"
                case "heredoc_start":
                    start = self._words.text(child)
                    named = child.end_byte
                case "heredoc_end":
                    ends = child.end_byte
                    begins = begins or self._source.rfind(b"\n", 0, ends) + 1
                case "heredoc_body":
                    begins = child.start_byte
                    masked = _is_expanded(start)
                    body = self._words.mask(child, directories) if masked else ""
                case "file_redirect" | "herestring_redirect":
                    self._redirect(child, directories)
                case _ if child.is_named:
                    self._statement(child, directories)
                case _:
                    pass
        found = _document(self._source, named, start, strips_tabs=operator == "<<-")
        # The grammar may leave out blanks at the beginning; they contain no command.
        is_agreed = (
            found is not None
            and found[1] == ends
            and self._source[found[0] : begins].strip(b" \t") == b""
            and found[0] <= begins
        )
        if not is_agreed or _LEFT_OVER.search(body):
            self._visitor.unclear("a here-document in it cannot be resolved")
        known = None if UNKNOWN in body else ""
        self._visitor.redirect("<<<", Word(body, known), directories)

    def _children(self, node: Node) -> list[Node]:
        """Return the children; text other than blanks between them makes the command unclear."""
        children = node.children
        end = node.start_byte
        for child in children:
            start = child.start_byte
            if start != end and not _BLANK.fullmatch(self._source, end, start):
                self._visitor.unclear("part of its syntax is not understood")
            end = child.end_byte
        return children

    def _comment(self, node: Node) -> None:
        before = self._source[node.start_byte - 1 : node.start_byte]
        text = self._source[node.start_byte : node.end_byte]
        if (before and before not in b" \t\n;&|()") or b"\n" in text:
            self._visitor.unclear("part of its syntax is not understood")

    def _gap(self, before: Node, after: Node) -> bytes:
        return self._source[before.end_byte : after.start_byte]


def _document(
    source: bytes, named: int, start: str, *, strips_tabs: bool
) -> tuple[int, int] | None:
    """Find the start and end of a here-document as the shell does: line by line."""
    delimiter = _DELIMITER.fullmatch(start)
    if delimiter is None:
        return None
    marker = next(group for group in delimiter.groups() if group).encode()
    begins = at = source.find(b"\n", named) + 1
    while 0 < at < len(source):
        end = source.find(b"\n", at)
        end = len(source) if end < 0 else end
        line = source[at:end]
        if (line.lstrip(b"\t") if strips_tabs else line) == marker:
            return begins, end
        if line.endswith(b"\\") and _is_expanded(start):
            return None  # The shell joins continued lines before it looks for the end.
        at = end + 1
    return None


def _is_expanded(start: str) -> bool:
    return not any(quote in start for quote in "'\"\\")


# The grammar looks characters up in the tables of C that have only 256 entries, so others may crash
# the process. To the shell all of them are ordinary characters of a word, as is this one to the
# grammar, and `walk` refuses it in a command. Positions in the text stay the same.
_AS_ASCII = bytes(byte if byte < 0x80 else 0x7F for byte in range(256))


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _parse(source: bytes) -> Tree | None:
    """Parse a command; None if it is too large to be analyzed."""
    openers = source.count(b"(") + source.count(b"{") + source.count(b"[") + source.count(b"<")
    if len(source) > TEXT_BYTES_MAX or openers > OPENERS_MAX:
        return None
    tree = _parser().parse(source.translate(_AS_ASCII))
    return tree if _is_bounded(tree) else None


def _is_bounded(tree: Tree) -> bool:
    """Return True if the tree is small and flat enough for a recursive walk."""
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
