"""The walk over a command's syntax tree: every simple command in it, and where each would run.

Owns what the shell does between commands: order, directories, expansions, redirections. A node the
walk does not know, and text the grammar skipped, make the whole unclear. What a simple command does
is not decided here; the `Sink` is told of each.
"""

import re

from culm.shell.expansions import EXPANSIONS, WORD_PARTS, Expander
from culm.shell.script import (
    Directories,
    Outcome,
    Redirection,
    SimpleCommand,
    VariableAssignment,
    union,
)
from culm.shell.tree import Node, parse
from culm.shell.words import UNKNOWN, Word, names

_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_BLANK = re.compile(rb"(?:[ \t\n]|\\\n)*")
_BLANK_IN_LINE = re.compile(rb"(?:[ \t]|\\\n)*")
_DELIMITER = re.compile(r"\\?([\w.-]+)|'([\w.-]+)'|\"([\w.-]+)\"")
_LEFT_OVER = re.compile(r"(?<!\\)(?:\\\\)*[$`][A-Za-z0-9_({@*#?$!`-]")
_OF_A_LOOP = re.compile(r"[a-z_][a-z0-9_]*|[A-Z]")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEPARATORS = names("; & ;; ;& ;;&") | {"\n"}
_KEYWORDS = names(
    "if then elif else fi while until for select in do done case esac | ( ) { } function !"
)


def walk(text: str, directories: Directories, sink: Redirection) -> Outcome:
    """Tell the sink of everything the text would run."""
    try:
        source = text.encode()
    except UnicodeEncodeError:
        sink.unclear("it is not valid text")
        return None, None
    if _CONTROL.search(source):
        sink.unclear("it holds control characters")
        return None, None
    tree = parse(source)
    if tree is None:
        sink.unclear("it is too long or too deeply nested to be judged")
        return None, None
    return _Walker(source, sink).program(tree.root_node, directories)


class _Walker:
    def __init__(self, source: bytes, sink: Redirection) -> None:
        self._source = source
        self._sink = sink
        self._words = Expander(source, sink, self._statement)

    def program(self, root: Node, directories: Directories) -> Outcome:
        if root.has_error:
            self._sink.unclear("its syntax is not understood")
        if root.type != "program":
            return None, None
        rims = self._source[: root.start_byte] + b"\n" + self._source[root.end_byte :]
        if not _BLANK.fullmatch(rims):
            self._sink.unclear("its syntax is not understood")
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
                    self._sink.unclear("it changes directory in a loop")
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
                self._words.odd(node)
        return directories, directories

    def _block(self, node: Node, directories: Directories, *, piped: bool = False) -> Outcome:
        """Statements one after the other."""
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
                    self._sink.unclear("part of its syntax is not understood")
                separated = False
                before = directories if piped else union(*outcome)
                outcome = self._statement(child, before)
                follows = children[index + 1].type if index + 1 < len(children) else ""
                if follows == "&":
                    outcome = (before, before)
        return outcome

    def _list(self, node: Node, directories: Directories) -> Outcome:
        parts = [child for child in self._children(node) if child.type != "comment"]
        if len(parts) != 3:  # There is an error in it.
            self._words.odd(node)
            return None, None
        left, operator, right = parts
        good, bad = self._statement(left, directories)
        if operator.type == "&&":
            then = self._statement(right, good)
            return then[0], union(bad, then[1])
        if operator.type == "||":
            then = self._statement(right, bad)
            return union(good, then[0]), then[1]
        self._sink.unclear("part of its syntax is not understood")
        return None, None

    def _branches(self, node: Node, directories: Directories) -> Outcome:
        """Any of its statements may run or not, in the order of the text."""
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
                    self._sink.unclear("part of its syntax is not understood")
            elif header and (kind in WORD_PARTS or kind in EXPANSIONS):
                self._words.word(child, current)
            else:
                current = union(current, *self._statement(child, current))
        return current, current

    def _loop_variable(self, node: Node, variable: Node, directories: Directories) -> None:
        """`for PATH in ./bin` sets it as an assignment does; no program looks at `for file in`."""
        name = self._words.text(variable)
        if _OF_A_LOOP.fullmatch(name):
            return
        body = next((one for one in node.children if one.type == "do_group"), node)
        raw = self._source[node.start_byte : body.start_byte].decode().rstrip("; \t\n")
        self._sink.simple(
            SimpleCommand((), (VariableAssignment(name, Word(raw, None), raw),), directories)
        )

    def _function(self, node: Node, directories: Directories) -> None:
        for child in self._children(node):
            if child.type == "word":
                self._sink.define(self._words.text(child))
            elif child.is_named and self._statement(child, directories) != (
                directories,
                directories,
            ):
                self._sink.unclear("a function in it changes directory")

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
                # After a list it belongs to the last command, and happens where that one runs.
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
                self._sink.unclear("its words cannot be told apart")
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
        return self._sink.simple(SimpleCommand(tuple(words), tuple(assignments), directories))

    def _assignments(self, node: Node, directories: Directories) -> None:
        nodes = [node] if node.type == "variable_assignment" else self._children(node)
        found = tuple(self._assignment(child, directories) for child in nodes)
        self._sink.simple(SimpleCommand((), found, directories))

    def _assignment(self, node: Node, directories: Directories) -> VariableAssignment:
        raw = self._words.text(node)
        children = self._children(node)
        name = self._words.text(children[0]) if children else ""
        if node.type != "variable_assignment" or not _ASSIGNED.fullmatch(name):
            # The subscript of an array is arithmetic, which can run what a variable holds.
            self._sink.unclear("an assignment in it cannot be resolved")
            self._words.odd(node)
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
            self._sink.unclear("an assignment in it cannot be resolved")
        return VariableAssignment(name, value, raw)

    def _declaration(self, node: Node, directories: Directories) -> None:
        """`export`, `declare`, `unset` and their like, told of as the simple commands they are."""
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
        self._sink.simple(SimpleCommand(tuple(words), (), directories))

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
        self._sink.test(words, directories)

    # Redirections.

    def _redirect(self, node: Node, directories: Directories) -> None:
        if node.type == "file_redirect":
            self._file_redirect(node, directories)
        elif node.type == "herestring_redirect":
            for child in self._children(node):
                if child.is_named:
                    self._sink.redirect("<<<", self._words.word(child, directories), directories)
        elif node.type == "heredoc_redirect":
            self._heredoc(node, directories)
        else:
            self._words.odd(node)

    def _file_redirect(self, node: Node, directories: Directories) -> None:
        operator = ""
        target: Word | None = None
        for child in self._children(node):
            if child.type == "file_descriptor":
                if not self._words.text(child).isdigit():
                    self._sink.unclear("a redirection in it cannot be resolved")
            elif not child.is_named:
                operator = child.type
            elif target is None:
                target = self._words.word(child, directories)
            else:
                # The grammar lets a redirection have several targets; the shell does not.
                self._sink.unclear("a redirection in it cannot be resolved")
                self._words.word(child, directories)
        if operator not in (">&-", "<&-"):
            self._sink.redirect(operator, target or Word("", None), directories)
        elif target is not None:
            self._sink.unclear("a redirection in it cannot be resolved")

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
        # The grammar may leave out blanks at the beginning; they hold nothing.
        is_agreed = (
            found is not None
            and found[1] == ends
            and self._source[found[0] : begins].strip(b" \t") == b""
            and found[0] <= begins
        )
        if not is_agreed or _LEFT_OVER.search(body):
            self._sink.unclear("a here-document in it cannot be resolved")
        known = None if UNKNOWN in body else ""
        self._sink.redirect("<<<", Word(body, known), directories)

    def _children(self, node: Node) -> list[Node]:
        """Its children, if nothing but blanks lies between them."""
        children = node.children
        end = node.start_byte
        for child in children:
            start = child.start_byte
            if start != end and not _BLANK.fullmatch(self._source, end, start):
                self._sink.unclear("part of its syntax is not understood")
            end = child.end_byte
        return children

    def _comment(self, node: Node) -> None:
        before = self._source[node.start_byte - 1 : node.start_byte]
        text = self._source[node.start_byte : node.end_byte]
        if (before and before not in b" \t\n;&|()") or b"\n" in text:
            self._sink.unclear("part of its syntax is not understood")

    def _gap(self, before: Node, after: Node) -> bytes:
        return self._source[before.end_byte : after.start_byte]


def _document(
    source: bytes, named: int, start: str, *, strips_tabs: bool
) -> tuple[int, int] | None:
    """Where a here-document begins and ends, as the shell finds it: line by line."""
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
            return None  # The shell joins lines before it looks for the end.
        at = end + 1
    return None


def _is_expanded(start: str) -> bool:
    return not any(quote in start for quote in "'\"\\")
