"""The judgement of a shell command: what it would run, and whether it only reads the workspace.

Owns the verdict. The walk over the syntax tree reports every simple command. Here wrappers are
removed, each command is checked against the read-only table, and one that is not free gets its
coverage. Anything that cannot be resolved is reported as unclear, never guessed.
"""

import posixpath
from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters, digits

from msgspec import Struct

from culm.shell.checks import NotReadOnly, ReadOnlyCheck, check, is_numeric_test
from culm.shell.coverage import (
    SUBCOMMANDS,
    WRAPPERS,
    coverage_of,
    fill_in,
    is_interpreter,
    runner_length,
    runs_words,
    unwrap,
)
from culm.shell.paths import NULL, PathDisk, ReadablePaths, RealDisk
from culm.shell.table import TABLE, VERSIONS
from culm.shell.words import Directories, Outcome, SimpleCommand, Word, names

COMMANDS_MAX = 1_000  # More than anybody reads; a text with more is unclear as a whole.
TEXTS_MAX = 16  # `bash -c` in `bash -c` in …
WRAPPERS_MAX = 12  # `nice nice nice …`
TAILS_MAX = 20  # `watch -n 1 …`: a command starts within this many words.

# They run text as code, or change the meaning of later words.
_UNCLEAR = names(
    "eval source . alias unalias trap shopt enable hash bind complete compgen fc history"
    " mapfile readarray let select function logout"
)
# They take variable names as arguments.
_SUBSCRIPTS = names("declare typeset local readonly export unset read printf test [ wait getopts")
_PRINTERS = names("[ echo printf")  # They only print, with any argument.
_CONTROL_OPERATORS = names("&& || ( ) < > ;")
_SHELLS = names("bash sh dash")
# Syntax that other shells parse differently.
_BASHISMS = ("&>", "|&", "$'", '$"', "<(", ">(", "<<<", "[[", "((", "{", "function", ";&", "==")
# They affect neither the program that runs nor the files it reads.
_HARMLESS = names(
    "LANG LANGUAGE LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME TZ NO_COLOR"
    " FORCE_COLOR CLICOLOR CLICOLOR_FORCE COLUMNS LINES TERM CI NODE_ENV RUST_BACKTRACE"
    " RUST_LOG DEBUG PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE"
)
_HARMLESS_VALUE = frozenset(f"{ascii_letters}{digits}_.,:@+=-*")

_DISK = RealDisk()


class Judgement(Struct, frozen=True):
    is_free: bool  # It only reads inside the workspace.
    # Every simple command without its wrappers, words joined by one blank. Redirections that are
    # not free (`> /real/path`) and assignments that can change the program that runs (`PATH=.`)
    # are listed, too: a rule must allow them as well. None if they cannot be determined.
    commands: tuple[str, ...] | None
    coverage: tuple[str, ...]  # For each command that is not free; sorted. () if unclear.
    paths: tuple[str, ...]  # The known real paths in it; sorted.
    why: str  # One sentence for the approval request; "" if it is free.
    # The commands known to be in it, even if it is unclear: rules that deny match these.
    seen: tuple[str, ...] = ()
    # The commands that are not free by themselves: rules that allow must cover them.
    asked: tuple[str, ...] = ()


def judge(command: str, cwd: Path, inside: Sequence[Path], disk: PathDisk = _DISK) -> Judgement:
    """Judge one command line, to be run by bash in `cwd`. Never raises on any text."""
    from culm.shell.walk import walk  # Loads tree-sitter, which is slow, on first use.

    readable = ReadablePaths(inside, disk)
    real = readable.real("", str(cwd))
    start = None if real is None else (real,)
    report = _Report(readable, start)
    report.texts.append((command, start))
    # A shell in the text adds further text; each is walked on its own, not nested.
    for text, directories in report.texts:
        walk(text, directories, report)
    return report.judgement(command)


class _Report:
    """Collects everything that the walk reports into a judgement."""

    def __init__(self, readable: ReadablePaths, start: Directories) -> None:
        self._readable = readable
        self._commands: dict[str, bool] = {}  # True for a command that is not free by itself.
        self._coverage: set[str] = set()
        self._paths: set[str] = set()
        self._why = ""
        self._unclear = ""
        self._defined: set[str] = set()
        self._added = 0
        self._tails: list[str] = []
        self._start = start
        self.texts: list[tuple[str, Directories]] = []

    def judgement(self, text: str) -> Judgement:
        shadows = sorted(
            name for name in self._defined if name in TABLE or name in WRAPPERS or name in _UNCLEAR
        )
        if shadows:
            self.unclear(f"it redefines `{shadows[0]}`")
        commands = tuple(self._commands)
        seen = (*commands, *self._tails)
        paths = tuple(sorted(self._paths))
        if self._unclear:
            why = f"Cannot determine what it runs: {self._unclear}."
            return Judgement(
                is_free=False, commands=None, coverage=(), paths=paths, why=why, seen=seen
            )
        if self._why:
            # The coverage must not be empty, or every grant would cover the command.
            coverage = tuple(sorted(self._coverage)) or (text,)
            return Judgement(
                is_free=False,
                commands=commands,
                coverage=coverage,
                paths=paths,
                why=self._why,
                seen=seen,
                asked=tuple(one for one, is_asked in self._commands.items() if is_asked) or (text,),
            )
        return Judgement(is_free=True, commands=seen, coverage=(), paths=paths, why="", seen=seen)

    # Reports of the walk.

    def unclear(self, why: str) -> None:
        self._unclear = self._unclear or why

    def define(self, name: str) -> None:
        self._defined.add(name)
        self._coverage.add(f"function {name}")
        self._because("It defines a function.")

    def simple(self, command: SimpleCommand) -> Outcome:
        for assignment in command.assignments:
            self._assign(assignment.name, assignment.value, assignment.raw)
        if not command.words:
            return command.directories, command.directories
        return self._judge_simple(command.words, command.directories)

    def test(self, words: Sequence[Word], directories: Directories) -> None:
        texts = [word.text for word in words] or [None]
        if texts[0] == "[" and not _CONTROL_OPERATORS.isdisjoint(texts):
            # The grammar takes them as parts of the test, the shell does not.
            self.unclear("a test in it cannot be resolved")
        if texts[0] == "[[" and is_numeric_test(words) and None in texts:
            self.unclear("a test in it can run the value of a variable")
        self._check_subscripts(words)
        self._judge_listed("[", words, [word.text or word.raw for word in words], "[", directories)

    def redirect(self, operator: str, target: Word, directories: Directories) -> None:
        text = target.text
        if operator in (">&", "<&") and text is not None and text.rstrip("-").isdigit():
            return
        if operator == "<<<":
            if text is None and not target.is_printable:
                self._because("The text on its input is unknown.")
            return
        reading = ReadOnlyCheck(self._readable, directories)
        sign = "<" if operator == "<" else ">"
        try:
            if text is None or target.is_pattern:
                raise NotReadOnly("")
            reading.path(text)
        except NotReadOnly:
            self._add(f"{sign} {target.raw}")
            self.unclear("the target of a redirection is not literal")
            return
        self._paths.update(reading.real)
        wrong = reading.outside if sign == "<" else [path for path in reading.real if path != NULL]
        for path in wrong:
            self._add(f"{sign} {path}", f"{sign} {path}")
            verb = "reads from" if sign == "<" else "writes to"
            self._because(f"It {verb} `{path}`.")

    # Judging.

    def _because(self, why: str) -> None:
        self._why = self._why or why

    def _add(self, text: str, coverage: str | None = None, *, is_free: bool = False) -> None:
        self._added += 1
        if self._added > COMMANDS_MAX:
            self.unclear(f"it contains more than {COMMANDS_MAX} commands")
            return
        self._commands[text] = self._commands.get(text, False) or not is_free
        if coverage is not None:
            self._coverage.add(coverage)

    def _assign(self, name: str, value: Word, raw: str) -> None:
        text = value.text
        if name in _HARMLESS and text is not None and _HARMLESS_VALUE.issuperset(text):
            return
        self._add(raw, raw)
        self._because(f"It sets `{name}`, which can change the program that runs.")

    def _judge_simple(self, words: Sequence[Word], directories: Directories) -> Outcome:
        """Remove the wrappers of a simple command, then judge the rest."""
        prefix: list[str] = []  # The wrappers that are part of the report.
        same = (directories, directories)
        is_here = True  # It runs in this shell, not in a process of its own.
        for _ in range(WRAPPERS_MAX):
            name = words[0].text
            if name is None or words[0].is_pattern or name.split() != [name]:
                self._add(" ".join(word.raw for word in words))
                self.unclear("the name of a command is not literal")
                return same
            base = posixpath.basename(name)
            wrapper = WRAPPERS.get(base)
            if wrapper is None or (base == "command" and _is_lookup(words)):
                outcome = self._judge_unwrapped(words, directories, prefix)
                return outcome if is_here else same
            is_here = is_here and name in ("command", "builtin", "time")
            inner = unwrap(wrapper, words[1:])
            for assigned, value in inner.assigned:
                self._assign(assigned, value, value.raw)
            if not inner.is_clear:
                self._add(" ".join(word.raw for word in words))
                self.unclear(f"`{name}` has unknown options")
            # `env -i` removes the variables that keep a free command harmless.
            clears_environment = (
                base == "env" and len(words) > 1 and (words[1].text or "-").startswith("-")
            )
            if wrapper.is_reported or clears_environment or name != base:
                prefix.append(self._program_path(name, directories))
                self._because(f"`{name}` runs another command.")
                self._add(_joined(words))
            if not inner.words:
                if wrapper.default and inner.is_clear:
                    words = (Word(wrapper.default, wrapper.default),)
                    continue
                self._because(f"`{name}` is not in the table of read-only commands.")
                self._judge_unlisted(
                    words,
                    directories,
                    prefix[:-1] if wrapper.is_reported or clears_environment else prefix,
                )
                return same
            words = fill_in(words, inner.words) if base == "xargs" else inner.words
        self.unclear("it contains too many wrappers")
        return same

    def _judge_unwrapped(
        self, words: Sequence[Word], directories: Directories, prefix: list[str]
    ) -> Outcome:
        name = words[0].text or ""
        same = (directories, directories)
        if name in _UNCLEAR:
            self._add(_joined(words))
            self.unclear(f"`{name}` runs text as code or changes the meaning of words")
            return same
        if name in _SUBSCRIPTS:
            self._check_subscripts(words)
        if name == "cd":
            return self._change_directory(words, directories)
        if posixpath.basename(name) in _SHELLS and self._judge_shell(words, directories, prefix):
            return same
        line = _entry_name(words)
        if line:
            rest = words[2 if name == "command" else len(line.split()) :]
            self._judge_listed(
                line, rest, [_shown(word) for word in words], line, directories, prefix
            )
        elif name in VERSIONS and len(words) == 2 and words[1].text in VERSIONS[name]:
            self._add(_joined(words), is_free=True)
        else:
            self._because(f"`{_title(words)}` is not in the table of read-only commands.")
            self._judge_unlisted(words, directories, prefix)
        if name in ("pushd", "popd"):
            return None, None
        return same

    def _check_subscripts(self, words: Sequence[Word]) -> None:
        """Reject `a[$(…)]`: a builtin that takes a variable name runs the command in it."""
        for word in words:
            text = word.raw if word.text is None else word.text
            is_integer = text.startswith(("-", "+")) and ("i" in text or "n" in text)
            if ("[" in text and ("$" in text or "`" in text)) or (
                is_integer and words[0].text in ("declare", "typeset", "local")
            ):
                self.unclear("the name of a variable in it can run a command")

    def _judge_listed(
        self,
        line: str,
        rest: Sequence[Word],
        shown: Sequence[str],
        own_coverage: str,
        directories: Directories,
        prefix: Sequence[str] = (),
    ) -> None:
        """Judge a command that has an entry in the table."""
        reading = ReadOnlyCheck(self._readable, directories)
        text = " ".join(shown)
        try:
            check(line, rest, reading)
        except NotReadOnly as reason:
            self._because(f"`{line}` {reason}.")
            if line not in _PRINTERS:
                # With other options it may write, or run other programs.
                own_coverage = " ".join([line, *(word.raw for word in rest)])
            self._inner_commands(line, rest, directories)
        else:
            if not reading.outside and not prefix:
                self._add(text, is_free=True)
                self._paths.update(reading.real)
                return
            if reading.outside:
                outside = sorted(set(reading.outside))
                self._because(f"`{line}` reads outside the workspace: `{outside[0]}`.")
                own_coverage = " ".join([line, *outside])
        self._paths.update(reading.real)
        self._add(text, " ".join([*prefix, own_coverage]))

    def _inner_commands(self, line: str, rest: Sequence[Word], directories: Directories) -> None:
        """Judge the commands that `find` would run."""
        starts = [
            index + 1
            for index, word in enumerate(rest)
            if line == "find" and word.text in ("-exec", "-execdir", "-ok", "-okdir")
        ]
        for start in starts:
            inner: list[Word] = []
            for word in rest[start:]:
                if word.text in (";", "+"):
                    break
                inner.append(Word(word.raw, None) if "{}" in word.raw else word)
            if inner:
                self._judge_simple(inner, directories)

    def _judge_unlisted(
        self, words: Sequence[Word], directories: Directories, prefix: Sequence[str]
    ) -> None:
        """Judge a command that has no entry in the table."""
        name = words[0].text or ""
        shown = [_shown(word) for word in words]
        self._note_paths(words[1:] if name not in SUBCOMMANDS else words[2:], directories)
        length = runner_length(shown)
        if length and len(words) > length and not shown[length].startswith("-"):
            self._add(_joined(words))
            program = " ".join(shown[:length])
            self._judge_inner(words[length:], directories, [*prefix, program])
            return
        if runs_words(name):
            self._tails += [_joined(words[at:]) for at in range(1, min(len(words), TAILS_MAX))]
        program = self._program_path(name, directories)
        is_open = is_interpreter(name) or name in WRAPPERS
        if "xargs" in prefix and (is_open or (name in SUBCOMMANDS and len(words) == 1)):
            # `xargs` appends its input to these words, and the input names the program to run.
            self.unclear(f"the input of `{name}` decides what it runs")
        if is_interpreter(name):
            own = self._interpreter_coverage(words, program, directories)
        else:
            own, used = coverage_of(shown, program, [word.raw for word in words])
            if any(word.text is None for word in words[:used]):
                self.unclear(f"the subcommand of `{name}` is not literal")
        self._add(_joined(words), self._with_directory(" ".join([*prefix, own]), directories))

    def _with_directory(self, own: str, directories: Directories) -> str:
        """Return the coverage with the directory, unless the command runs in the first one."""
        if directories == self._start:
            return own
        return f"{own} in {' or '.join(directories or ('a directory that cannot be told',))}"

    def _judge_inner(
        self, words: Sequence[Word], directories: Directories, prefix: list[str]
    ) -> None:
        if words[0].text is None or (words[0].text in _UNCLEAR) or words[0].text in WRAPPERS:
            self.unclear("the name of a command is not literal")
        else:
            self._judge_unwrapped(words, directories, prefix)

    def _interpreter_coverage(
        self, words: Sequence[Word], program: str, directories: Directories
    ) -> str:
        shown = [_shown(word) for word in words]
        first = words[1].text if len(words) > 1 else None
        if len(words) == 1 or first == "-" or (first or "").startswith(("-s", "-i", "/dev/")):
            self.unclear(f"`{words[0].text}` runs its input")
        elif first is None:
            self.unclear(f"the script of `{words[0].text}` is not literal")
        elif first == "-m" and len(words) > 2 and words[2].text is not None:
            return " ".join([program, "-m", shown[2]])
        elif not first.startswith(("-", "+")):
            return " ".join([program, self._real(first, directories) or first])
        return " ".join([program, *(word.raw for word in words[1:])])

    def _judge_shell(
        self, words: Sequence[Word], directories: Directories, prefix: Sequence[str]
    ) -> bool:
        """Queue the text of `bash -c 'text'`. Return False for another use of a shell."""
        name, option = words[0].text or "", words[1].text if len(words) > 1 else None
        if option not in ("-c", "-lc", "-ec", "-cl", "-exc", "-xec", "-euc") or len(words) < 3:
            return False
        text = words[2].text
        # `bash -c -l text`: the text may come after another option.
        is_text = text is not None and not words[2].is_pattern and not text.startswith(("-", "+"))
        if text is None or not is_text or "xargs" in prefix:
            self._add(_joined(words))
            self.unclear(f"the text that `{name}` runs is not literal")
            return True
        if name != "bash" and any(sign in text for sign in _BASHISMS):
            self.unclear(f"`{name}` may parse the text differently from bash")
        if prefix or name != "bash" or option != "-c":
            self._because(f"`{name}` runs another command.")
            own = [*prefix, *(word.raw for word in words)]
            self._add(_joined(words), " ".join(own))
        if len(self.texts) >= TEXTS_MAX:
            self.unclear(f"it starts more than {TEXTS_MAX} shells")
        else:
            self.texts.append((text, directories))
        return True

    def _change_directory(self, words: Sequence[Word], directories: Directories) -> Outcome:
        """Judge `cd`, which changes the directory of later commands."""
        operands = list(words[1:])
        if operands and operands[0].text == "--":
            operands.pop(0)
        target = operands[0].text if len(operands) == 1 and not operands[0].is_pattern else None
        text = _joined(words)
        if not target or target.startswith("-") or directories is None:
            self._add(text, text)
            self._because("The target of `cd` is unknown.")
            return None, directories
        reached: list[str] = []
        outside: str | None = None
        for directory in directories:
            to = self._readable.resolve_cd(directory, target)
            if to is None:
                self._add(text, text)
                self._because(f"`{text}` goes through a symbolic link.")
                return None, directories
            reached.append(to)
            self._paths.add(to)
            if not self._readable.contains(to):
                self._because(f"`cd` leaves the workspace: `{to}`.")
                outside = f"cd {to}"
                self._coverage.add(outside)
        self._add(text, outside, is_free=outside is None)
        return tuple(dict.fromkeys(reached)), directories

    def _note_paths(self, words: Sequence[Word], directories: Directories) -> None:
        """Collect every word that could be a path, or has one after `=`, for rules about paths."""
        for word in words:
            text = word.text
            if text is None:
                continue
            if text.startswith("-"):
                text = text.partition("=")[2]
            real = self._real(text, directories) if text and not word.is_pattern else None
            if real is not None:
                self._paths.add(real)

    def _program_path(self, name: str, directories: Directories) -> str:
        """Return the real path of a program named by a path, else its name."""
        return (self._real(name, directories) or name) if "/" in name else name

    def _real(self, text: str, directories: Directories) -> str | None:
        if directories is None or len(directories) != 1:
            return text if text.startswith("/") else None
        return self._readable.real(directories[0], text)


def _is_lookup(words: Sequence[Word]) -> bool:
    return len(words) > 1 and words[1].text in ("-v", "-V")


def _entry_name(words: Sequence[Word]) -> str:
    """Return the name of the table entry for a command, or ""."""
    name = words[0].text or ""
    if name == "command":
        return "type"  # Only `command -v` gets here.
    if name != "git":
        return name if name in TABLE else ""
    for length in (3, 2):
        texts = [word.text or "" for word in words[:length]]
        line = " ".join(texts)
        if len(texts) == length and line in TABLE:
            return line
    return ""


def _title(words: Sequence[Word]) -> str:
    """Return the name of the command for a sentence."""
    name = words[0].text or ""
    second = words[1].text if len(words) > 1 else None
    return f"{name} {second}" if name in SUBCOMMANDS and second else name


def _shown(word: Word) -> str:
    return word.raw if word.text is None else word.text


def _joined(words: Sequence[Word]) -> str:
    return " ".join(_shown(word) for word in words)
