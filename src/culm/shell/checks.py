"""Checks of read-only commands whose operands are a language: find, sed, jq, test, printf, git.

Each check raises `NotReadOnly` unless it knows every part of the command.
"""

import re
from collections.abc import Callable, Sequence

from culm.shell.options import NotReadOnly, ReadOnlyCheck, check_operands, parse_options
from culm.shell.table import TABLE, ReadOnlyEntry
from culm.shell.words import Word, names

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
