"""Commands that run another command, and how to find the inner command."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from culm.shell.words import Word

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_DURATION = re.compile(r"[0-9.]+[smhd]?")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The options of a wrapper, and its effect on the inner command."""

    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    leads: int = 0  # Operands before the command, such as the time of `timeout`.
    assigns: bool = False  # `NAME=value` may come before the command.
    # It does more than start the command: it is reported itself, and nothing under it is free.
    is_reported: bool = False
    default: str = ""  # The program that runs if no command is given; "" if none does.


def _wrapper(
    flags: str = "",
    values: str = "",
    *,
    leads: int = 0,
    assigns: bool = False,
    is_reported: bool = False,
    default: str = "",
) -> Wrapper:
    return Wrapper(
        frozenset(flags.split()), frozenset(values.split()), leads, assigns, is_reported, default
    )


WRAPPERS: dict[str, Wrapper] = {
    "nohup": _wrapper(),
    "setsid": _wrapper("-w -f --wait --fork", is_reported=True),
    "timeout": _wrapper(
        "--foreground --preserve-status -v --verbose", "-k -s --kill-after --signal", leads=1
    ),
    "nice": _wrapper("", "-n --adjustment"),
    "ionice": _wrapper("-t", "-c -n"),
    "stdbuf": _wrapper("", "-i -o -e --input --output --error"),
    "time": _wrapper("-p"),
    "command": _wrapper("-p"),
    "builtin": _wrapper(),
    "exec": _wrapper(),
    "env": _wrapper("-i - --ignore-environment", "-u --unset", assigns=True),
    "coproc": _wrapper(is_reported=True),
    "sudo": _wrapper("-n -E -H -S -b -k", "-u -g -p -C -h", assigns=True, is_reported=True),
    "doas": _wrapper("-n", "-u -C", is_reported=True),
    "busybox": _wrapper(is_reported=True),
    "xargs": _wrapper(
        "-0 -r -t -x --null --no-run-if-empty --verbose",
        "-n -P -I -L -d -s -E --max-args --max-procs --replace --max-lines --delimiter --max-chars",
        is_reported=True,
        default="echo",
    ),
}


@dataclass(frozen=True, slots=True)
class Unwrapped:
    words: Sequence[Word]  # The command inside; empty if there is none.
    assigned: Sequence[tuple[str, Word]] = ()
    is_clear: bool = True  # False if its own options are unknown, and so the command inside.


def unwrap(wrapper: Wrapper, words: Sequence[Word]) -> Unwrapped:
    """Remove the options and operands of a wrapper. `words` follow its name."""
    assigned: list[tuple[str, Word]] = []
    leads = wrapper.leads
    at = 0
    options = True
    while at < len(words):
        word = words[at]
        text = word.text
        if text is None and wrapper.assigns and _ASSIGNMENT.match(word.raw):
            assigned.append((word.raw.partition("=")[0], word))
        elif text is None or word.is_pattern:
            # An unknown word may be an option, or the command.
            return Unwrapped(words[at:], assigned, is_clear=False)
        elif options and text == "--":
            options = False
        elif options and text in wrapper.flags:
            pass
        elif options and text in wrapper.values:
            at += 1
        elif options and _is_attached(wrapper, text):
            pass
        elif options and text.startswith("-"):
            return Unwrapped(words[at + 1 :], assigned, is_clear=False)
        elif wrapper.assigns and (found := _ASSIGNMENT.fullmatch(text)):
            options = False
            assigned.append((found[1], Word(word.raw, found[2])))
        elif leads:
            options = False
            leads -= 1
            if not _DURATION.fullmatch(text):
                return Unwrapped(words[at:], assigned, is_clear=False)
        else:
            return Unwrapped(words[at:], assigned)
        at += 1
    return Unwrapped((), assigned, is_clear=at <= len(words))


def fill_in(words: Sequence[Word], inner: Sequence[Word]) -> Sequence[Word]:
    """Return the command of an `xargs`; words that `-I` fills from the input become unknown."""
    for index, word in enumerate(words[: len(words) - len(inner)]):
        text = word.text or ""
        mark = ""
        if text in ("-I", "--replace"):
            mark = words[index + 1].text or ""
        elif text.startswith("-I"):
            mark = text[2:]
        elif text.startswith("--replace="):
            mark = text.removeprefix("--replace=")
        if mark:
            return [Word(one.raw, None) if mark in one.raw else one for one in inner]
    return inner


def _is_attached(wrapper: Wrapper, text: str) -> bool:
    """Match `-n5`, `--signal=KILL`, and a cluster of flags such as `-0r`."""
    if text.startswith("--"):
        return "=" in text and text.partition("=")[0] in wrapper.values
    if not text.startswith("-") or len(text) == 1:
        return False
    if text[1:].isdigit():
        return "--adjustment" in wrapper.values  # `nice -5`
    return text[:2] in wrapper.values or all(f"-{one}" in wrapper.flags for one in text[1:])
