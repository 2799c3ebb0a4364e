"""Checks of read-only commands: their options, and operands that are a language.

The language is that of find, sed, jq, test, printf or git. Each check raises
`NotReadOnly` unless it knows every part of the command.
"""

import re
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from culm.shell.paths import NULL, ReadablePaths
from culm.shell.table import TABLE, ReadOnlyEntry
from culm.shell.words import Directories, Word, names

_NUMBER = re.compile(r"-[0-9]+")


class NotReadOnly(Exception):
    """The reason for asking, as the end of a sentence that begins with the command."""


class ReadOnlyCheck(Struct):
    """The check of one command; collects the resolved paths that it names."""

    readable: ReadablePaths
    directories: Directories
    real: list[str] = field(default_factory=list[str])
    outside: list[str] = field(default_factory=list[str])

    def check_directories(self) -> Sequence[str]:
        """Check the working directory, which many commands read by default."""
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        self.outside += [path for path in self.directories if not self.readable.contains(path)]
        return self.directories

    def path(self, text: str) -> None:
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        for directory in self.directories:
            real = self.readable.real(directory, text)
            if real is None:
                raise NotReadOnly(f"names a path that cannot be resolved: {_short(text)}")
            self.real.append(real)
            if real != NULL and not self.readable.contains(real):
                self.outside.append(real)

    def with_entries(self, text: str) -> list[str]:
        """Return a path, and its entries if it is a directory."""
        found = [text]
        for directory in self.directories or ():
            names = self.readable.names(directory, text)
            if names is None:
                raise NotReadOnly(f"names a directory with too many entries: {_short(text)}")
            found += [f"{text}/{name}" for name in names]
        return found

    def known(self, word: Word) -> str:
        if word.text is None:
            raise NotReadOnly(f"has an argument with an unknown value: {_short(word.raw)}")
        return word.text

    def expanded(self, word: Word) -> list[str]:
        """Return the words that the shell replaces this one with."""
        text = self.known(word)
        if not word.is_pattern:
            return [text]
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        found: list[str] = []
        for directory in self.directories:
            matches = self.readable.matches(directory, text)
            if matches is None:
                raise NotReadOnly(f"has a pattern that matches too many files: {_short(text)}")
            found += matches
        for match in found:
            # A file name can look like an option, and a match may be anywhere.
            if match.startswith("-"):
                raise NotReadOnly(f"has a pattern that matches an option: {_short(match)}")
            self.path(match)
        return found


class ParsedOptions(Struct):
    """The words of a command, sorted into options and operands."""

    options: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    operands: list[str] = field(default_factory=list[str])

    def has(self, *names: str) -> bool:
        return any(option in names for option, _ in self.options)


def parse_options(
    entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck
) -> ParsedOptions:
    """Sort the words after the name. Raises `NotReadOnly` on one that the entry does not list."""
    return _OptionParser(entry, reading, list(reversed(words))).parse()


class _OptionParser(Struct):
    entry: ReadOnlyEntry
    reading: ReadOnlyCheck
    pending: list[Word]  # The words that are left, the next one last.
    parsed: ParsedOptions = field(default_factory=ParsedOptions)

    def parse(self) -> ParsedOptions:
        operands = self.parsed.operands
        while self.pending:
            word = self.pending.pop()
            text = self.reading.known(word)
            if word.is_pattern:
                operands += self.reading.expanded(word)
            elif text == "--":
                while self.pending:
                    operands += self.reading.expanded(self.pending.pop())
            elif text == "-" or not text.startswith("-"):
                operands.append(text)
            elif self.entry.numbers and _NUMBER.fullmatch(text):
                self._add(text, None)
            elif text.startswith("--"):
                self._long(text)
            else:
                self._cluster(text)
        if len(operands) > self.entry.operands_max:
            raise NotReadOnly("has more operands than it reads")
        return self.parsed

    def _add(self, name: str, value: str | None) -> None:
        self.parsed.options.append((name, value))

    def _long(self, text: str) -> None:
        entry = self.entry
        name, equals, value = text.partition("=")
        if equals and (name in entry.values or name in entry.optional):
            self._add(name, value)
        elif equals and name in entry.paths:
            self.reading.path(value)
            self._add(name, value)
        elif not equals and (name in entry.flags or name in entry.optional):
            self._add(name, None)
        elif not equals and (name in entry.values or name in entry.paths):
            self._add(name, self._value(name))
        else:
            raise NotReadOnly(f"has an option that is not in the table: {_short(name)}")

    def _cluster(self, text: str) -> None:
        """Parse a cluster of short options: `-la`, `-n5`, `-n 5`."""
        entry = self.entry
        if text in entry.flags:
            self._add(text, None)
            return
        for index, letter in enumerate(text[1:], 2):
            name = f"-{letter}"
            rest = text[index:]
            if name in entry.flags:
                self._add(name, None)
                continue
            if name in entry.optional:
                self._add(name, rest)
            elif name in entry.values or name in entry.paths:
                if rest and name in entry.paths:
                    self.reading.path(rest)
                self._add(name, rest or self._value(name))
            else:
                raise NotReadOnly(f"has an option that is not in the table: {_short(name)}")
            return

    def _value(self, name: str) -> str:
        if not self.pending:
            raise NotReadOnly(f"has an option without its value: {name}")
        word = self.pending.pop()
        value = self.reading.known(word)
        if word.is_pattern:
            raise NotReadOnly(f"has a pattern as the value of an option: {_short(value)}")
        # If the program on this machine takes no value here, or stops parsing options at its first
        # operand, the word is an operand: it must be harmless as a path, too.
        is_pattern = name in self.entry.patterns and not self.parsed.operands
        if name in self.entry.paths or not (is_pattern or len(value) == 1):
            self.reading.path(value)
        return value


def check_operands(entry: ReadOnlyEntry, parsed: ParsedOptions, reading: ReadOnlyCheck) -> None:
    """Check the operands of an entry without a check of its own."""
    match entry.operands:
        case "paths":
            paths = parsed.operands
        case "pattern":
            named = parsed.has(*entry.patterns, "-f", "--file", "--files", "--type-list")
            paths = parsed.operands if named else parsed.operands[1:]
        case "none" if parsed.operands:
            raise NotReadOnly(f"has an operand: {_short(parsed.operands[0])}")
        case _:
            paths = []
    for path in paths:
        reading.path(path)


def _short(text: str) -> str:
    shown = text if len(text) <= 60 else f"{text[:57]}…"
    return f"`{shown}`"


# --- the checks of single commands


_FIND_ALONE = names(
    "-empty -print -print0 -prune -o -a -or -and -not ! ( ) -ls -quit -true -false -executable"
    " -readable -writable -xdev -mount -daystart -depth -d -nouser -nogroup -noleaf ,"
)
_FIND_VALUE = names(
    "-name -iname -path -ipath -wholename -iwholename -type -xtype -size -mtime -mmin -atime -amin"
    " -ctime -cmin -maxdepth -mindepth -perm -user -group -regex -iregex -regextype -links -inum"
    " -lname -ilname -newermt -uid -gid -printf -fstype -used"
)
_FIND_PATH = names("-newer -anewer -cnewer -samefile")

_ADDRESS = r"(?:[0-9]+(?:~[0-9]+)?|\$|/(?:[^/\\\n]|\\[^\n])*/I?)"
_RANGE = rf"(?:{_ADDRESS}(?:,(?:{_ADDRESS}|\+[0-9]+))?)?"
_SUBSTITUTE = (
    r"s(?P<d>[/|#,:@!])(?P<old>(?:(?!(?P=d))[^\\\n]|\\[^\n])*)(?P=d)"
    r"(?P<new>(?:(?!(?P=d))[^\\\n]|\\[^\n])*)(?P=d)[gpiI0-9]*"
)
_SED_COMMAND = re.compile(
    rf"\s*(?P<range>{_RANGE})\s*!?\s*(?:[pdqDPNnGgHhxl=]|{_SUBSTITUTE})\s*(?:;|\n|$)"
)
# Bracket expressions that every sed ends at the same place.
_BRACKETS = re.compile(r"\\.|\[(?!\^\])\^?(?:[^][\\/]|\[:[a-z]+:\])+\]")

_JQ_REFUSED = re.compile(r"env|ENV|import|include|modulemeta|input_filename|get_search_list|\$__")
_FORMAT = re.compile(r"(?:[^%]|%%|%[-+ #0]*[0-9]*(?:\.[0-9]+)?[sdiouxXqbcfFeEgG])*")
_SIGNATURE = re.compile(r"%G|signature", re.IGNORECASE)

_TEST_UNARY = names("-e -f -d -r -w -x -s -h -L -b -c -p -S -g -u -k -z -n")
_TEST_BINARY = names("= == != -nt -ot -ef && || ! ( ) [ ] [[ ]]")
_TEST_NUMERIC = names("-eq -ne -lt -le -gt -ge")
_TEST_OPERAND = re.compile(r"[A-Za-z0-9_./:@%+, -]*")
_NUMERIC_OPERAND = re.compile(r"[0-9]*")
_SETTINGS = names("-e +e -u +u -f -eu -ue -euo -o +o pipefail errexit nounset noglob")


def check_find(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    pending = list(reversed(words))
    in_expression = False
    while pending:
        word = pending.pop()
        if word.is_pattern:
            reading.expanded(word)
            if in_expression:
                raise NotReadOnly("has a pattern that the shell expands")
            continue
        text = reading.known(word)
        if not in_expression and text in ("-H", "-P"):
            continue
        if text.startswith("-") or text in ("!", "(", ")", ","):
            in_expression = True
        elif not in_expression:
            reading.path(text)
            continue
        if text in _FIND_VALUE or text in _FIND_PATH:
            value = pending.pop() if pending else Word("", None)
            known = reading.known(value)
            if value.is_pattern:
                reading.expanded(value)
                raise NotReadOnly("has a pattern that the shell expands")
            if text in _FIND_PATH:
                reading.path(known)
        elif text not in _FIND_ALONE:
            raise NotReadOnly(f"has a part that is not in the table: `{text[:60]}`")


def check_sed(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    scripts: list[str] = []
    rest: list[Word] = []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        text = reading.known(word)
        if text in ("-e", "--expression", "-ne", "-nE", "-En", "-nr", "-rn"):
            if "e" in text:
                scripts.append(reading.known(pending.pop() if pending else Word("", None)))
                if rest:
                    raise NotReadOnly("has an option after its operands")
        elif text in entry.flags:
            continue
        elif text.startswith("-") and text != "-":
            raise NotReadOnly(f"has an option that is not in the table: `{text[:60]}`")
        else:
            rest.append(word)
    if not scripts and rest:
        if rest[0].is_pattern:
            raise NotReadOnly("has a pattern that the shell expands")
        scripts.append(reading.known(rest.pop(0)))
    for word in rest:
        for path in reading.expanded(word):
            reading.path(path)
    for script in scripts:
        _check_sed_script(script)


def _check_sed_script(script: str) -> None:
    at = 0
    while at < len(script):
        found = _SED_COMMAND.match(script, at)
        if found is None or found.end() == at:
            raise NotReadOnly("has a script that may do more than print")
        # Versions of sed differ on a delimiter in brackets, which could end the expression early.
        for part in (found["range"], found["old"]):
            if part and "[" in _BRACKETS.sub("", part):
                raise NotReadOnly("has a script that may do more than print")
        at = found.end()


def check_jq(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    for text in parsed.operands[:1]:
        if _JQ_REFUSED.search(text):
            raise NotReadOnly("has a filter that may read the environment or other files")
    for path in parsed.operands[1:]:
        reading.path(path)


def check_echo(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    for word in words:
        if not word.is_printable:
            reading.expanded(word)


def check_printf(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    rest = list(words)
    if rest and rest[0].text == "--":
        rest.pop(0)
    form = reading.known(rest[0]) if rest else ""
    if rest and (rest[0].is_pattern or form.startswith("-") or not _FORMAT.fullmatch(form)):
        raise NotReadOnly("has a format that may do more than print")
    check_echo(entry, rest[1:], reading)


def check_test(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    """Allow `test`, `[` and `[[` with literal operands and operators that only read."""
    # Operands of numeric tests are arithmetic, which can run the value of a variable.
    allowed = _NUMERIC_OPERAND if is_numeric_test(words) else _TEST_OPERAND
    for word in words:
        if word.is_printable and word.raw in ("$?", '"$?"', "$#", '"$#"'):
            continue
        text = reading.known(word)
        if text in _TEST_UNARY or text in _TEST_BINARY or text in _TEST_NUMERIC:
            continue
        if text.startswith("-") or not allowed.fullmatch(text) or word.is_pattern:
            raise NotReadOnly(f"has a part that is not in the table: `{text[:60]}`")
        reading.path(text)


def is_numeric_test(words: Sequence[Word]) -> bool:
    return any(word.text in _TEST_NUMERIC for word in words)


def check_set(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    texts = [reading.known(word) for word in words]
    ends_open = bool(texts) and texts[-1].endswith("o") and texts[-1][0] in "-+"
    if not texts or ends_open or any(text not in _SETTINGS for text in texts):
        raise NotReadOnly("shows or changes more than the settings in the table")


def check_date(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    if any(not operand.startswith("+") for operand in parsed.operands):
        raise NotReadOnly("could set the clock")


def check_ps(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    # Some versions show the environment of processes.
    if any("env" in (value or "").lower() for _, value in parsed.options):
        raise NotReadOnly("may show the environment of processes")
    if any(operand not in ("aux", "ax", "axu", "u", "x") for operand in parsed.operands):
        raise NotReadOnly("has an operand that is not in the table")


def check_diff(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    """Check the entries of directories, too: diff compares them and follows links there."""
    for operand in parse_options(entry, words, reading).operands:
        for path in reading.with_entries(operand):
            reading.path(path)


def check_strings(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    if any(operand.startswith("@") for operand in parsed.operands):
        raise NotReadOnly("would read further arguments from a file")
    check_operands(entry, parsed, reading)


def check_git_list(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    """Refuse `git branch` and `git tag` with a name alone, which would create one."""
    parsed = parse_options(entry, words, reading)
    listing = ("--list", "--contains", "--no-contains", "--merged", "--no-merged")
    # In older versions `git branch -l` creates a branch, so `-l` is not in its entry.
    if parsed.operands and not parsed.has("-l", *listing):
        raise NotReadOnly("with a name creates or changes something")


def check_git_reflog(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    if parsed.operands and parsed.operands[0] != "show":
        raise NotReadOnly("has an operand that is not in the table")


def check_git_grep(entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    parsed = parse_options(entry, words, reading)
    for path in parsed.operands if parsed.has("-e") else parsed.operands[1:]:
        reading.path(path)


_CHECKS: dict[str, Callable[[ReadOnlyEntry, Sequence[Word], ReadOnlyCheck], None]] = {
    "find": check_find,
    "sed": check_sed,
    "jq": check_jq,
    "echo": check_echo,
    "printf": check_printf,
    "test": check_test,
    "[": check_test,
    "[[": check_test,
    "set": check_set,
    "date": check_date,
    "ps": check_ps,
    "diff": check_diff,
    "strings": check_strings,
    "git branch": check_git_list,
    "git tag": check_git_list,
    "git reflog": check_git_reflog,
    "git grep": check_git_grep,
}


def check(name: str, words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    """Raise `NotReadOnly` unless the command, an entry and the words after it, only reads."""
    entry = TABLE[name]
    if entry.operands not in ("text", "names"):
        reading.check_directories()
    special = _CHECKS.get(name)
    if special is not None:
        special(entry, words, reading)
    else:
        check_operands(entry, parse_options(entry, words, reading), reading)
    if name.startswith("git "):
        _check_git(words, reading)


def _check_git(words: Sequence[Word], reading: ReadOnlyCheck) -> None:
    # A format can request signatures, which runs the program that the configuration names.
    if any(_SIGNATURE.search(word.text or "") for word in words):
        raise NotReadOnly("may run a program to check signatures")
    for directory in reading.directories or ():
        if not reading.readable.owns_repository(directory):
            raise NotReadOnly("would use a repository that is not the workspace's own")
