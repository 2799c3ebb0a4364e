"""Programs that run others, and the coverage of a lasting grant: a program and its subcommand.

For a program that runs other programs, or text passed to it, the coverage is limited to the
program or text that it runs.
"""

import posixpath
import re
from collections.abc import Sequence

from msgspec import Struct

from culm.shell.words import Word, names

# Programs whose first operand is a subcommand; the options named here take a value before it.
SUBCOMMANDS: dict[str, frozenset[str]] = {
    name: names(values)
    for name, values in {
        "git": "-C -c --git-dir --work-tree --namespace --exec-path --config-env",
        "npm": "--prefix -w --workspace",
        "pnpm": "-C --dir -F --filter",
        "yarn": "--cwd",
        "bun": "--cwd",
        "deno": "",
        "cargo": "-C --config --color -Z",
        "rustup": "",
        "go": "-C",
        "docker": "-H --host -c --context --config -l --log-level",
        "podman": "",
        "docker-compose": "-f --file -p --project-name",
        "kubectl": "-n --namespace --context --kubeconfig -s --server",
        "helm": "-n --namespace --kube-context",
        "terraform": "",
        "tofu": "",
        "pip": "--python",
        "pip3": "--python",
        "pipx": "",
        "poetry": "-C -P --directory --project",
        "uv": "--directory --project",
        "pdm": "",
        "hatch": "-e --env",
        "conda": "",
        "systemctl": "-H --host -M --machine",
        "service": "",
        "apt": "-o -c -t",
        "apt-get": "-o -c -t",
        "dnf": "",
        "yum": "",
        "apk": "",
        "pacman": "",
        "brew": "",
        "gh": "-R --repo",
        "glab": "-R --repo",
        "aws": "--profile --region --output --endpoint-url",
        "gcloud": "--project",
        "az": "",
        "gem": "",
        "bundle": "",
        "composer": "-d",
        "dotnet": "",
        "mvn": "",
        "gradle": "",
        "hg": "-R --cwd --config",
        "svn": "",
        "jj": "-R --repository",
        "just": "-f --justfile -d --working-directory",
        "nix": "",
        "flutter": "",
        "swift": "",
        "zig": "",
        "rails": "",
        "mix": "",
        "openssl": "",
        "ip": "",
    }.items()
}
# Subcommands that have subcommands of their own.
_TWO_WORDS: dict[str, frozenset[str]] = {
    "npm": names("run"),
    "pnpm": names("run"),
    "yarn": names("run"),
    "bun": names("run"),
    "docker": names("container image volume network"),
    "git": names("stash remote worktree"),
    "gh": names("pr issue repo run release workflow auth secret"),
    "kubectl": names("get describe delete apply create"),
    "aws": names("ec2 iam lambda sts"),
    "gcloud": names("compute"),
    "uv": names("pip tool"),
    "go": names("run mod"),
    "cargo": names("run"),
    "deno": names("run task"),
    "dotnet": names("run tool"),
}
# They may run their arguments or send data anywhere: a grant covers only the same text.
_EXACT = names(
    "awk gawk mawk nawk sed find ssh su watch parallel script expect chroot nsenter unshare"
    " systemd-run at batch crontab strace ltrace gdb make vim vi nvim emacs ed ex osascript sqlite"
    " psql mysql tar rsync scp sftp zsh fish ksh csh tcsh pwsh entr flock setpriv tmux screen socat"
    " nc curl wget"
)
_EXACT_SUBCOMMANDS: dict[str, frozenset[str]] = {
    "git": names("rebase bisect submodule filter-branch config difftool mergetool"),
    "docker": names("run exec compose"),
    "podman": names("run exec"),
    "docker-compose": names("run exec"),
    "kubectl": names("exec run"),
    "gh": names("api alias extension"),
    "aws": names("s3 s3api"),
    "nix": names("run shell develop eval"),
}
_INTERPRETERS = names(
    "python pypy node nodejs ruby perl php lua Rscript julia groovy tclsh ts-node tsx bash sh dash"
)
# `runner program …`: the coverage is that of the program. With an empty set no subcommand comes
# between.
RUNNERS: dict[str, frozenset[str]] = {
    "uv": names("run"),
    "uvx": names(""),
    "npx": names(""),
    "bunx": names(""),
    "poetry": names("run"),
    "pdm": names("run"),
    "hatch": names("run"),
    "pipenv": names("run"),
    "rye": names("run"),
    "bundle": names("exec"),
    "pnpm": names("exec dlx"),
    "npm": names("exec"),
    "yarn": names("dlx exec"),
}
# Subcommands, or parts of one, that any program may follow.
_RUN = names("run exec runner x eval shell ssh console dlx")
# Options that name a program to run, or settings that can name one; git accepts an abbreviated long
# option.
_NAMES_PROGRAM = re.compile(
    r"-c$|--?(?:exe|toolexec|vettool|conf|up|rece|templ|script-shell|shell|overlay)"
)


def is_interpreter(name: str) -> bool:
    return _family(name) in _INTERPRETERS


def runs_words(name: str) -> bool:
    """Return True if the program may run its arguments as a command."""
    return _family(name) in _EXACT


def _family(name: str) -> str:
    """Return the name without directory and version: `/usr/bin/python3.11` is a `python`."""
    return posixpath.basename(name).rstrip("0123456789.")


def runner_length(words: Sequence[str]) -> int:
    """Count the words before the program that a runner starts; 0 if this is not a runner."""
    kinds = RUNNERS.get(words[0])
    if kinds is None:
        return 0
    if not kinds:
        return 1
    return 2 if len(words) > 1 and words[1] in kinds else 0


def coverage_of(words: Sequence[str], program: str, written: Sequence[str]) -> tuple[str, int]:
    """Return the coverage of a command, and the number of its words that determine it.

    `written` are the same words with their quotes; `program` is the real path if the program is
    named by a path, else its name.
    """
    name = words[0]
    whole = " ".join([program, *written[1:]]), len(words)
    # A runner gets here if an option hides the program it runs.
    if _family(name) in _EXACT or runner_length(words):
        return whole
    values = SUBCOMMANDS.get(name)
    if values is None:
        return program, 1
    length = 1
    while length < len(words) and words[length].startswith("-"):
        length += 2 if words[length] in values else 1
    if length >= len(words):
        return whole
    second = words[length]
    if name == "git" and length > 1:
        return whole  # `-c` can name programs to run.
    if second in _EXACT_SUBCOMMANDS.get(name, ()) or any(map(_NAMES_PROGRAM.match, words[1:])):
        return whole
    has_two = second in _TWO_WORDS.get(name, ())
    following = words[length + 1 : length + 3]
    if has_two and following and (following[0].startswith("-") or following[0] in _RUN):
        return whole
    if not has_two and not _RUN.isdisjoint([second, *following]):
        return whole
    length += 2 if has_two else 1
    return " ".join(words[:length]), min(length, len(words))


# --- commands that run another command


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_DURATION = re.compile(r"[0-9.]+[smhd]?")


class Wrapper(Struct, frozen=True):
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


class Unwrapped(Struct, frozen=True):
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
