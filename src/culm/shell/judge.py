"""What a shell command would run, and whether it only reads inside the workspace.

Owns the verdict. The walk over the tree tells of every simple command; here wrappers are looked
through, each command is held against the read-only table, and what is not free gets its grain. What
cannot be resolved is said to be so, never guessed.
"""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters, digits

from culm.shell.checks import check, is_numeric_test
from culm.shell.grains import SUBCOMMANDS, coverage_of, is_interpreter, runner_length, runs_words
from culm.shell.options import NotReadOnly, ReadOnlyCheck
from culm.shell.places import NULL, PathDisk, ReadablePaths, RealDisk
from culm.shell.script import Directories, Outcome, SimpleCommand
from culm.shell.table import TABLE, VERSIONS
from culm.shell.words import Word, names
from culm.shell.wrappers import WRAPPERS, fill_in, unwrap

COMMANDS_MAX = 1_000  # More than anybody reads; a text with more is asked about as a whole.
TEXTS_MAX = 16  # `bash -c` in `bash -c` in …
WRAPPERS_MAX = 12  # `nice nice nice …`
TAILS_MAX = 20  # `watch -n 1 …`: behind more words than that no command begins.

# They run text, or change what a later word means.
_UNCLEAR = names(
    "eval source . alias unalias trap shopt enable hash bind complete compgen fc history"
    " mapfile readarray let select function logout"
)
# They take names of variables.
_SUBSCRIPTS = names("declare typeset local readonly export unset read printf test [ wait getopts")
_PRINTING = names("[ echo printf")  # Whatever they are given, they do no more.
_CONTROL_OPERATORS = names("&& || ( ) < > ;")
_SHELLS = names("bash sh dash")
# What only some shells know; in the others it means something else.
_BASHISMS = ("&>", "|&", "$'", '$"', "<(", ">(", "<<<", "[[", "((", "{", "function", ";&", "==")
# They change nothing about which program runs, nor what it reads.
_HARMLESS = names(
    "LANG LANGUAGE LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME TZ NO_COLOR"
    " FORCE_COLOR CLICOLOR CLICOLOR_FORCE COLUMNS LINES TERM CI NODE_ENV RUST_BACKTRACE"
    " RUST_LOG DEBUG PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE"
)
_HARMLESS_VALUE = frozenset(f"{ascii_letters}{digits}_.,:@+=-*")

_DISK = RealDisk()


@dataclass(frozen=True, slots=True)
class Judgement:
    is_free: bool  # It reads inside the workspace, and does nothing else.
    # Every simple command, wrappers looked through, words joined by one blank. Redirections that
    # are not free (`> /real/path`) and assignments that can change what runs (`PATH=.`) stand
    # beside them, as further things a rule must allow. None if it cannot be told.
    commands: tuple[str, ...] | None
    coverage: tuple[str, ...]  # Of each command that is not free; sorted. () if it cannot be told.
    paths: tuple[str, ...]  # Real paths it names, as far as known; sorted.
    why: str  # One sentence, for the person who is asked; "" if it is free.
    # What is known to be in it even if not all can be told: rules that deny look here.
    seen: tuple[str, ...] = ()
    # Of the commands, those that are not free by themselves: rules that allow must cover them.
    asked: tuple[str, ...] = ()


def judge(command: str, cwd: Path, inside: Sequence[Path], disk: PathDisk = _DISK) -> Judgement:
    """Judge one command line, to be run by bash in `cwd`. Never raises on any text."""
    from culm.shell.walk import walk  # tree-sitter is paid for by the first command judged.

    places = ReadablePaths(inside, disk)
    real = places.real("", str(cwd))
    start = None if real is None else (real,)
    report = _Report(places, start)
    report.texts.append((command, start))
    # A shell in the text brings further text; each is walked on its own, not within another.
    for text, directories in report.texts:
        walk(text, directories, report)
    return report.judgement(command)


class _Report:
    """Told by the walk of everything that would run; adds it up."""

    def __init__(self, places: ReadablePaths, start: Directories) -> None:
        self._places = places
        self._commands: dict[str, bool] = {}  # And whether each is not free by itself.
        self._grains: set[str] = set()
        self._paths: set[str] = set()
        self._why = ""
        self._unclear = ""
        self._defined: set[str] = set()
        self._told = 0
        self._tails: list[str] = []
        self._start = start
        self.texts: list[tuple[str, Directories]] = []

    def judgement(self, text: str) -> Judgement:
        shadows = sorted(
            name for name in self._defined if name in TABLE or name in WRAPPERS or name in _UNCLEAR
        )
        if shadows:
            self.unclear(f"it defines `{shadows[0]}` anew")
        commands = tuple(self._commands)
        seen = (*commands, *self._tails)
        paths = tuple(sorted(self._paths))
        if self._unclear:
            why = f"What it runs cannot be told: {self._unclear}."
            return Judgement(
                is_free=False, commands=None, coverage=(), paths=paths, why=why, seen=seen
            )
        if self._why:
            # What is asked for always has a grain, or every grant would cover it.
            grains = tuple(sorted(self._grains)) or (text,)
            return Judgement(
                is_free=False,
                commands=commands,
                coverage=grains,
                paths=paths,
                why=self._why,
                seen=seen,
                asked=tuple(one for one, is_asked in self._commands.items() if is_asked) or (text,),
            )
        return Judgement(is_free=True, commands=seen, coverage=(), paths=paths, why="", seen=seen)

    # What the walk tells.

    def unclear(self, why: str) -> None:
        self._unclear = self._unclear or why

    def define(self, name: str) -> None:
        self._defined.add(name)
        self._grains.add(f"function {name}")
        self._because("It defines a function.")

    def simple(self, command: SimpleCommand) -> Outcome:
        for assignment in command.assignments:
            self._assign(assignment.name, assignment.value, assignment.raw)
        if not command.words:
            return command.directories, command.directories
        return self._run(command.words, command.directories)

    def test(self, words: Sequence[Word], directories: Directories) -> None:
        texts = [word.text for word in words] or [None]
        if texts[0] == "[" and not _CONTROL_OPERATORS.isdisjoint(texts):
            # The grammar takes them for parts of the test, the shell does not.
            self.unclear("a test in it cannot be resolved")
        if texts[0] == "[[" and is_numeric_test(words) and None in texts:
            self.unclear("a test in it can run what a variable holds")
        self._check_subscripts(words)
        self._judge_read("[", words, [word.text or word.raw for word in words], "[", directories)

    def redirect(self, operator: str, target: Word, directories: Directories) -> None:
        text = target.text
        if operator in (">&", "<&") and text is not None and text.rstrip("-").isdigit():
            return
        if operator == "<<<":
            if text is None and not target.is_printable:
                self._because("Text given to it on its input cannot be told.")
            return
        reading = ReadOnlyCheck(self._places, directories)
        sign = "<" if operator == "<" else ">"
        try:
            if text is None or target.is_pattern:
                raise NotReadOnly("")
            reading.path(text)
        except NotReadOnly:
            self._add(f"{sign} {target.raw}")
            self.unclear("the target of a redirection is not written out")
            return
        self._paths.update(reading.real)
        wrong = reading.outside if sign == "<" else [path for path in reading.real if path != NULL]
        for path in wrong:
            self._add(f"{sign} {path}", f"{sign} {path}")
            verb = "reads from" if sign == "<" else "writes to"
            self._because(f"It {verb} `{path}`.")

    # What is made of it.

    def _because(self, why: str) -> None:
        self._why = self._why or why

    def _add(self, text: str, grain_text: str | None = None, *, is_free: bool = False) -> None:
        self._told += 1
        if self._told > COMMANDS_MAX:
            self.unclear(f"it holds more than {COMMANDS_MAX} commands")
            return
        self._commands[text] = self._commands.get(text, False) or not is_free
        if grain_text is not None:
            self._grains.add(grain_text)

    def _assign(self, name: str, value: Word, raw: str) -> None:
        text = value.text
        if name in _HARMLESS and text is not None and _HARMLESS_VALUE.issuperset(text):
            return
        self._add(raw, raw)
        self._because(f"It sets `{name}`, which can change what runs.")

    def _run(self, words: Sequence[Word], directories: Directories) -> Outcome:
        """One simple command: look through its wrappers, then judge what is left."""
        prefix: list[str] = []  # Of wrappers that are part of what is told.
        same = (directories, directories)
        is_here = True  # In this shell, not in a process of its own.
        for _ in range(WRAPPERS_MAX):
            name = words[0].text
            if name is None or words[0].is_pattern or name.split() != [name]:
                self._add(" ".join(word.raw for word in words))
                self.unclear("the name of a command is not written out")
                return same
            base = posixpath.basename(name)
            wrapper = WRAPPERS.get(base)
            if wrapper is None or (base == "command" and _asks_only(words)):
                outcome = self._plain(words, directories, prefix)
                return outcome if is_here else same
            is_here = is_here and name in ("command", "builtin", "time")
            inner = unwrap(wrapper, words[1:])
            for assigned, value in inner.assigned:
                self._assign(assigned, value, value.raw)
            if not inner.is_clear:
                self._add(" ".join(word.raw for word in words))
                self.unclear(f"the options of `{name}` are not known")
            # `env -i` takes away what keeps a command harmless that nobody is asked about.
            bares = base == "env" and len(words) > 1 and (words[1].text or "-").startswith("-")
            if wrapper.is_shown or bares or name != base:
                prefix.append(self._program(name, directories))
                self._because(f"`{name}` runs another command.")
                self._add(_joined(words))
            if not inner.words:
                if wrapper.default and inner.is_clear:
                    words = (Word(wrapper.default, wrapper.default),)
                    continue
                self._because(f"`{name}` is not in the table of read-only commands.")
                self._other(
                    words, directories, prefix[:-1] if wrapper.is_shown or bares else prefix
                )
                return same
            words = fill_in(words, inner.words) if base == "xargs" else inner.words
        self.unclear("it holds too many wrappers")
        return same

    def _plain(self, words: Sequence[Word], directories: Directories, prefix: list[str]) -> Outcome:
        name = words[0].text or ""
        same = (directories, directories)
        if name in _UNCLEAR:
            self._add(_joined(words))
            self.unclear(f"`{name}` runs text or changes what words mean")
            return same
        if name in _SUBSCRIPTS:
            self._check_subscripts(words)
        if name == "cd":
            return self._turn(words, directories)
        if posixpath.basename(name) in _SHELLS and self._shell(words, directories, prefix):
            return same
        line = _line(words)
        if line:
            rest = words[2 if name == "command" else len(line.split()) :]
            self._judge_read(
                line, rest, [_shown(word) for word in words], line, directories, prefix
            )
        elif name in VERSIONS and len(words) == 2 and words[1].text in VERSIONS[name]:
            self._add(_joined(words), is_free=True)
        else:
            self._because(f"`{_title(words)}` is not in the table of read-only commands.")
            self._other(words, directories, prefix)
        if name in ("pushd", "popd"):
            return None, None
        return same

    def _check_subscripts(self, words: Sequence[Word]) -> None:
        """A builtin that takes the name of a variable takes `a[$(…)]`, too, and runs that."""
        for word in words:
            text = word.raw if word.text is None else word.text
            is_integer = text.startswith(("-", "+")) and ("i" in text or "n" in text)
            if ("[" in text and ("$" in text or "`" in text)) or (
                is_integer and words[0].text in ("declare", "typeset", "local")
            ):
                self.unclear("the name of a variable in it can run something")

    def _judge_read(
        self,
        line: str,
        rest: Sequence[Word],
        shown: Sequence[str],
        own_grain: str,
        directories: Directories,
        prefix: Sequence[str] = (),
    ) -> None:
        """A command of the table: is this use of it free?"""
        reading = ReadOnlyCheck(self._places, directories)
        text = " ".join(shown)
        try:
            check(line, rest, reading)
        except NotReadOnly as reason:
            self._because(f"`{line}` {reason}.")
            if line not in _PRINTING:
                # With other options it may write, or run what it is told to.
                own_grain = " ".join([line, *(word.raw for word in rest)])
            self._inner_commands(line, rest, directories)
        else:
            if not reading.outside and not prefix:
                self._add(text, is_free=True)
                self._paths.update(reading.real)
                return
            if reading.outside:
                outside = sorted(set(reading.outside))
                self._because(f"`{line}` reads outside the workspace: `{outside[0]}`.")
                own_grain = " ".join([line, *outside])
        self._paths.update(reading.real)
        self._add(text, " ".join([*prefix, own_grain]))

    def _inner_commands(self, line: str, rest: Sequence[Word], directories: Directories) -> None:
        """What `find` would run, told on its own."""
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
                self._run(inner, directories)

    def _other(
        self, words: Sequence[Word], directories: Directories, prefix: Sequence[str]
    ) -> None:
        """A command that is not in the table: told of, with its grain."""
        name = words[0].text or ""
        shown = [_shown(word) for word in words]
        self._note_paths(words[1:] if name not in SUBCOMMANDS else words[2:], directories)
        length = runner_length(shown)
        if length and len(words) > length and not shown[length].startswith("-"):
            self._add(_joined(words))
            program = " ".join(shown[:length])
            self._run_inner(words[length:], directories, [*prefix, program])
            return
        if runs_words(name):
            self._tails += [_joined(words[at:]) for at in range(1, min(len(words), TAILS_MAX))]
        program = self._program(name, directories)
        is_open = is_interpreter(name) or name in WRAPPERS
        if "xargs" in prefix and (is_open or (name in SUBCOMMANDS and len(words) == 1)):
            # What is read stands after these words, and says what to run.
            self.unclear(f"`{name}` is told by its input what to do")
        if is_interpreter(name):
            own = self._interpreted(words, program, directories)
        else:
            own, used = coverage_of(shown, program, [word.raw for word in words])
            if any(word.text is None for word in words[:used]):
                self.unclear(f"what `{name}` is to do is not written out")
        self._add(_joined(words), self._placed(" ".join([*prefix, own]), directories))

    def _placed(self, own: str, directories: Directories) -> str:
        """A grain of a command that runs elsewhere than where the text begins."""
        if directories == self._start:
            return own
        return f"{own} in {' or '.join(directories or ('a directory that cannot be told',))}"

    def _run_inner(
        self, words: Sequence[Word], directories: Directories, prefix: list[str]
    ) -> None:
        if words[0].text is None or (words[0].text in _UNCLEAR) or words[0].text in WRAPPERS:
            self.unclear("the name of a command is not written out")
        else:
            self._plain(words, directories, prefix)

    def _interpreted(self, words: Sequence[Word], program: str, directories: Directories) -> str:
        shown = [_shown(word) for word in words]
        first = words[1].text if len(words) > 1 else None
        if len(words) == 1 or first == "-" or (first or "").startswith(("-s", "-i", "/dev/")):
            self.unclear(f"`{words[0].text}` runs what it reads")
        elif first is None:
            self.unclear(f"what `{words[0].text}` runs is not written out")
        elif first == "-m" and len(words) > 2 and words[2].text is not None:
            return " ".join([program, "-m", shown[2]])
        elif not first.startswith(("-", "+")):
            return " ".join([program, self._real(first, directories) or first])
        return " ".join([program, *(word.raw for word in words[1:])])

    def _shell(
        self, words: Sequence[Word], directories: Directories, prefix: Sequence[str]
    ) -> bool:
        """`bash -c 'text'`, walked as the text it is. False if it is another use of a shell."""
        name, option = words[0].text or "", words[1].text if len(words) > 1 else None
        if option not in ("-c", "-lc", "-ec", "-cl", "-exc", "-xec", "-euc") or len(words) < 3:
            return False
        text = words[2].text
        # `bash -c -l text`: an option may come between, and the text after it.
        is_text = text is not None and not words[2].is_pattern and not text.startswith(("-", "+"))
        if text is None or not is_text or "xargs" in prefix:
            self._add(_joined(words))
            self.unclear(f"the text that `{name}` runs is not written out")
            return True
        if name != "bash" and any(sign in text for sign in _BASHISMS):
            self.unclear(f"`{name}` may read the text in another way")
        if prefix or name != "bash" or option != "-c":
            self._because(f"`{name}` runs another command.")
            own = [*prefix, *(word.raw for word in words)]
            self._add(_joined(words), " ".join(own))
        if len(self.texts) >= TEXTS_MAX:
            self.unclear(f"it starts more than {TEXTS_MAX} shells")
        else:
            self.texts.append((text, directories))
        return True

    def _turn(self, words: Sequence[Word], directories: Directories) -> Outcome:
        """`cd`: what follows runs elsewhere."""
        operands = list(words[1:])
        if operands and operands[0].text == "--":
            operands.pop(0)
        target = operands[0].text if len(operands) == 1 and not operands[0].is_pattern else None
        text = _joined(words)
        if not target or target.startswith("-") or directories is None:
            self._add(text, text)
            self._because("Where `cd` leads cannot be told.")
            return None, directories
        turned: list[str] = []
        outside: str | None = None
        for directory in directories:
            to = self._places.turned(directory, target)
            if to is None:
                self._add(text, text)
                self._because(f"`{text}` goes by a link.")
                return None, directories
            turned.append(to)
            self._paths.add(to)
            if not self._places.contains(to):
                self._because(f"`cd` leaves the workspace: `{to}`.")
                outside = f"cd {to}"
                self._grains.add(outside)
        self._add(text, outside, is_free=outside is None)
        return tuple(dict.fromkeys(turned)), directories

    def _note_paths(self, words: Sequence[Word], directories: Directories) -> None:
        """For rules about paths: every word that could be one, or ends in one after `=`."""
        for word in words:
            text = word.text
            if text is None:
                continue
            if text.startswith("-"):
                text = text.partition("=")[2]
            real = self._real(text, directories) if text and not word.is_pattern else None
            if real is not None:
                self._paths.add(real)

    def _program(self, name: str, directories: Directories) -> str:
        """A program named by a path is where it really lies; another is its name."""
        return (self._real(name, directories) or name) if "/" in name else name

    def _real(self, text: str, directories: Directories) -> str | None:
        if directories is None or len(directories) != 1:
            return text if text.startswith("/") else None
        return self._places.real(directories[0], text)


def _asks_only(words: Sequence[Word]) -> bool:
    return len(words) > 1 and words[1].text in ("-v", "-V")


def _line(words: Sequence[Word]) -> str:
    """The line of the table that a command belongs to, or ""."""
    name = words[0].text or ""
    if name == "command":
        return "type"  # Only `command -v` comes here.
    if name != "git":
        return name if name in TABLE else ""
    for length in (3, 2):
        texts = [word.text or "" for word in words[:length]]
        line = " ".join(texts)
        if len(texts) == length and line in TABLE:
            return line
    return ""


def _title(words: Sequence[Word]) -> str:
    """How a person would name the command in a sentence."""
    name = words[0].text or ""
    second = words[1].text if len(words) > 1 else None
    return f"{name} {second}" if name in SUBCOMMANDS and second else name


def _shown(word: Word) -> str:
    return word.raw if word.text is None else word.text


def _joined(words: Sequence[Word]) -> str:
    return " ".join(_shown(word) for word in words)
